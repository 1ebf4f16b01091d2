"""Brings a database to the newest revision, one process at a time, in one transaction."""

from pathlib import Path

import sqlalchemy as sa

from headway.catalog.database import Database
from headway.catalog.errors import SchemaTooNew
from headway.catalog.tables import HEAD

_SCRIPTS = Path(__file__).parent / "migrations"


def migrate(database: Database) -> None:
    """Migrate to `HEAD`; nothing happens when the database is there already.

    Raises:
        SchemaTooNew: the database is at a revision that this code does not know.
        CatalogBusy: another process held the migration lock past the deadline.
    """
    with database.plain() as connection:
        if revision(connection) == HEAD:
            return
    with database.migrating() as connection:
        found = revision(connection)
        if found != HEAD:
            _upgrade(connection, found)


def revision(connection: sa.Connection) -> str | None:
    """Return the revision that the database is at, None when it has no catalog."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one_or_none()


def _upgrade(connection: sa.Connection, found: str | None) -> None:
    # Alembic takes a quarter of a second to import; an up-to-date database never needs it.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        raise SchemaTooNew(found, HEAD)
    command.upgrade(config, "head")
