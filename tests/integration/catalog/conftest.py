"""A catalog that serves a version already, made once per database and copied for each test."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.catalog_facts import Ticker
from support.catalog_monitoring import serve
from support.postgres import Postgres, copied_catalog

from headway.catalog import open_catalog


def _serve(url: str) -> None:
    catalog = open_catalog(url, Ticker())
    serve(catalog)
    catalog.close()


@pytest.fixture(scope="session")
def served_sqlite(tmp_path_factory: pytest.TempPathFactory, migrated_sqlite: Path) -> Path:
    """An SQLite catalog to copy from, with a version promoted to the endpoint."""
    file = tmp_path_factory.mktemp("served") / "catalog.db"
    shutil.copy(migrated_sqlite, file)
    _serve(f"sqlite:///{file}")
    return file


@pytest.fixture(scope="session")
def served_postgres(postgres: Postgres, migrated_postgres: str) -> str:
    """The URL of a PostgreSQL catalog to copy from, with a version promoted to the endpoint."""
    url = postgres.fresh_database(migrated_postgres)
    _serve(url)
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def served_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a catalog with a version promoted to the endpoint, once on SQLite and once on PostgreSQL."""
    yield from copied_catalog(request, tmp_path, "served_sqlite", "served_postgres")


@pytest.fixture
def workers() -> Iterator[ThreadPoolExecutor]:
    """A few threads for commands that run at once."""
    with ThreadPoolExecutor(4) as pool:
        yield pool
