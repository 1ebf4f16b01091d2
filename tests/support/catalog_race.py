"""Two transactions at once, the first held at a labelled point until the database makes the second wait."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import sqlalchemy as sa
from support.catalog_facts import Ticker

from headway.catalog import open_catalog
from headway.catalog.catalog import Catalog

WAIT = 60.0


class Gate:
    """A probe that holds the first command at one point until it is opened."""

    def __init__(self, point: str) -> None:
        self._point = point
        self._open = threading.Event()
        self.reached = threading.Event()

    def __call__(self, reached: str) -> None:
        if reached == self._point:
            self.reached.set()
            assert self._open.wait(WAIT)

    def open(self) -> None:
        """Let the held command go on."""
        self._open.set()


def race(
    url: str,
    workers: ThreadPoolExecutor,
    point: str,
    first: Callable[[Catalog], object],
    second: Callable[[Catalog], object],
) -> "tuple[Future[object], Future[object]]":
    """Hold `first` at `point`, start `second`, wait until the database makes it wait, then open the gate."""
    gate = Gate(point)
    begun = threading.Event()
    held = open_catalog(url, Ticker(), gate)
    free = open_catalog(url, Ticker(), lambda reached: begun.set() if reached == "begun" else None)
    try:
        one = workers.submit(first, held)
        assert gate.reached.wait(WAIT)
        two = workers.submit(second, free)
        _until_waiting(url, begun)
        assert not two.done()
        gate.open()
        one.exception(WAIT)
        two.exception(WAIT)
    finally:
        gate.open()
        held.close()
        free.close()
    return one, two


def _until_waiting(url: str, begun: threading.Event) -> None:
    if url.startswith("sqlite"):
        # The second writer waits for BEGIN IMMEDIATE, so it never gets as far as its first point.
        assert not begun.wait(0.3)
        return
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"), isolation_level="AUTOCOMMIT")
    waiting = sa.text(
        "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) "
        "WHERE NOT granted AND datname = current_database()"
    )
    with engine.connect() as connection:
        for _ in range(2_000):
            if connection.execute(waiting).scalar_one() > 0:
                break
            threading.Event().wait(0.01)
        else:
            raise AssertionError("the second transaction never waited for the first")
    engine.dispose()
