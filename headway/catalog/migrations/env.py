"""Alembic's entry: it migrates on the connection, and inside the transaction, that `headway.catalog.migrate` opened."""

from alembic import context

from headway.catalog.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
