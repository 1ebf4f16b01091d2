"""The pipeline `shop` with a version that serves, a world clock, and reports that tests plant.

Reports are recorded in the catalog directly, as the monitoring stages do: what they say is the test's choice.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from support.registry_facts import POLICY, pass_all, run_facts, succeed, version_facts
from support.training_bench import TrainingBench, build_shop, toy_code_root

import headway.training.plan
from assets.model_version import build_model_version
from assets.training_run import build_training_run
from headway.catalog.monitoring_facts import Report, ReportFacts, ReportKind
from headway.loading import Pipeline, load_pipeline
from headway.monitoring.windows import week_bounds
from headway.services import Services
from headway.world import move_clock
from resources.platform import Platform
from trainer.blobs import canonical_json

CHAMPION_AS_OF = "2026-03-01"
NEXT_AS_OF = "2026-04-01"
WEEKS = ("2026-04-27", "2026-05-04")
# The month of April is over, and its labels are due.
NOW = "2026-05-11T06:00:00+00:00"
RESERVE_S = 600
MONTH_S = 1800


def declare(attributes: dict[str, Any]) -> None:
    """Let the shop retrain by itself; a candidate far below the historical rate is refused."""
    gates = attributes["promotion"]["gates"]
    gates[0]["margin"] = -0.25
    attributes["monitoring"] = {
        "labels": {"expected_within": "2d"},
        "drift": {"minimum": 50, "weeks": 2, "of": 3},
        "retraining": {
            "minimum_labels": 100,
            "cooldown": "14d",
            "per_run": f"{RESERVE_S}s",
            "per_month": f"{MONTH_S}s",
        },
    }


def retraining_code_root(root: Path) -> Path:
    """A code tree whose ranks leave a logistic regression."""
    target = toy_code_root(root)
    here = Path(__file__).parent
    shutil.copy(here / "toy_rank.py", target / "trainer" / "toy_rank.py")
    shutil.copy(here / "retrain_rank.py", target / "trainer" / "worker.py")
    return target


def build_champion(root: Path, change: Callable[[dict[str, Any]], None] = declare) -> TrainingBench:
    """The shop with one trained, judged and promoted version of the data before March."""
    bench = build_shop(root, change=change)
    with pytest.MonkeyPatch.context() as patch, dg.DagsterInstance.ephemeral() as instance:
        patch.setattr(headway.training.plan, "CODE_ROOT", retraining_code_root(root))
        trained = materialize_version(bench, instance, CHAMPION_AS_OF)
        assert trained.success
    promoted = bench.run("promote", "shop")
    assert promoted.exit_code == 0, promoted.output
    set_world(bench, NOW)
    return bench


def write_champion(root: Path) -> TrainingBench:
    """The shop with a version that serves as far as the catalog knows: nothing was trained, its blobs are nowhere."""
    bench = build_shop(root, change=declare)
    with bench.services() as services:
        catalog, who = services.catalog, services.principal
        states = catalog.current_snapshots(who, "shop", ["2026-01-01", "2026-02-01"])
        snapshots = [s.snapshot for s in states.values() if s.snapshot is not None]
        facts = run_facts(
            snapshots[0].snapshot_id,
            pipeline="shop",
            partition=CHAMPION_AS_OF,
            inputs=tuple(s.snapshot_id for s in snapshots),
            datasets=tuple({(i.dataset, i.version, i.content_digest) for s in snapshots for i in s.inputs}),
        )
        of_shop = {"model_id": "shop", "pipeline": "shop", "feature_set": snapshots[0].feature_set}
        version = catalog.register_model_version(who, None, version_facts(succeed(catalog, facts, who), **of_shop))
        catalog.set_gate_policy(who, None, "shop", POLICY)
        evidence = pass_all(catalog, version, who)
        catalog.promote_immediate(who, None, "shop", "shop", 1, expected_epoch=None, evidence=evidence)
    set_world(bench, NOW)
    return bench


def materialize_version(
    bench: TrainingBench, instance: dg.DagsterInstance, as_of: str, tags: Mapping[str, str] | None = None
) -> dg.ExecuteInProcessResult:
    """Train and judge one `as_of` in this process, as a run of the sensor would."""
    pipeline = pipeline_of(bench)
    return dg.materialize(
        [build_training_run(pipeline), build_model_version(pipeline)],
        instance=instance,
        partition_key=as_of,
        resources={"platform": Platform(home=str(bench.home))},
        tags=tags,
        raise_on_error=False,
    )


def pipeline_of(bench: TrainingBench) -> Pipeline:
    """The bench's pipeline."""
    return load_pipeline(bench.folder)


def instant(text: str) -> int:
    """Microseconds UTC of an ISO time."""
    return round(datetime.fromisoformat(text).timestamp() * 1_000_000)


def set_world(bench: TrainingBench, text: str) -> None:
    """Move the world's clock."""
    move_clock(bench.settings.clock_file, instant(text))


def plant(
    services: Services,
    kind: ReportKind,
    week: str,
    verdict: str,
    metrics: Mapping[str, float | int | None],
    *,
    version: int = 1,
    features: tuple[Mapping[str, Any], ...] = (),
    reason: str = "planted",
    made_at: int | None = None,
) -> Report:
    """Record a report of a week, made at its end unless told otherwise."""
    start, end = week_bounds(week)
    document = services.store.put_bytes(
        canonical_json(
            {"week": week, "verdict": verdict, "features": [dict(f) for f in features], "metrics": dict(metrics)}
        )
    )
    facts = ReportFacts(
        kind, "shop", version, week, start, end, verdict, reason, document.digest, metrics, made_at or end, (document,)
    )
    return services.catalog.record_report(services.principal, None, facts)


def plant_drift(services: Services, *, version: int = 1, weeks: tuple[str, ...] = WEEKS, level: float = 1.5) -> None:
    """Drift of one feature in every week, and labels that say what it costs."""
    moved = {"name": "by_shop__share_9d", "segment": "", "verdict": "drift", "direction": "up", "effect": level}
    for week in weeks:
        plant(services, "drift", week, "drift", {"level": level}, version=version, features=(moved,))
        plant_quality(services, week, version=version)


def plant_quality(services: Services, week: str, *, version: int = 1, auc: float = 0.6) -> None:
    """A mature week below the evaluation."""
    metrics = {"auc": auc, "auc_lower": auc - 0.04, "auc_upper": auc + 0.04, "evaluation_auc": 0.66, "labels": 150}
    plant(services, "quality", week, "mature", metrics, version=version)


def plant_incident(services: Services, week: str, *, version: int = 1) -> None:
    """A week whose data are broken."""
    plant(services, "drift", week, "data_incident", {"level": None}, version=version, reason="unit_change mean_9d")


def told(bench: TrainingBench) -> list[dict[str, Any]]:
    """The requests as `headway retrain list` tells them, the newest first."""
    result = bench.run("retrain", "list", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["requests"]
