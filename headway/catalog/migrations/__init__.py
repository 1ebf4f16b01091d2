"""Alembic revisions of the catalog, run from code; there is no loose configuration file."""
