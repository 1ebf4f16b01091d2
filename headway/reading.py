"""What a home holds, for notebooks and scripts: Arrow tables and data frames, verified on the way, nothing written.

    import headway

    home = headway.open()
    flights = home.dataset("flight_delay", "flights").to_pandas(partitions=["2013-11-01"])
    home.runs("flight_delay")

Bytes are named by their sha256 in the catalog and checked before they are decoded, so what was changed in the store is
refused and never read. Times are instants in UTC. No torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pandas as pd
import pyarrow as pa
from sqlalchemy.engine import make_url

from headway.catalog.errors import UnknownRun
from headway.datasets.rows import dataset_name, load_rows
from headway.errors import HeadwayError
from headway.home import PREFIX, Settings, load_settings
from headway.services import Services, connect

if TYPE_CHECKING:
    from datetime import datetime

    from headway.catalog import DatasetVersion, FeatureSnapshot
    from headway.catalog.registry_facts import Prediction
    from headway.catalog.run_facts import TrainingRun

_PAGE = 10_000
_ALL_RUNS = 1_000_000
_RUN = ("run_id", "pipeline", "as_of", "status", "attempts", "nodes", "seed", "worker_seconds", "reason", "created_at")
_PREDICTION = (
    "prediction_id",
    "probability",
    "model",
    "version",
    "epoch",
    "status",
    "feature_status",
    "source",
    "asked_at",
    "observed_at",
)


class NoHome(HeadwayError):
    """A folder without a catalog: there is nothing to read, and reading makes none."""


class NothingToRead(HeadwayError):
    """A dataset, pipeline, partition, run or endpoint of which the catalog knows nothing."""


class NotPublished(HeadwayError):
    """A partition whose snapshot was refused: its features exist nowhere."""


def open_reader(home: Path | str | None = None) -> Reader:
    """Open a home for reading; without `home` the one that the settings name.

    Raises:
        NoHome: nothing was ever kept there.
        CatalogUnavailable: the database cannot be reached.
    """
    environ = dict(os.environ) if home is None else {**os.environ, f"{PREFIX}HOME": str(home)}
    settings = load_settings(environ)
    database = make_url(settings.database_url)
    if database.get_backend_name() == "sqlite" and not Path(database.database or "").is_file():
        raise NoHome(
            f"there is no catalog {database.database}",
            "give the folder that HEADWAY_HOME names; `make demo` or the first materialization fills it",
        )
    return Reader(settings, connect(settings))


class Reader:
    """An open home. Use it in a `with` block, or `close()` it; each answer is read anew from the catalog."""

    def __init__(self, settings: Settings, services: Services) -> None:
        self._settings = settings
        self._services = services

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<headway home {self._settings.home}, tenant {self._services.principal.tenant}>"

    def close(self) -> None:
        """Give back the catalog's connections."""
        self._services.close()

    def dataset(self, pipeline: str, source: str) -> Dataset:
        """The current dataset versions of a source, one per partition.

        Raises:
            NothingToRead: no version was ever registered under that name.
        """
        name = dataset_name(pipeline, source)
        current = self._services.catalog.current_many(self._services.principal, name)
        if not current:
            raise NothingToRead(
                f"the catalog knows no dataset {name!r}", f"`headway datasets list -p {pipeline}` shows what there is"
            )
        return Dataset(self._services, name, current)

    def snapshots(self, pipeline: str) -> Snapshots:
        """The current feature snapshots of a pipeline, one per partition.

        Raises:
            NothingToRead: none was ever built.
        """
        states = self._services.catalog.current_snapshots(self._services.principal, pipeline)
        if not states:
            raise NothingToRead(
                f"the catalog knows no snapshot of {pipeline!r}", f"`headway snapshots list -p {pipeline}` shows them"
            )
        published = {p: s.snapshot for p, s in states.items() if s.status == "published" and s.snapshot is not None}
        refused = {p: s.reason or s.status for p, s in states.items() if p not in published}
        return Snapshots(self._services, pipeline, published, refused)

    def runs(self, pipeline: str | None = None) -> pd.DataFrame:
        """Training runs, the newest first; a column `metric.<name>` for each metric that a run reported."""
        runs = self._services.catalog.runs(self._services.principal, pipeline, limit=_ALL_RUNS)
        columns = [
            "run_id",
            "pipeline",
            "as_of",
            "status",
            "attempts",
            "nodes",
            "seed",
            "worker_seconds",
            "reason",
            "created_at",
        ]
        return _frame([_run_row(run) for run in runs], columns, times=["created_at"])

    def curve(self, run: str) -> pd.DataFrame:
        """Losses of a run by epoch, over all of its attempts; `run` is an id or its first characters.

        Raises:
            NothingToRead: no run, or more than one, begins like that.
        """
        from headway.training.describe import loss_curve

        ids = self._services.catalog.run_ids(self._services.principal, run) if run else []
        if len(ids) != 1:
            raise NothingToRead(f"{run!r} begins the ids of {len(ids)} runs", "`headway runs list` shows them")
        try:
            found = self._services.catalog.run(self._services.principal, ids[0])
        except UnknownRun as error:
            raise NothingToRead(f"there is no run {run!r}", "`headway runs list` shows them") from error
        rows = [vars(epoch) for epoch in loss_curve(self._services, found)]
        return _frame(rows, ["epoch", "train_loss", "valid_loss", "valid_auc", "best"])

    def versions(self, model: str | None = None) -> pd.DataFrame:
        """Model versions with their standing, what serves them, and the digest that names each artifact."""
        from headway.registry.card import serving, standing

        found = self._services.catalog.model_versions(self._services.principal, model)
        rows = [
            {
                "model": version.model_id,
                "version": version.version,
                "kind": version.kind,
                "as_of": version.facts.as_of,
                "standing": standing(self._services, version),
                "serves": ", ".join(f"{s['endpoint']}: {s['as']}" for s in serving(self._services, version)),
                "run_id": version.run_id,
                "artifact_digest": version.manifest_digest,
                "created_at": version.created_at,
            }
            for version in found
        ]
        columns = ["model", "version", "kind", "as_of", "standing", "serves", "run_id", "artifact_digest", "created_at"]
        return _frame(rows, columns, times=["created_at"])

    def gates(self, model: str, version: int) -> pd.DataFrame:
        """What every gate said of a version, and on which signed statement, in the order in which it was recorded.

        Raises:
            UnknownModel: there is no such version.
        """
        catalog, principal = self._services.catalog, self._services.principal
        catalog.model_version(principal, model, version)
        rows = [
            {"gate": r.gate, "verdict": r.verdict, "reason": r.reason, "statement": r.statement_digest, "at": r.at}
            for r in catalog.gate_results(principal, model, version)
        ]
        return _frame(rows, ["gate", "verdict", "reason", "statement", "at"], times=["at"])

    def predictions(
        self, endpoint: str, start: datetime | str | None = None, end: datetime | str | None = None
    ) -> pd.DataFrame:
        """Recorded answers of an endpoint that were asked in [start, end), in the order in which they were made.

        Answers of a running server appear once they are shipped. `headway predict` keeps no time of asking: of its
        answers `asked_at` is when they were recorded. Times without a zone are read as UTC.

        Raises:
            NothingToRead: there is no such endpoint.
        """
        catalog, principal = self._services.catalog, self._services.principal
        if catalog.endpoint(principal, endpoint) is None:
            known = [e.endpoint_id for e in catalog.endpoints(principal)]
            raise NothingToRead(f"there is no endpoint {endpoint!r}", f"endpoints are {known}")
        first = None if start is None else _microseconds(start)
        last = None if end is None else _microseconds(end)
        ids = catalog.prediction_ids(principal, "")
        pages = (catalog.predictions_by_id(principal, ids[i : i + _PAGE]) for i in range(0, len(ids), _PAGE))
        rows = [_prediction_row(p) for page in pages for _, p in sorted(page.items()) if p.endpoint_id == endpoint]
        kept = [r for r in rows if (first is None or r["asked_at"] >= first) and (last is None or r["asked_at"] < last)]
        return _frame(kept, _PREDICTION, times=["asked_at", "observed_at"])


