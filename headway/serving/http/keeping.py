"""Keeps the online store current while a server runs, and reaches the catalog whenever it is there.

Both are what a server can do without for a while: it answers from what is loaded and says how old that is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy.engine import make_url

from headway.catalog.errors import CatalogUnavailable
from headway.errors import HeadwayError
from headway.features.online.sync import sync_online
from headway.services import Services, connect
from headway.serving.http.logs import log
from headway.world import replayed_time

if TYPE_CHECKING:
    from headway.features.online.store import OnlineStore
    from headway.features.online.sync import SyncReport
    from headway.home import Settings
    from headway.loading import Pipeline

# A sync that finds nothing new costs some 15 ms of processor time.
EVERY_S = 5.0
LOOK_S = 0.25
# A catalog that is away is not asked by every request in turn.
AGAIN_S = 1.0


class LateServices:
    """The services of the settings, opened when the catalog first answers. For several threads.

    A catalog file that is gone is not made anew where a server of this name has served from it: it is away.
    """

    def __init__(self, settings: Settings, name: str = "default") -> None:
        self._settings = settings
        self._pointers = settings.serving_folder / name / "pointer"
        self._lock = threading.Lock()
        self._found: Services | None = None
        self._failed_at = float("-inf")

    def get(self) -> Services:
        """The services. Raises `CatalogUnavailable` while the catalog does not answer."""
        if self._found is not None:
            return self._found
        with self._lock:
            if self._found is None:
                if time.monotonic() - self._failed_at < AGAIN_S:
                    raise CatalogUnavailable("it did not answer a moment ago")
                try:
                    self._check_there()
                    self._found = connect(self._settings)
                except CatalogUnavailable:
                    self._failed_at = time.monotonic()
                    raise
            return self._found

    def _check_there(self) -> None:
        url = make_url(self._settings.database_url)
        if url.get_backend_name() != "sqlite" or Path(str(url.database)).exists():
            return
        if any(self._pointers.glob("*.json")):
            raise CatalogUnavailable(f"there is no {url.database}")

    def accept(self, pipelines: Mapping[str, Pipeline], endpoint: str, items: Sequence[object]) -> Sequence[Any]:
        """Take labels as `LabelDesk.accept` does, on behalf of the settings' tenant."""
        from headway.monitoring.labels import LabelDesk

        services = self.get()
        return LabelDesk(services, pipelines.__getitem__).accept(services.principal, endpoint, items)

    def close(self) -> None:
        """Give back the connections."""
        if self._found is not None:
            self._found.close()


class OnlineKeeper:
    """A thread that syncs the online store every few seconds, and at once when a replay's clock moves.

    What cannot be had now (the catalog, the store, a source, room on a disk) is logged once per kind, and tried again.
    """

    def __init__(
        self, settings: Settings, services: LateServices, pipelines: Sequence[Pipeline], online: OnlineStore
    ) -> None:
        self._clock = settings.clock_file
        self._services = services
        self._pipelines = pipelines
        self._online = online
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="online", daemon=True)
        self._trouble: dict[str, str] = {}

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, wait_s: float) -> None:
        """End after the sync that is under way, if that ends in time; a sync may be cut off anywhere."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            clock, until = self._replayed(), time.monotonic() + EVERY_S
            while time.monotonic() < until and self._replayed() == clock:
                if self._stop.wait(LOOK_S):
                    return
            for pipeline in self._pipelines:
                self._sync(pipeline)

    def _replayed(self) -> int | None:
        try:
            return replayed_time(self._clock)
        except (HeadwayError, OSError):
            # The sync that follows says it by name.
            return None

    def _sync(self, pipeline: Pipeline) -> None:
        try:
            report = sync_online(self._services.get(), pipeline, self._online)
        except Exception as error:  # noqa: BLE001 - without this thread, every feature would grow old in silence
            kind = type(error).__name__
            if self._trouble.get(pipeline.name) != kind:
                places = None if isinstance(error, HeadwayError) else error
                log("online_sync_failed", logging.WARNING, places, pipeline=pipeline.name, kind=kind)
            self._trouble[pipeline.name] = kind
            return
        if self._trouble.pop(pipeline.name, None) is not None:
            log("online_sync_works_again", pipeline=pipeline.name)
        if report.rows_written or report.versions_read:
            log("online_synced", **synced(pipeline, report))


def synced(pipeline: Pipeline, report: SyncReport) -> dict[str, Any]:
    """The figures of a sync, for its line."""
    return {
        "pipeline": pipeline.name,
        "rows_read": report.rows_read,
        "rows_written": report.rows_written,
        "versions_read": report.versions_read,
        "skipped": {source: len(partitions) for source, partitions in report.skipped.items()},
        "seconds": round(report.seconds, 3),
    }
