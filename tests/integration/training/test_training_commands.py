"""`headway runs`, `reconcile`, `doctor` and `status`, as a person types them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
from support.training_bench import AS_OF, TrainingBench


@pytest.fixture
def done(bench: TrainingBench, instance: dg.DagsterInstance) -> TrainingBench:
    """A bench with one succeeded run."""
    assert bench.materialize(instance, config={"note": "first"}).success
    return bench


def test_lists_and_cards_of_runs(done: TrainingBench) -> None:
    (row,) = done.json("runs", "list")["runs"]
    assert (row["pipeline"], row["as_of"], row["status"], row["note"]) == ("shop", AS_OF, "succeeded", "first")
    assert row["run_id"] in done.run("runs", "list").stdout
    shown = done.json("runs", "show", row["run_id"][:6])
    assert shown["out_of_date"] == "no"
    assert list(shown["artifacts"]) == ["network"]
    assert [a["state"] for a in shown["attempt"]] == ["succeeded"]
    assert [e["epoch"] for e in shown["epochs"]] == [1]
    assert "valid_loss" in done.run("runs", "show", row["run_id"]).stdout


def test_logs_are_every_event_in_order(done: TrainingBench) -> None:
    (row,) = done.json("runs", "list")["runs"]
    printed = done.run("runs", "logs", row["run_id"], "--json")
    events = [json.loads(line) for line in printed.stdout.splitlines()]
    assert [e["seq"] for e in events] == list(range(1, len(events) + 1))
    assert {"node_start", "step", "epoch", "artifact", "node_end"} <= {e["kind"] for e in events}
    words = done.run("runs", "logs", row["run_id"], "--follow")
    assert words.exit_code == 0
    assert "ended with 0" in words.stdout


@pytest.mark.parametrize("command", [("runs", "show", "zz"), ("runs", "logs", "zz"), ("runs", "cancel", "zz")])
def test_an_unknown_run_is_one_line(done: TrainingBench, command: tuple[str, ...]) -> None:
    refused = done.run(*command)
    assert refused.exit_code == 2
    assert refused.stderr.count("\n") == 1
    assert "headway runs list" in refused.stderr


def test_cancelling_what_is_over_changes_nothing(done: TrainingBench) -> None:
    (row,) = done.json("runs", "list")["runs"]
    done.run("runs", "cancel", row["run_id"])
    assert done.json("runs", "list")["runs"][0]["status"] == "succeeded"
    assert done.run("reconcile").stdout == "rows and processes agree\n"


def test_the_doctor_names_what_is_wrong_and_what_mends_it(done: TrainingBench) -> None:
    well = done.json("doctor")
    assert all(f["ok"] for f in well["findings"]), well
    keys = done.home / "keys"
    keys.mkdir(mode=0o755)
    (keys / "gate.key").write_text("secret")
    (keys / "gate.key").chmod(0o644)
    ill = done.run("doctor")
    assert ill.exit_code == 1
    line = next(line for line in ill.stdout.splitlines() if line.startswith("WRONG"))
    assert "gate.key" in line
    assert "chmod" in line
    assert "secret" not in ill.stdout


def test_status_counts_what_there_is(done: TrainingBench) -> None:
    document = done.json("status")
    assert {p["pipeline"] for p in document["pipelines"]} >= {"flight_delay"}
    assert "HEADWAY_HOME" in done.run("status").stdout
    assert "flight_delay" not in done.run("status", "--settings").stdout


def test_help_and_lists_import_no_torch(done: TrainingBench) -> None:
    code = (
        "import sys\nfrom headway.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "sys.stderr.write(','.join(m for m in ('torch', 'deepspeed', 'sklearn', 'dagster') if m in sys.modules))\n"
    )
    root = Path(__file__).resolve().parents[3]
    for arguments in (["--help"], ["runs", "list"], ["models", "list"], ["status"], ["doctor"]):
        loaded = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, **done.environment},
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
        assert loaded.stderr == "", arguments


@pytest.mark.parametrize("command", [("runs", "list"), ("reconcile",), ("status",)])
def test_a_home_that_cannot_be_used_is_one_line(tmp_path: Path, command: tuple[str, ...]) -> None:
    file = tmp_path / "home"
    file.write_text("")
    refused = TrainingBench(tmp_path, file).run(*command)
    assert refused.exit_code == 2
    assert refused.stderr.count("\n") == 1
    assert "HEADWAY_HOME" in refused.stderr
    ill = TrainingBench(tmp_path, file).run("doctor")
    assert ill.exit_code == 1
    assert "HEADWAY_HOME" in ill.output


def test_a_read_only_database_is_one_line(done: TrainingBench, tmp_path: Path) -> None:
    unreachable = TrainingBench(done.folder, done.home, f"sqlite:///{tmp_path}")
    refused = unreachable.run("runs", "list")
    assert refused.exit_code == 2
    assert refused.stderr.count("\n") == 1
    assert "the database cannot be used" in refused.stderr
