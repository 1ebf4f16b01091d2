"""Code that runs inside training workers: it imports neither Dagster nor the platform."""
