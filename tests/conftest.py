"""Fixtures that several test folders share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.postgres import Postgres, running_postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A real PostgreSQL server of this test worker; missing programs are an error with the line to type."""
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def catalog_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a fresh, empty database, once on SQLite and once on PostgreSQL."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'catalog.db'}"
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = server.fresh_database()
    yield url
    server.drop_database(url)
