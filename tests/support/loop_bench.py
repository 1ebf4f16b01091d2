"""A pipeline that is served and followed: outcomes known hours after they were asked about, a clock, answers."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import yaml
from support.catalog_facts import digest
from support.serving_bench import DAYS, amend, opened, pipeline_of, requests_for, write_serving_bench
from support.serving_model import CATEGORICAL, NUMERIC, serve
from support.workbench import Workbench

from assets.drift_report import build_drift_report
from assets.labels import build_labels
from assets.online_features import build_online_features
from assets.predictions import build_predictions
from assets.quality_report import build_quality_report
from headway.catalog.registry_facts import PredictionBatch, PredictionFacts
from headway.home import load_settings
from headway.monitoring.events import event_keys
from headway.serving.features import as_kept
from headway.world import move_clock
from resources.platform import Platform
from trainer.blobs import digest_bytes

HOUR = 3_600_000_000
WEEK = "2026-03-02"
WEEKS = ("2026-02-23", "2026-03-02", "2026-03-09", "2026-03-16")
ENDPOINT = "pipeline"
MODEL = "def build(*arguments, **options):\n    raise NotImplementedError\n"
TRAINING = {
    "training": {
        "factory": "model.build",
        "as_of": {"start": "2026-03-01", "end": "2026-04-01"},
        "categorical": ["k"],
        "exclude": ["newest__at", "listed__group"],
    },
    "evaluation": {"historical_rate": ["k"], "segments": {"k": {"minimum": 5, "allowance": 0.5}}},
    "promotion": {"gates": [{"gate": "contract"}], "allow_immediate": True},
    "monitoring": {
        "labels": {"match": {"number": "size", "starts": "starts"}, "expected_within": "2d"},
        "drift": {"entity": ["k"], "minimum": 50, "weeks": 1, "of": 2, "permutations": 100},
    },
}


def write_loop_bench(root: Path) -> Workbench:
    """The serving bench with weeks of a calendar, a target of two classes, and labels known five hours later."""
    bench = write_serving_bench(root)
    file = bench.folder / "defs.yaml"
    document = yaml.safe_load(file.read_text())
    attributes = document["attributes"]
    labels = attributes["sources"]["labels"]
    labels["columns"] |= {
        "starts": {"type": "timestamp", "known_at": "t"},
        "known": {"type": "timestamp"},
        "target": {"type": "int64"},
    }
    labels |= {"available_time": "known"}
    labels["partition"] |= {"end": "2026-03-20", "before": "1s", "after": "1d"}
    attributes["label"]["known_at"] = "known"
    attributes["serving"]["request"]["number"] = {"type": "int64", "required": True}
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    amend(bench, **TRAINING)
    (bench.folder / "model.py").write_text(MODEL)
    lines = (bench.folder / "labels.csv").read_text().splitlines()[1:]
    rows = [line.split(",") for line in lines]
    write_outcomes(bench, [(i, t, k, size, int(size) % 3 == 0) for i, t, k, size, _ in rows])
    return bench


def write_outcomes(bench: Workbench, rows: Sequence[tuple[str, str, str, str, bool]]) -> None:
    """Write the label file: id, asked at, key, size, outcome; what is asked about starts an hour later."""
    text = ["label_id,t,k,size,starts,known,target"]
    text += [f"{i},{t},{k},{size},{_later(t, 1)},{_later(t, 5)},{int(out)}" for i, t, k, size, out in rows]
    (bench.folder / "labels.csv").write_text("\n".join(text) + "\n")


def _later(text: str, hours: int) -> str:
    moment = moment_of(text) + hours * HOUR
    return datetime.fromtimestamp(moment / 1_000_000, tz=datetime.fromisoformat(text).tzinfo).strftime(
        "%Y-%m-%dT%H:%M:%SZ"
    )


def moment_of(text: str) -> int:
    """Microseconds UTC of an ISO time."""
    return round(datetime.fromisoformat(text).timestamp() * 1_000_000)


def set_world(bench: Workbench, text: str) -> None:
    """Move the world's clock of the bench's home."""
    move_clock(load_settings({"HEADWAY_HOME": str(bench.home)}).clock_file, moment_of(text))


def answer_days(
    bench: Workbench, days: Sequence[str] = DAYS, version: int = 1, epoch: int = 1
) -> list[PredictionFacts]:
    """Record an answer about every label row of some days, as asked when it was observed."""
    pipeline = pipeline_of(bench)
    values = label_values(bench, days)
    with opened(bench) as services:
        requests = numbered_requests(bench, values)
        keys = event_keys(pipeline.spec, as_kept(pipeline.spec, requests))
        asked = values.column("t").cast(pa.int64()).to_pylist()
        groups = values.column("k").to_pylist()
        records = tuple(
            planted(f"online-{number:04d}-{moment}", moment, event_key=key, segments={"k": group})
            for number, (moment, key, group) in enumerate(zip(asked, keys, groups, strict=True))
        )
        detail = services.store.put_bytes(b"detail")
        batch = PredictionBatch(ENDPOINT, epoch, version, records, (detail,))
        services.catalog.record_predictions(services.principal, None, batch)
    return list(records)


def label_values(bench: Workbench, days: Sequence[str]) -> pa.Table:
    """The snapshots' rows of some days."""
    return pa.concat_tables([bench.table(day) for day in days]).unify_dictionaries()


