"""The stateful machines over the public commands on both databases, and the mutants that their steps must kill.

Random examples run over the commands as they are. Mutants meet fixed sequences of the same rules and invariants: which
fault a random example finds changes with what is drawn.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import registry_machine, retrain_machine
from support.catalog_machine import run

ROOT = Path(__file__).parents[3]
DATA, REGISTRY, RETRAIN = "data", "registry", "retrain"
STEPS = 2_000


@dataclass(frozen=True)
class Mutant:
    """One fault: in `file`, `old` becomes `new`; a step of the machine's fixed sequence must see it."""

    name: str
    file: str
    old: str
    new: str
    machine: str = DATA


MUTANTS = (
    Mutant(
        "drop the epoch check",
        "headway/catalog/datasets.py",
        "            .where(dataset_partition.c.epoch == expected)\n",
        "",
    ),
    Mutant(
        "drop the key claim", "headway/catalog/commands.py", "    if mine:\n        return None\n", "    return None\n"
    ),
    Mutant(
        "drop a trigger in a migration",
        "headway/catalog/migrations/versions/0001_data.py",
        "def _snapshots() -> None:\n",
        'def _snapshots() -> None:\n    op.execute("DROP TRIGGER dataset_event_no_update")\n',
    ),
    Mutant(
        "swallow a conflict",
        "headway/catalog/commands.py",
        "        raise IdempotencyConflict(step.key, command.operation)\n",
        "        pass\n",
    ),
    Mutant(
        "let a wrong token end an attempt",
        "headway/catalog/runs.py",
        "    if attempt.token != token or not attempt.is_open:\n        if",
        "    if not attempt.is_open:\n        if",
        REGISTRY,
    ),
    Mutant(
        "let an end change",
        "headway/catalog/runs.py",
        "        if attempt.token == token and _same_end(step, attempt, ending):",
        "        if attempt.token == token:",
        REGISTRY,
    ),
    Mutant(
        "let a machine restart what was cancelled",
        "headway/catalog/runs.py",
        '    if run.status == "cancelled" and ask.asker == "machine":',
        '    if last.state == "cancelled" and ask.asker == "machine":',
        REGISTRY,
    ),
    Mutant(
        "count preemptions",
        "headway/catalog/run_facts.py",
        "        counted = self.code != PREEMPTED if self.retry is None else",
        "        counted = True if self.retry is None else",
        REGISTRY,
    ),
    Mutant(
        "overdraw a budget",
        "headway/catalog/budgets.py",
        "    if state.reserved + state.committed + amount > state.limit:",
        "    if state.committed + amount > state.limit:",
        REGISTRY,
    ),
    Mutant(
        "keep a reservation after the end",
        "headway/catalog/budgets.py",
        '    _insert(step, budget_id, period, "release", owner_id, reserved, owner_kind)\n',
        "",
        REGISTRY,
    ),
    Mutant(
        "lose events at a gap",
        "headway/catalog/runs.py",
        "    if first_seq > cursor + 1:\n        raise EventGap(run_id, number, node, cursor + 1, first_seq)\n",
        "",
        REGISTRY,
    ),
    Mutant(
        "register a network as another kind",
        "headway/catalog/registry.py",
        "    if listed != facts.manifest_digest:",
        "    if facts.manifest_digest not in run.result.artifacts.values():",
        REGISTRY,
    ),
    Mutant(
        "promote on results of an older policy",
        "headway/catalog/endpoints.py",
        "    if newest.policy_version != policy_version:",
        "    if newest.policy_version > policy_version:",
        REGISTRY,
    ),
    Mutant(
        "promote what is undecided",
        "headway/catalog/endpoints.py",
        '    if newest.verdict != "pass":',
        '    if newest.verdict == "fail":',
        REGISTRY,
    ),
    Mutant(
        "promote past the policy",
        "headway/catalog/endpoints.py",
        "    if not policy.allows_immediate:",
        "    if policy is None:",
        REGISTRY,
    ),
    Mutant(
        "forget where the endpoint was",
        "headway/catalog/endpoints.py",
        "    if expected not in (None, epoch):",
        "    if expected is not None and expected < epoch:",
        REGISTRY,
    ),
    Mutant(
        "roll back twice on a repeat",
        "headway/catalog/endpoints.py",
        "    return last.epoch if mine else last.epoch + 1",
        "    return last.epoch + 1",
        REGISTRY,
    ),
    Mutant(
        "retire what serves",
        "headway/catalog/registry.py",
        '("stable", "previous", "candidate")',
        '("stable", "candidate")',
        REGISTRY,
    ),
    Mutant(
        "take a prediction of another version",
        "headway/catalog/predictions.py",
        "        if version != batch.model_version:",
        "        if version is None:",
        REGISTRY,
    ),
    Mutant(
        "let a pipeline have two open requests",
        "headway/catalog/migrations/versions/0006_monitoring.py",
        "        unique=True,\n",
        "",
        RETRAIN,
    ),
    Mutant(
        "move a request from where it is not",
        "headway/catalog/retraining.py",
        "        .where(retrain_request.c.epoch == expected_epoch)\n",
        "",
        RETRAIN,
    ),
    Mutant(
        "close a request without settling",
        "headway/catalog/retraining.py",
        "    if closed is not None:\n",
        "    if closed is not None and after.cost_seconds:\n",
        RETRAIN,
    ),
)


def test_commands_keep_the_model(catalog_url: str, tmp_path: Path) -> None:
    assert run(catalog_url, tmp_path / "store", examples=50) >= STEPS


def test_runs_and_promotions_keep_the_model(catalog_url: str, tmp_path: Path) -> None:
    assert registry_machine.run(catalog_url, tmp_path / "store", examples=28) >= STEPS // 2


def test_retraining_keeps_the_model(catalog_url: str, tmp_path: Path) -> None:
    assert retrain_machine.run(catalog_url, tmp_path / "store", examples=6) >= STEPS // 20


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("copy")
    unwanted = shutil.ignore_patterns("__pycache__")
    for package in ("headway", "trainer", "tests/support"):
        shutil.copytree(ROOT / package, copy / package, ignore=unwanted)
    return copy


def _play(copy: Path, folder: Path, machine: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": f"{copy}:{copy / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1"}
    url = f"sqlite:///{folder / 'catalog.db'}"
    command = [sys.executable, "-m", "support.machine_scripts", machine, url, str(folder / "store")]
    return subprocess.run(
        command,
        env=environment,
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("machine", [DATA, REGISTRY, RETRAIN])
def test_the_sequences_pass_on_an_unchanged_copy(copied: Path, tmp_path: Path, machine: str) -> None:
    result = _play(copied, tmp_path, machine)
    assert result.returncode == 0, result.stderr
    assert "steps" in result.stdout


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_step_kills(mutant: Mutant, copied: Path, tmp_path: Path) -> None:
    file = copied / mutant.file
    original = file.read_text()
    assert original.count(mutant.old) == 1
    file.write_text(original.replace(mutant.old, mutant.new))
    try:
        result = _play(copied, tmp_path, mutant.machine)
    finally:
        file.write_text(original)
    assert result.returncode == 1, result.stdout
    assert "StepFailed: state." in result.stderr, result.stderr
