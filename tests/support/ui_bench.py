"""The pipeline `shop` cut into days, as a data engineer finds it: four months ingested, two versions, one refused.

- days up to `LAST_VERSION` have a dataset version, those up to `LAST_SNAPSHOT` a snapshot; `BAD_DAY`, which came early,
  is quarantined, and in reach of no other day;
- version 1 (`GOOD_AS_OF`) is promoted; version 2 (`REFUSED_AS_OF`) contradicts the rows, and a gate refuses it;
- in the world it is `NOW`, when no day without a version is due.
"""

import json
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pytest
import yaml
from support.retrain_bench import declare, materialize_version, retraining_code_root, set_world
from support.training_bench import ATTRIBUTES, TrainingBench

import headway.training.plan
from assets.dataset_version import build_dataset_version
from assets.feature_snapshot import build_feature_snapshot
from headway.home import write_dagster_instance
from headway.loading import load_pipeline
from headway.training.identity import CODE_ROOT
from resources.platform import Platform

FIRST_DAY = "2026-01-01"
LAST_SNAPSHOT = "2026-03-31"
LAST_VERSION = "2026-04-12"
BAD_DAY = "2026-04-30"
NEXT_DAY = "2026-04-13"
AFTER_NEXT = "2026-04-14"
NOW = "2026-04-14T12:00:00+00:00"
NOW_AFTER_NEXT_IS_DUE = "2026-04-17T06:00:00+00:00"
END = "2026-05-01"
GOOD_AS_OF, REFUSED_AS_OF, OPEN_AS_OF = "2026-02-01", "2026-03-01", "2026-04-01"
HOLD = "hold-features"
_ROWS_PER_DAY = 12

_FEATURES = f'''
"""One feature function, which can be made slow."""

import os
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc


def weekday(row: pa.Table) -> pa.ChunkedArray:
    """Weekday of the question; while `{HOLD}` lies in the home, days after the one written in it take their time."""
    hold = Path(os.environ.get("HEADWAY_HOME", "")) / "{HOLD}"
    asked = row.column("asked_at")
    while hold.exists() and len(asked) and str(pc.max(asked).as_py().date()) > hold.read_text():
        time.sleep(0.1)
    return pc.day_of_week(asked, count_from_zero=False)
'''


def days(first: str, last: str) -> list[str]:
    """All days from the first to the last."""
    start, end = datetime.fromisoformat(first), datetime.fromisoformat(last)
    return [f"{start + timedelta(days=n):%Y-%m-%d}" for n in range((end - start).days + 1)]


def build_ui_shop(root: Path) -> TrainingBench:
    """Write the pipeline and bring its home to the state above; the toy code tree is `root/toy-code`."""
    bench = TrainingBench(root / "shop", root / "home")
    _write(bench.folder)
    toy = retraining_code_root(root)
    dagster_home = write_dagster_instance(bench.settings)
    with pytest.MonkeyPatch.context() as patch, dg.DagsterInstance.from_config(str(dagster_home)) as instance:
        patch.setattr(headway.training.plan, "CODE_ROOT", toy)
        pipeline = load_pipeline(bench.folder)
        source, snapshot = build_dataset_version(pipeline, "visits"), build_feature_snapshot(pipeline)
        _materialize(bench, instance, [source], days(FIRST_DAY, LAST_VERSION))
        alone = {"resources": {"platform": Platform(home=str(bench.home))}, "raise_on_error": False}
        assert not dg.materialize([source], instance=instance, partition_key=BAD_DAY, **alone).success
        _materialize(bench, instance, [snapshot, source], days(FIRST_DAY, LAST_SNAPSHOT), ["shop/feature_snapshot"])
        assert materialize_version(bench, instance, GOOD_AS_OF).success
        promoted = bench.run("promote", "shop")
        assert promoted.exit_code == 0, promoted.output
        worse = bench.home / "runs" / "default" / "worse"
        worse.touch()
        assert not materialize_version(bench, instance, REFUSED_AS_OF).success, "a gate refuses it"
        worse.unlink()
    set_world(bench, NOW)
    return bench


def _materialize(
    bench: TrainingBench,
    instance: dg.DagsterInstance,
    assets: Sequence[dg.AssetsDefinition],
    wanted: Sequence[str],
    selection: Sequence[str] | None = None,
) -> None:
    result = dg.materialize(
        list(assets),
        instance=instance,
        selection=selection,
        tags={"dagster/asset_partition_range_start": wanted[0], "dagster/asset_partition_range_end": wanted[-1]},
        resources={"platform": Platform(home=str(bench.home))},
    )
    assert result.success


def _write(folder: Path) -> None:
    folder.mkdir(parents=True)
    attributes: dict[str, Any] = json.loads(json.dumps(ATTRIBUTES))
    declare(attributes)
    attributes["owner"] = "team:shop"
    visits = attributes["sources"]["visits"]
    visits["description"] = "Visits to the shops, and whether something was bought."
    visits["partition"] |= {"cadence": "daily", "start": FIRST_DAY, "end": END}
    visits["quality"] |= {"max_quarantined_share": 0.0, "max_quarantined_partitions": 0.1}
    attributes["features"]["derived"] = {
        "weekday": {"function": "features.weekday", "inputs": ["asked_at"], "type": "int64"}
    }
    attributes["training"]["exclude"] = ["weekday"]
    document = {"type": "assets.component.ModelPipeline", "attributes": attributes}
    (folder / "defs.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    rules = [
        ("expect_column_values_to_not_be_null", {"column": "visit_id"}),
        ("expect_column_values_to_be_between", {"column": "amount", "min_value": 0}),
    ]
    suite = {"name": "visits", "expectations": [{"type": t, "kwargs": k, "severity": "critical"} for t, k in rules]}
    (folder / "visits.suite.json").write_text(json.dumps(suite))
    (folder / "visits.csv").write_text(_visits())
    (folder / "features.py").write_text(_FEATURES.lstrip())
    shutil.copy(CODE_ROOT / "pipelines" / "flight_delay" / "model.py", folder / "model.py")


def _visits() -> str:
    """Who buys depends on the shop and the person; three amounts of the bad day are below zero."""
    random = np.random.default_rng(5)
    lines = ["visit_id,person,shop,asked_at,paid_at,amount,bought"]
    for day in days(FIRST_DAY, BAD_DAY):
        start = datetime.fromisoformat(day).replace(tzinfo=UTC)
        for index, minute in enumerate(np.sort(random.integers(0, 24 * 60, _ROWS_PER_DAY))):
            person, shop = int(random.integers(0, 12)), int(random.integers(0, 4))
            asked = start + timedelta(minutes=int(minute))
            paid = asked + timedelta(minutes=int(random.integers(5, 600)))
            bought = int(random.random() < 0.1 + 0.2 * shop + 0.01 * person)
            amount = -1 if day == BAD_DAY and index < 3 else int(random.integers(1, 90))
            lines.append(
                f"{day}-{index:02d},p{person},s{shop},{asked.isoformat()},{paid.isoformat()},{amount},{bought}"
            )
    return "\n".join(lines) + "\n"