def numbered_requests(bench: Workbench, values: pa.Table) -> pa.Table:
    """Requests about label rows; their number is the row's size, which names the event with its start."""
    requests = requests_for(pipeline_of(bench), values)
    place = requests.column_names.index("number")
    return requests.set_column(place, "number", values.column("size").cast(pa.int64()))


def planted(prediction_id: str, asked_at: int, **changes: Any) -> PredictionFacts:  # noqa: ANN401
    """An answer that was recorded without being computed."""
    number = int.from_bytes(bytes.fromhex(digest(prediction_id)[7:11]))
    values: dict[str, Any] = {
        "prediction_id": prediction_id,
        "feature_as_of": asked_at - 5,
        "feature_status": "fresh",
        "feature_row_digest": digest("row", prediction_id),
        "request_digest": digest("request", prediction_id),
        "output": {"probability": number / 65_536},
        "arm": "stable",
        "status": "ok" if number % 4 else "degraded",
        "latency_us": 100,
        "detail_digest": digest_bytes(b"detail"),
        "row": 0,
        "asked_at": asked_at,
        "observed_at": asked_at,
        "score": number / 65_536,
    }
    return PredictionFacts(**values | changes)


def make_loop(root: Path) -> Workbench:
    """The bench with its data ingested, a version promoted, and the world at the end of its three days."""
    bench = write_loop_bench(root)
    set_world(bench, "2026-03-06T00:00:00Z")
    bench.ingest("data", "register")
    bench.ingest("labels", partitions=DAYS)
    assert serve(bench, DAYS, reference=reference_of(label_values(bench, DAYS))).stable == 1
    return bench


def reference_of(values: pa.Table) -> bytes:
    """The frozen histograms of a training on these values, in a few bins, that knew the model's three keys only."""
    features: dict[str, Any] = {}
    for name, known in CATEGORICAL.items():
        counts = Counter(values.column(name).to_pylist())
        features[name] = {
            "kind": "categorical",
            "values": list(known),
            "counts": [counts[value] for value in known],
            "other": 0,
            "missing": counts[None],
        }
    for name in NUMERIC:
        features[name] = _numeric([v for v in values.column(name).to_pylist() if v is not None], values.num_rows)
    score = _numeric([(i + 0.5) / 100 for i in range(100)], 100) | {"n": 100, "rows": "valid"}
    document = {"format": "headway.reference/1", "n": values.num_rows, "features": features, "score": score}
    return json.dumps(document).encode()


def _numeric(present: Sequence[float], rows: int) -> dict[str, Any]:
    cuts = np.quantile(np.array(present, np.float64), [0.25, 0.5, 0.75], method="higher")
    edges = np.unique(cuts)
    counts = np.bincount(np.searchsorted(edges, present, side="right"), minlength=len(edges) + 1)
    return {"kind": "numeric", "edges": edges.tolist(), "counts": counts.tolist(), "missing": rows - len(present)}


def copied(bench: Workbench, to: Path) -> Workbench:
    """The bench with a folder and a home of its own."""
    shutil.copytree(bench.folder.parent, to, dirs_exist_ok=True)
    return Workbench(to / "pipeline", to / "home")


def loop_assets(bench: Workbench) -> list[dg.AssetsDefinition]:
    """The stages of the loop."""
    pipeline = pipeline_of(bench)
    stages = (build_online_features, build_predictions, build_labels, build_quality_report, build_drift_report)
    return [build(pipeline) for build in stages]


@contextmanager
def temporary_instance(root: Path) -> Iterator[dg.DagsterInstance]:
    """A Dagster instance with its files in a folder."""
    (root / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(root / "dagster")) as found:
        yield found


def materialize(bench: Workbench, instance: dg.DagsterInstance, stage: str, *weeks: str) -> dg.ExecuteInProcessResult:
    """One run of a stage: without partitions, over one week, or over the range from the first to the last."""
    tags = {} if len(weeks) < 2 else {"start": weeks[0], "end": weeks[-1]}
    return dg.materialize(
        loop_assets(bench),
        instance=instance,
        partition_key=weeks[0] if len(weeks) == 1 else None,
        selection=[f"pipeline/{stage}"],
        tags={f"dagster/asset_partition_range_{name}": week for name, week in tags.items()},
        raise_on_error=False,
        resources={"platform": Platform(home=str(bench.home))},
    )
