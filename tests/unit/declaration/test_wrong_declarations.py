"""What goes wrong in a first pipeline: each mistake is one line with file, line, field and what is allowed.

The right declaration is that of docs/tutorial.md.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from support.markdown import blocks

from headway.cli.main import main
from headway.declaration import PipelineSpec
from headway.loading import DeclarationInvalid, from_spec

ROOT = Path(__file__).resolve().parents[3]
DURATION = "is not a duration: write a positive whole number and us, ms, s, m, h or d, such as 90s or 7d"

# What is written, what is written instead, the field that is named, what is said of it.
WRONG = {
    "typo": ("lookback: 3d", "lookbak: 3d", "features.views.account.lookbak", "not a field here; allowed are"),
    "wrong_unit": ("duration: 7d}", "duration: 7w}", "features.views.usage.features.count_7d.duration", DURATION),
    "unknown_column": (
        "minutes_7d: {window: minutes",
        "minutes_7d: {window: minuts",
        "features.views.usage.features.minutes_7d",
        "sessions has no column 'minuts'; columns are ['customer', 'minutes', 'received_at'",
    ),
    "window_without_event_time": ("      event_time: started_at\n", "", "sources.sessions.event_time", "is required"),
    "missing_source": (
        "        source: sessions",
        "        source: sesions",
        "features.views.usage.source",
        "no source 'sesions'; sources are ['accounts', 'reviews', 'sessions']",
    ),
    "cyclic_feature": (
        "inputs: [usage__count_7d, usage__count_28d]",
        "inputs: [trend]",
        "features.derived.trend",
        "no input 'trend'; inputs are ['account__fee'",
    ),
    "cyclic_lookup": (
        "quality: {suite: sessions.suite.json}",
        "lookups: [sessions]\n      quality: {suite: sessions.suite.json}",
        "sources.sessions.lookups",
        "'sessions' is partitioned; only whole tables can be read",
    ),
    "lookback_zero": ("lookback: 3d", "lookback: 0d", "features.views.account.lookback", f"'0d' {DURATION}"),
    "gate_on_an_absent_metric": (
        "gate: auc_over_champion",
        "gate: f1_over_champion",
        "promotion.gates.1.gate",
        "Input should be 'auc_over_historical_rate', 'auc_over_logistic', 'auc_over_champion'",
    ),
    "batch_that_does_not_divide": (
        "batch: 256",
        "batch: 255",
        "training.batch",
        "255 rows do not divide by 2 data-parallel ranks x 1 micro-batches; 254 or 256 would",
    ),
    "world_that_does_not_divide": (
        "nodes: 2\n",
        "nodes: 2\n    layout: dp=3\n",
        "training.nodes",
        "the 3 ranks of the layout do not divide by nodes 2",
    ),
    "bad_duration": ("per_run: 1h", "per_run: 10", "training.budget.per_run", f"10 {DURATION}"),
    "bad_delay": ("delay: 6h", "delay: six hours", "sources.accounts.available_time.delay", f"'six hours' {DURATION}"),
    "duplicate_feature": (
        "          fee: {latest: fee}\n",
        "          fee: {latest: fee}\n          fee: {latest: plan}\n",
        "attributes.features.views.account.features.fee",
        "is written twice",
    ),
    "unknown_engine": ("engine: ddp", "engine: ddq", "training.engine", "'ddp', 'fsdp2' or 'deepspeed', got 'ddq'"),
    "label_without_known_at": ("    known_at: settled_at\n", "", "label.known_at", "is required"),
    "unknown_baseline": (
        "historical_rate: [account__plan]",
        "historical_rate: [plan]",
        "evaluation.historical_rate",
        "no column 'plan'; columns are ['account__fee', 'account__plan'",
    ),
    "unknown_function": (
        "function: features.trend",
        "function: features.trends",
        "features.derived.trend.function",
        "no function 'features.trends'; found ['trend']",
    ),
    "unknown_factory": (
        "factory: model.build",
        "factory: model.biuld",
        "training.factory",
        "no function 'model.biuld'; found ['build']",
    ),
    "peeking_feature": (
        "        boundary: lt\n        features:\n",
        "        boundary: lt\n        features:\n          churned: {latest: churned}\n",
        "features.views.usage.features.churned",
        "sessions has no column 'churned'",
    ),
}


def _written(folder: Path, right: str = "", wrong: str = "") -> Path:
    folder.mkdir()
    for block in blocks(ROOT / "docs" / "tutorial.md"):
        name = block.title.removeprefix("pipelines/churn/")
        if block.title.startswith("pipelines/churn/"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(block.text)
    declared = (folder / "defs.yaml").read_text()
    assert right in declared
    (folder / "defs.yaml").write_text(declared.replace(right, wrong, 1))
    return folder


def _line(before: str, right: str, wrong: str) -> set[int]:
    """Lines that may be blamed: those that were changed, and the one above when something was taken away."""
    start = before.index(right)
    first = before.count("\n", 0, start) + 1
    return set(range(first - 1 if not wrong else first, first + wrong.strip("\n").count("\n") + 1))


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line(tmp_path: Path, name: str) -> None:
    right, wrong, field, said = WRONG[name]
    folder = _written(tmp_path / "churn", right, wrong)
    result = CliRunner().invoke(main, ["check", str(folder)])
    assert result.exit_code == 1, result.output
    (line,) = result.output.splitlines()
    file, number, rest = line.split(":", 2)
    assert file == str(folder / "defs.yaml")
    assert rest.startswith(f" {field}: ")
    assert said in rest
    if wrong:
        before = (folder / "defs.yaml").read_text().replace(wrong, right, 1)
        assert int(number) in _line(before, right, wrong)


def test_the_right_one_is_right(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["check", str(_written(tmp_path / "churn"))])
    assert result.output == "churn: 3 sources, 2 feature views, 7 features; nothing wrong\n"


@pytest.mark.parametrize(
    "name", ["batch_that_does_not_divide", "world_that_does_not_divide", "unknown_function", "unknown_factory"]
)
def test_dagster_refuses_at_load_what_a_spec_alone_cannot_know(tmp_path: Path, name: str) -> None:
    """The component has a validated spec in its hands; files and layouts are looked at before it builds an asset."""
    right, wrong, field, said = WRONG[name]
    folder = _written(tmp_path / "churn", right, wrong)
    spec = PipelineSpec.model_validate(yaml.safe_load((folder / "defs.yaml").read_text())["attributes"])
    with pytest.raises(DeclarationInvalid) as caught:
        from_spec(spec, folder)
    (problem,) = caught.value.problems
    assert (problem.field, problem.file) == (field, str(folder / "defs.yaml"))
    assert said in problem.message
    assert problem.line > 1


def test_a_check_costs_less_than_three_seconds_and_starts_nothing(tmp_path: Path) -> None:
    """CPU seconds of the whole command, so that a busy machine does not count."""
    folder = _written(tmp_path / "churn", *WRONG["batch_that_does_not_divide"][:2])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "headway.cli.main", "check", str(folder)],
        cwd=ROOT,
        env=os.environ | {"HEADWAY_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 1
    assert "255 rows do not divide" in done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3
    assert not (tmp_path / "home").exists()