@dataclass(frozen=True)
class Dataset:
    """The current versions of a source as they were when it was opened, by partition ("" for a whole table)."""

    _services: Services
    name: str
    _current: Mapping[str, DatasetVersion]

    def partitions(self) -> list[str]:
        """Partitions that may be read: those whose current version is released."""
        return [p for p, v in self._current.items() if v.status == "released"]

    def versions(self) -> pd.DataFrame:
        """Number, status, reason, rows and content digest of each partition's current version."""
        rows = [
            {
                "partition": partition,
                "version": v.version,
                "status": v.status,
                "reason": v.status_reason,
                "rows": v.rows,
                "content_digest": v.content_digest,
                "created_at": v.created_at,
            }
            for partition, v in self._current.items()
        ]
        columns = ["partition", "version", "status", "reason", "rows", "content_digest", "created_at"]
        return _frame(rows, columns, times=["created_at"])

    def to_arrow(self, partitions: Sequence[str] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Rows of the partitions (all of them without `partitions`), without those in quarantine.

        Raises:
            NothingToRead: a partition or column does not exist.
            NotReleased: a partition is quarantined or was never validated; `partitions()` lists those that can be read.
            BlobMissing, BlobCorrupt: the store does not hold what the catalog says.
        """
        wanted = list(self._current) if partitions is None else _known(partitions, self._current, self.name)
        tables = [_plain(load_rows(self._services, self._current[p])) for p in wanted]
        return _concatenated(tables, columns, self.name)

    def to_pandas(self, partitions: Sequence[str] | None = None, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """As `to_arrow`, as a data frame."""
        return self.to_arrow(partitions, columns).to_pandas()


@dataclass(frozen=True)
class Snapshots:
    """The current feature snapshots of a pipeline as they were when it was opened, by partition."""

    _services: Services
    name: str
    _published: Mapping[str, FeatureSnapshot]
    _refused: Mapping[str, str]

    def partitions(self) -> list[str]:
        """Partitions with a published snapshot."""
        return list(self._published)

    def versions(self) -> pd.DataFrame:
        """Status, id, rows, feature set version and content digest of each partition; why it was refused."""
        rows: list[dict[str, Any]] = [
            {
                "partition": partition,
                "status": "published",
                "snapshot_id": s.snapshot_id,
                "rows": s.rows,
                "feature_set_version": s.feature_set_version,
                "content_digest": s.content_digest,
                "reason": "",
            }
            for partition, s in self._published.items()
        ]
        rows += [{"partition": p, "status": "refused", "rows": 0, "reason": why} for p, why in self._refused.items()]
        columns = ["partition", "status", "snapshot_id", "rows", "feature_set_version", "content_digest", "reason"]
        return _frame(sorted(rows, key=lambda row: row["partition"]), columns)

    def to_arrow(self, partitions: Sequence[str] | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Features and labels, one row per label row, of the partitions (all that are published without any).

        Raises:
            NothingToRead: a partition or column does not exist.
            NotPublished: a partition asked for by name was refused.
            BlobMissing, BlobCorrupt: the store does not hold what the catalog says.
        """
        from headway.features.reading import read_values

        wanted = self.partitions() if partitions is None else list(partitions)
        for partition in wanted:
            if partition in self._refused:
                raise NotPublished(
                    f"the snapshot of {self.name} {partition} was refused: {self._refused[partition]}",
                    "partitions() lists those that can be read",
                )
        _known(wanted, self._published, self.name)
        tables = [_plain(read_values(self._services, self._published[p])) for p in wanted]
        return _concatenated(tables, columns, self.name)

    def to_pandas(self, partitions: Sequence[str] | None = None, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """As `to_arrow`, as a data frame."""
        return self.to_arrow(partitions, columns).to_pandas()


def _known(asked: Sequence[str], there: Mapping[str, object], name: str) -> list[str]:
    if isinstance(asked, str):
        raise NothingToRead(f"partitions is the text {asked!r}", "give a list, such as ['2013-11-01']")
    for partition in asked:
        if partition not in there:
            keys = list(there)
            shown = f"{keys[0]} to {keys[-1]}, {len(keys)} of them" if keys else "none"
            raise NothingToRead(f"{name} has no partition {partition!r}", f"partitions are {shown}")
    return list(asked)


def _plain(table: pa.Table) -> pa.Table:
    """Text as text: dictionaries differ from partition to partition, and surprise whoever groups by them."""
    fields = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields))


