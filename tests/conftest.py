"""Fixtures that several test folders share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.postgres import Postgres, copied_catalog, running_postgres

from headway.catalog import open_catalog


@pytest.fixture(scope="session", autouse=True)
def no_inherited_settings() -> Iterator[None]:
    """Settings of the shell that started the tests must not reach them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("HEADWAY_")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A real PostgreSQL server of this test worker; missing programs are an error with the line to type."""
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database, once on SQLite and once on PostgreSQL."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'catalog.db'}"
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = server.fresh_database()
    yield url
    server.drop_database(url)


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite catalog to copy from."""
    file = tmp_path_factory.mktemp("migrated") / "catalog.db"
    open_catalog(f"sqlite:///{file}").close()
    return file


@pytest.fixture(scope="session")
def migrated_postgres(postgres: Postgres) -> str:
    """The URL of a migrated PostgreSQL catalog to copy from."""
    url = postgres.fresh_database()
    open_catalog(url).close()
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def catalog_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a fresh catalog without tenants, once on SQLite and once on PostgreSQL."""
    yield from copied_catalog(request, tmp_path, "migrated_sqlite", "migrated_postgres")
