"""Snapshot-like Parquet in a store, and run specs over it: small, with the shape of the flight pipeline's snapshots.

Two categories and some numbers decide about the target, one of them only together, so that a network can beat logistic
regression. Some numbers are missing, some labels are known late.
"""

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from trainer.artifact import write_network
from trainer.baselines import fit_logistic
from trainer.blobs import Manifest, ManifestEntry, code_tree_digest, digest_bytes, parse_manifest
from trainer.data import Dataset, load_data
from trainer.models.factory import build_model, code_parts
from trainer.spec import DataFile, DataSpec, LayoutSpec, ModelSpec, RunSpec

ROOT = Path(__file__).resolve().parents[2]

DAY = 86_400_000_000
START = int(datetime(2013, 3, 1, tzinfo=UTC).timestamp() * 1_000_000)
CATEGORICAL = ("carrier", "origin", "dest")
NUMERIC = (
    "distance",
    "departure_minute",
    "weather__temp",
    "weather__visib",
    "arrivals__mean_delay_3h",
    "arrivals__count_3h",
    "plane__seats",
)


def snapshot_table(day: int, rows: int, seed: int = 0) -> pa.Table:
    """One day's values table: identity, times, target, inputs, and columns that a model must not take."""
    random = np.random.default_rng([seed, day])
    carrier, origin = random.integers(0, 6, rows), random.integers(0, 3, rows)
    dest = random.integers(0, 12, rows)
    minute = random.integers(300, 1380, rows)
    delay = random.gamma(1.5, 12.0, rows) - 10
    temp, visib = random.normal(55, 18, rows), random.choice([10.0, 10.0, 10.0, 3.0, 0.5], rows)
    count = random.poisson(20, rows)
    seats = random.choice([55.0, 149.0, 200.0], rows)
    logit = -2.2 + 0.05 * delay + 0.15 * (carrier - 2) + np.where(minute > 1000, 0.8, -0.2)
    logit += np.where((origin == 1) ^ (visib < 5), 0.9, -0.9) + np.where((delay > 10) & (count > 20), 1.0, 0.0)
    late = random.random(rows) < 1 / (1 + np.exp(-logit))
    observed = START + day * DAY + minute * 60_000_000
    known = observed + random.integers(120, 600, rows) * 60_000_000
    stamp = pa.timestamp("us", tz="UTC")
    names = np.array(["AA", "B6", "DL", "EV", "UA", "WN"])
    gone = random.random(rows)
    return pa.table(
        {
            "flight_id": [f"{day:03d}-{i:05d}" for i in range(rows)],
            "late": pa.array(late.astype(np.int64)),
            "arrived_at": pa.array(known, stamp),
            "carrier": names[carrier],
            "origin": np.array(["EWR", "JFK", "LGA"])[origin],
            "dest": pa.array([None if g < 0.01 else f"D{d:02d}" for d, g in zip(dest, gone, strict=True)], pa.string()),
            "observed_at": pa.array(observed, stamp),
            "distance": pa.array(200 + 150 * dest, pa.int64()),
            "departure_minute": pa.array(minute, pa.int64()),
            "weather__temp": pa.array(temp, mask=gone > 0.97),
            "weather__visib": pa.array(visib),
            "arrivals__mean_delay_3h": pa.array(delay, mask=(gone > 0.05) & (gone < 0.12)),
            "arrivals__count_3h": pa.array(count, pa.int64()),
            "plane__seats": pa.array(seats, mask=(gone > 0.2) & (gone < 0.35)),
            "weather__temp__event_time": pa.array(observed, stamp),
            "weather__temp__reason": pa.array(["ok"] * rows),
            "weather__incomplete": pa.array(np.zeros(rows, np.bool_)),
        }
    )


def put_table(store: Path, table: pa.Table, partition: str) -> DataFile:
    """Store a table as one Parquet blob where the platform's store would keep it."""
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    content = sink.getvalue()
    digits = hashlib.sha256(content).hexdigest()
    path = store / "sha256" / digits[:2] / digits[2:]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return DataFile(partition, f"sha256:{digits}", len(content), table.num_rows)


def put_days(store: Path, tables: Sequence[pa.Table]) -> tuple[DataFile, ...]:
    """One blob per day."""
    return tuple(put_table(store, table, day_of(number)) for number, table in enumerate(tables))


def day_of(number: int) -> str:
    """Name of the partition of a day."""
    return (datetime(2013, 3, 1, tzinfo=UTC) + timedelta(days=number)).date().isoformat()


def data_spec(files: Sequence[DataFile], days: int, valid_days: int) -> DataSpec:
    """All `days` up to the cut; the last `valid_days` decide when to stop."""
    return DataSpec(
        files=tuple(files),
        identity=("flight_id",),
        target="late",
        observed_at="observed_at",
        known_at="arrived_at",
        cut=START + days * DAY,
        validation_from=START + (days - valid_days) * DAY,
        categorical=CATEGORICAL,
        numeric=NUMERIC,
    )


def model_spec(
    code_root: Path = ROOT, pipeline: str = "flight_delay", options: Mapping[str, Any] | None = None
) -> ModelSpec:
    """The network of the flight pipeline, in the code as it is now."""
    return ModelSpec(
        file=f"pipelines/{pipeline}/model.py",
        function="build",
        code_digest=code_tree_digest(code_root, code_parts(pipeline)),
        options={"width": 16, "blocks": 1, "dropout": 0.0, **(options or {})},
    )


def training_run(
    store: Path, *, days: int = 8, valid_days: int = 2, rows: int = 150, seed: int = 0, **changes: object
) -> RunSpec:
    """A spec over freshly stored synthetic days. `changes` replace fields of the spec."""
    files = put_days(store, [snapshot_table(day, rows, seed) for day in range(days)])
    spec = RunSpec(
        pipeline="flight_delay",
        data=data_spec(files, days, valid_days),
        model=model_spec(),
        seed=7,
        layout=LayoutSpec(),
    )
    return replace(spec, **cast("dict[str, Any]", changes))


def quiet() -> None:
    """A heartbeat that nobody watches."""


def write_models(spec: RunSpec, store: Path, folder: Path) -> Dataset:
    """Artifacts `network` (untrained, with lively weights) and `logistic` of a spec in `folder`, and their rows."""
    dataset = load_data(spec, store, quiet)
    torch.manual_seed(1)
    model = build_model(spec, dataset.inputs, ROOT)
    write_network(model.state_dict(), spec, dataset, {}, folder / "network", run_id="a" * 24, code_root=ROOT)
    fit_logistic(spec, dataset, folder / "logistic", quiet, run_id="a" * 24)
    return dataset


def forge(folder: Path, name: str, content: bytes) -> None:
    """Replace one file of an artifact and make its manifest say so: what somebody with write access would do."""
    (folder / name).write_bytes(content)
    old = parse_manifest((folder / "manifest.json").read_bytes())
    entries = tuple(
        ManifestEntry(name, len(content), digest_bytes(content), e.media_type) if e.name == name else e
        for e in old.entries
    )
    (folder / "manifest.json").write_bytes(Manifest(entries, old.facts).canonical())
