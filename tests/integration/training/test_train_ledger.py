"""`headway train ledger` of a run in a home: the rows of its snapshots, by step."""

import json

import dagster as dg
import pyarrow.parquet as pq
import pytest
from support.training_bench import TrainingBench

from trainer.spec import parse_run


def test_the_ledger_of_a_run_names_the_rows_of_its_snapshots(
    bench: TrainingBench, instance: dg.DagsterInstance, capfd: pytest.CaptureFixture[str]
) -> None:
    assert bench.materialize(instance).success
    (run,) = bench.runs()

    def asked(*arguments: str) -> str:
        result = bench.run("train", "ledger", run.run_id, *arguments)
        assert result.exit_code == 0, result.output
        return capfd.readouterr().out

    capfd.readouterr()
    document = json.loads(asked("--json"))
    with bench.services() as services:
        spec = parse_run(services.store.get_bytes(run.facts.spec_digest))
    known = set[str]()
    for file in spec.rows.files:
        path = bench.settings.store_root / "sha256" / file.sha256[7:9] / file.sha256[9:]
        known |= set(pq.read_table(path, columns=["visit_id"]).column("visit_id").to_pylist())
    assert (document["kind"], document["sample"]) == ("rows", ["visit_id"])
    assert document["same_code"] is True
    assert [entry["step"] for entry in document["ledger"]] == list(range(1, document["steps"] + 1))
    named = [sample[0] for entry in document["ledger"] for rank in entry["ranks"] for sample in rank]
    assert set(named) <= known
    assert all(len(entry["ranks"]) == 2 for entry in document["ledger"])
    first = document["ledger"][0]["ranks"]
    words = asked("--step", "1")
    assert [line.split("  ")[4:] for line in words.splitlines()[1:]] == [[name for (name,) in rank] for rank in first]
    refused = bench.run("train", "ledger", run.run_id, "--step", "0:1")
    assert refused.exit_code == 2
    assert "the run's events tell of steps 1 to" in capfd.readouterr().err