def _concatenated(tables: list[pa.Table], columns: Sequence[str] | None, name: str) -> pa.Table:
    if not tables:
        raise NothingToRead(f"{name}: no partition was asked for, or none can be read", "partitions() lists them")
    table = pa.concat_tables(tables, promote_options="default").replace_schema_metadata(None)
    for column in columns or ():
        if column not in table.column_names:
            raise NothingToRead(f"{name} has no column {column!r}", f"columns are {table.column_names}")
    return table if columns is None else table.select(list(columns))


def _run_row(run: TrainingRun) -> dict[str, Any]:
    metrics: Mapping[str, Any] = {} if run.result is None else run.result.metrics
    return {
        "run_id": run.run_id,
        "pipeline": run.facts.pipeline,
        "as_of": run.facts.partition,
        "status": run.status,
        "attempts": len(run.attempts),
        "nodes": run.facts.nodes,
        "seed": run.facts.seed,
        "worker_seconds": run.worker_seconds,
        "reason": run.last.reason or "",
        "created_at": run.created_at,
        **{f"metric.{name}": value for name, value in metrics.items()},
    }


def _prediction_row(p: Prediction) -> dict[str, Any]:
    output = p.output if isinstance(p.output, Mapping) else {}
    told = (
        p.prediction_id,
        output.get("probability") if p.score is None else p.score,
        p.model_id,
        p.model_version,
        p.endpoint_epoch,
        p.status,
        p.feature_status,
        p.source,
        p.at if p.asked_at is None else p.asked_at,
        p.observed_at,
    )
    return dict(zip(_PREDICTION, told, strict=True))


def _frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], times: Iterable[str] = ()) -> pd.DataFrame:
    """A data frame with at least `columns`, in their order, also without rows; `times` are microseconds UTC."""
    more = dict.fromkeys(name for row in rows for name in row if name not in columns)
    frame = pd.DataFrame(list(rows), columns=[*columns, *more])
    for name in times:
        frame[name] = pd.to_datetime(frame[name].astype("Int64"), unit="us", utc=True)
    return frame


def _microseconds(moment: datetime | str) -> int:
    stamp = pd.Timestamp(moment)
    stamp = stamp.tz_localize("UTC") if stamp.tzinfo is None else stamp.tz_convert("UTC")
    return stamp.value // 1_000
