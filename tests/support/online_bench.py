"""Online stores for tests: over both databases, filled by real syncs, asked through request files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml
from support.serving_bench import amend, opened, pipeline_of
from support.workbench import Workbench, table_source, write_workbench

from headway.features.online import OnlineStore
from headway.features.online.answer import OnlineComputed, OnlineFeatures
from headway.features.online.store import RowVersion, StoreKey
from headway.features.online.sync import SyncReport, sync_online
from headway.loading import Pipeline
from headway.services import Services
from headway.serving.requests import read_requests

MINUTE = 60_000_000
HOUR = 60 * MINUTE
DAY = 24 * HOUR
ALL = 10**16
COLUMNS = {"k": "string", "id": "int64", "at": "timestamp", "known": "timestamp", "value": "float64"}
LATEST = {"value": {"latest": "value"}}


def us(text: str) -> int:
    """Microseconds UTC of an ISO 8601 time; without an offset it is UTC."""
    moment = datetime.fromisoformat(text if text.endswith("Z") or "+" in text else f"{text}+00:00")
    return round(moment.timestamp() * 1_000_000)


@dataclass
class OnlineBench:
    """A pipeline, its services with a clock that the test sets, and a store."""

    bench: Workbench
    services: Services
    pipeline: Pipeline
    online: OnlineStore
    now: int = 0

    def at(self, now: int) -> "OnlineBench":
        """Set the world's clock."""
        self.now = now
        return self

    def sync(self, **how: Any) -> SyncReport:  # noqa: ANN401
        """Sync at the world's time."""
        return sync_online(replace(self.services, world=lambda: self.now), self.pipeline, self.online, **how)

    def features(self) -> OnlineFeatures:
        """A reader of the store, as a server has one."""
        return OnlineFeatures(self.pipeline, self.online, self.services.principal.tenant)

    def requests(self, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
        """Requests as a file would bring them."""
        file = self.bench.folder.parent / "asked.json"
        file.write_text(json.dumps(list(rows)))
        return read_requests(file, self.pipeline.spec)

    def ask(self, *rows: Mapping[str, Any]) -> OnlineComputed:
        """Features of requests at the world's time."""
        return self.features().compute(self.requests(rows), self.now)

    def deliver(self, source: str, file: str, content: str, *partitions: str) -> None:
        """Replace a file and ingest its source (some partitions of it) again."""
        (self.bench.folder / file).write_text(content)
        self.bench.ingest(source, partitions=partitions)


@contextmanager
def online_bench(bench: Workbench, online: OnlineStore, now: int = 0) -> Iterator[OnlineBench]:
    """Open a written pipeline with a store."""
    with opened(bench) as services:
        yield OnlineBench(bench, services, pipeline_of(bench), online, now)


def write_asked(
    root: Path,
    data: str,
    views: Mapping[str, Mapping[str, Any]],
    *,
    columns: Mapping[str, Any] | None = None,
    row_id: Sequence[str] = ("id",),
    keys: Sequence[str] = ("k",),
    source: Mapping[str, Any] | None = None,
    request: Mapping[str, str] | None = None,
    start: str = "2022-01-01",
    groups: Mapping[str, Any] | None = None,
) -> Workbench:
    """A pipeline over one source `data`, asked by fields that fill label columns (name -> type), at the time `t`."""
    asked = dict(request or {"k": "string"})
    bench = write_workbench(
        root,
        sources={"data": table_source(columns or COLUMNS, row_id, keys, **(source or {}))},
        views=views,
        files={"data.csv": data, "labels.csv": "label_id,t," + ",".join(asked) + ",target\n"},
        label_columns={name: {"type": kind, "known_at": "t"} for name, kind in asked.items()},
        partition={"start": start},
    )
    fields = {name: {"type": kind, "column": name, "required": True} for name, kind in asked.items()}
    serving: dict[str, Any] = {
        "observed": "t",
        "before": "1us",
        "request": {**fields, "t": {"type": "timestamp", "required": True}},
    }
    amend(bench, serving=serving | ({"groups": dict(groups)} if groups else {}))
    return bench


def view(**more: object) -> dict[str, Any]:
    """A view of the newest value of a key."""
    return {"source": "data", "keys": {"k": "k"}, "boundary": "le", "features": LATEST, **more}


def declared(bench: Workbench) -> dict[str, Any]:
    """The declaration's attributes."""
    return yaml.safe_load((bench.folder / "defs.yaml").read_text())["attributes"]


def row_version(
    entity: bytes, identity: bytes, *, event: int, known: int, position: int, partition: str = "p", version: int = 1
) -> RowVersion:
    """A row version with a payload that says where it stood."""
    payload = f"{partition}/{version}/{position}".encode()
    return RowVersion("s", entity, identity, partition, version, position, event, known, 0, False, payload)


def key_of(tenant: str, feature_set_version: int = 1) -> StoreKey:
    """A key of a tenant."""
    return StoreKey(tenant, "pipeline", feature_set_version)
