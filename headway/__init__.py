"""The platform: catalog, artifacts, datasets, features. It imports no Dagster."""
