"""A small pipeline that can be trained: five months of visits, one snapshot a month, driven as a person would."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result

import headway.training.plan
from assets.training_run import build_training_run
from headway.cli.main import main
from headway.home import load_settings
from headway.loading import load_pipeline
from headway.services import Services, open_services
from headway.training.identity import CODE_ROOT
from headway.training.launchers import launcher_for
from resources.platform import Platform

MONTHS = ("2026-01-01", "2026-02-01", "2026-03-01", "2026-04-01", "2026-05-01")
AS_OF = "2026-04-01"

_SUITE = {
    "name": "visits",
    "expectations": [
        {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "visit_id"}, "severity": "critical"}
    ],
}

ATTRIBUTES: dict[str, Any] = {
    "name": "shop",
    "owner": "team:tests",
    "sources": {
        "visits": {
            "files": {"paths": ["visits.csv"]},
            "format": {"type": "csv"},
            "columns": {
                "visit_id": {"type": "string", "required": True},
                "person": {"type": "string", "required": True, "known_at": "asked_at"},
                "shop": {"type": "string", "known_at": "asked_at"},
                "asked_at": {"type": "timestamp", "required": True},
                "paid_at": {"type": "timestamp"},
                "amount": {"type": "float64"},
                "bought": {"type": "int64"},
            },
            "row_id": ["visit_id"],
            "keys": ["person", "shop"],
            "event_time": "paid_at",
            "available_time": "paid_at",
            "partition": {
                "column": "asked_at",
                "cadence": "monthly",
                "start": "2026-01-01",
                "end": "2026-06-01",
                "before": "1h",
                "after": "2d",
            },
            "quality": {"suite": "visits.suite.json"},
        }
    },
    "label": {
        "source": "visits",
        "observation_time": "asked_at",
        "target": "bought",
        "known_at": "paid_at",
        "carry": ["shop"],
    },
    "features": {
        "version": 1,
        "views": {
            "by_person": {
                "source": "visits",
                "keys": {"person": "person"},
                "boundary": "lt",
                "features": {
                    "count_9d": {"window": "amount", "aggregate": "count", "duration": "9d"},
                    "mean_9d": {"window": "amount", "aggregate": "mean", "duration": "9d"},
                    "share_9d": {"window": "bought", "aggregate": "mean", "duration": "9d"},
                },
            },
            "by_shop": {
                "source": "visits",
                "keys": {"shop": "shop"},
                "boundary": "lt",
                "features": {"share_9d": {"window": "bought", "aggregate": "mean", "duration": "9d"}},
            },
        },
    },
    "training": {
        "factory": "model.build",
        "options": {"width": 8, "blocks": 1},
        "as_of": {"start": "2026-02-01", "end": "2026-06-01"},
        "window": 12,
        "categorical": ["shop"],
        "engine": "ddp",
        "nodes": 2,
        "batch": 64,
        "epochs": 2,
        "early_stopping": {"last": "7d", "patience": 2},
        "lr": 0.01,
        "seed": 3,
        "checkpoint_every": 5,
        "max_attempts": 3,
        "budget": {"per_run": "10m", "per_month": "10h"},
    },
    "evaluation": {
        "historical_rate": ["shop"],
        "segments": {"shop": {"minimum": 20, "allowance": 0.5}},
        "resamples": 100,
    },
    "promotion": {
        "gates": [
            {"gate": "auc_over_historical_rate", "margin": -1.0},
            {"gate": "segments"},
            {"gate": "finite_outputs"},
            {"gate": "contract"},
            {"gate": "leakage_proof"},
            {"gate": "weights_only"},
        ],
        "allow_immediate": True,
    },
    "serving": {
        "observed": "asked_at",
        "before": "1h",
        "request": {
            "person": {"type": "string", "required": True, "column": "person"},
            "shop": {"type": "string", "column": "shop"},
            "asked_at": {"type": "timestamp", "required": True},
        },
    },
}


def visits(seed: int = 5, rows_per_month: int = 150) -> str:
    """Visits as CSV: who buys depends on the shop and on the person, so that there is something to learn."""
    random = np.random.default_rng(seed)
    lines = ["visit_id,person,shop,asked_at,paid_at,amount,bought"]
    for month in MONTHS:
        start = datetime.fromisoformat(month).replace(tzinfo=UTC)
        minutes = np.sort(random.integers(60, 27 * 24 * 60, rows_per_month))
        for index, minute in enumerate(minutes):
            person, shop = int(random.integers(0, 12)), int(random.integers(0, 4))
            asked = start + timedelta(minutes=int(minute))
            paid = asked + timedelta(minutes=int(random.integers(5, 600)))
            bought = int(random.random() < 0.15 + 0.15 * shop + 0.02 * person)
            lines.append(
                f"{month[:7]}-{index:04d},p{person},s{shop},{asked.isoformat()},{paid.isoformat()},"
                f"{random.integers(1, 90)},{bought}"
            )
    return "\n".join(lines) + "\n"


@dataclass
class TrainingBench:
    """One pipeline folder and one home, with the snapshots of all months."""

    folder: Path
    home: Path
    database_url: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """The settings of this bench as variables."""
        database = {"HEADWAY_DATABASE_URL": self.database_url} if self.database_url else {}
        return {"HEADWAY_HOME": str(self.home), **database}

    @property
    def settings(self) -> Any:  # noqa: ANN401 - headway.home.Settings
        """The settings of this home."""
        return load_settings(self.environment)

    def run(self, *arguments: str) -> Result:
        """The `headway` command in this home."""
        return CliRunner().invoke(main, list(arguments), env={**self.environment, "COLUMNS": "200"})

    def json(self, *arguments: str) -> Any:  # noqa: ANN401 - any document
        """What a command prints as JSON; the test fails when it does not end well."""
        result = self.run(*arguments, "--json")
        assert result.exit_code == 0, result.output + str(result.exception)
        return json.loads(result.stdout)

    @contextmanager
    def services(self) -> Iterator[Services]:
        """Catalog, store and principal of this home."""
        with open_services(self.settings) as services:
            yield services

    def launcher(self) -> Any:  # noqa: ANN401 - headway.training.launch.Launcher
        """The launcher of this home."""
        return launcher_for(self.settings)

    def runs(self) -> list[Any]:
        """All training runs, oldest first."""
        with self.services() as services:
            return list(reversed(services.catalog.runs(services.principal)))

    def control(self, run_id: str, name: str, text: str | None) -> None:
        """Write (or, with None, take away) a file that the toy rank looks at."""
        file = self.home / "runs" / "default" / run_id / name
        if text is None:
            file.unlink(missing_ok=True)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def definitions(self) -> dg.Definitions:
        """The training stage of the pipeline as Dagster gets it."""
        asset = build_training_run(load_pipeline(self.folder))
        return dg.Definitions(assets=[asset], resources={"platform": Platform(home=str(self.home))})

    def materialize(
        self,
        instance: dg.DagsterInstance,
        as_of: str = AS_OF,
        config: dict[str, Any] | None = None,
        tags: dict[str, str] | None = None,
    ) -> dg.ExecuteInProcessResult:
        """Materialize `training_run` of one `as_of` in this process, as a person does."""
        ops = {"shop__training_run": {"config": config}} if config else {}
        return dg.materialize(
            [build_training_run(load_pipeline(self.folder))],
            instance=instance,
            partition_key=as_of,
            resources={"platform": Platform(home=str(self.home))},
            run_config={"ops": ops},
            tags=tags,
            raise_on_error=False,
        )


def write_shop(folder: Path, change: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Write the pipeline; `change` may edit its attributes first."""
    folder.mkdir(parents=True, exist_ok=True)
    attributes = json.loads(json.dumps(ATTRIBUTES))
    if change is not None:
        change(attributes)
    document = {"type": "assets.component.ModelPipeline", "attributes": attributes}
    (folder / "defs.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    (folder / "visits.suite.json").write_text(json.dumps(_SUITE))
    (folder / "visits.csv").write_text(visits())
    shutil.copy(CODE_ROOT / "pipelines" / "flight_delay" / "model.py", folder / "model.py")


def build_shop(
    root: Path, database_url: str = "", change: Callable[[dict[str, Any]], None] | None = None
) -> TrainingBench:
    """Write the pipeline, ingest its source and build every month's snapshot."""
    bench = TrainingBench(root / "shop", root / "home", database_url)
    write_shop(bench.folder, change)
    for command in (
        ("datasets", "ingest", "--pipeline", str(bench.folder), "--source", "visits"),
        ("snapshots", "build", "--pipeline", str(bench.folder), *(a for m in MONTHS for a in ("--partition", m))),
    ):
        result = bench.run(*command)
        assert result.exit_code == 0, result.output + str(result.exception)
    return bench


def copy_bench(source: TrainingBench, root: Path) -> TrainingBench:
    """A bench of its own with the same data."""
    shutil.copytree(source.folder, root / "shop")
    shutil.copytree(source.home, root / "home")
    return TrainingBench(root / "shop", root / "home")


def toy_code_root(root: Path) -> Path:
    """A code tree whose ranks are `support.toy_rank` instead of torch."""
    target = root / "toy-code"
    shutil.copytree(CODE_ROOT / "trainer", target / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(Path(__file__).with_name("toy_rank.py"), target / "trainer" / "worker.py")
    return target


def use_toy_ranks(patch: pytest.MonkeyPatch, root: Path) -> None:
    """Runs planned in this process execute toy ranks: their code is staged from a tree that holds them."""
    patch.setattr(headway.training.plan, "CODE_ROOT", toy_code_root(root))


def end_everything(bench: TrainingBench, run_ids: Sequence[str] = ()) -> None:
    """Kill whatever a test left running."""
    launcher = bench.launcher()
    for run_id, attempt, _ in launcher.strays():
        if not run_ids or run_id in run_ids:
            launcher.kill(run_id, attempt)
