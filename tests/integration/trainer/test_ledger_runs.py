"""The ledger of a run that was killed, preempted and moved to other ranks is what its engines were really given."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from support.token_runs import CONTEXT, begin, content_of, noted, shard_of, token_spec
from support.trainer_runs import ENGINES, Run, warm
from support.training_data import quiet, training_run

from trainer.data import load_data, load_rows
from trainer.ledger import Ledger, Sample, steps_taken
from trainer.spec import ExitCode, RunSpec


def disturb(run: Run) -> None:
    """Four attempts: one loses a rank, one is preempted, one on half of the nodes dies, one comes to the end."""
    killed = begin(run, 2, kill={"rank": 1, "step": 5})
    assert warm().wait(killed)[1] == -signal.SIGKILL
    asked = begin(run, 2, ask={"rank": 1, "step": 1})
    assert warm().wait(asked) == [ExitCode.PREEMPTED, ExitCode.PREEMPTED]
    alone = begin(run, 1, kill={"rank": 0, "step": 5})
    assert warm().wait(alone) == [-signal.SIGKILL]
    assert warm().wait(begin(run, 2)) == [0, 0]


def ledger_of(run: Run) -> Ledger:
    events = [
        {"attempt": attempt, "kind": event.kind, "data": event.data}
        for attempt in range(1, run.attempts + 1)
        for event in run.events(attempt=attempt)
        if event.kind in ("position", "step", "epoch", "checkpoint", "metrics")
    ]
    return Ledger(run.spec, run.folder / "store", steps_taken(run.spec, events))


def assert_is_what_was_given(run: Run, contents: dict[Sample, str]) -> Ledger:
    """Every step's samples are those that its attempt's engines got, and each epoch has each sample once."""
    ledger, given = ledger_of(run), noted(run)
    begun = {attempt: run.events("position", attempt)[0].data["step"] for attempt in range(1, run.attempts + 1)}
    assert {part.attempt for part in ledger.taken} == {1, 2, 3, 4}
    assert [part.data_ranks for part in ledger.taken] == [2, 2, 1, 2]
    epochs: dict[int, list[Sample]] = {}
    for entry in ledger.entries(1, ledger.last):
        told = {rank: [contents[sample] for sample in samples] for rank, samples in enumerate(entry.ranks)}
        assert told == given[entry.attempt, entry.step - 1 - begun[entry.attempt]], entry.step
        epochs.setdefault(entry.epoch, []).extend(entry.samples)
    for samples in epochs.values():
        assert len(samples) == len(contents)
        assert set(samples) == set(contents)
    assert epochs[1] != epochs[2]
    return ledger


@pytest.mark.parametrize("engine", ENGINES)
def test_d01_the_ledger_of_tokens_lists_each_window_once_an_epoch(engine: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", token_spec(tmp_path / "run" / "store", engine))
    disturb(run)
    shards = [shard_of(500, 1), shard_of(491, 2)]
    contents: dict[Sample, str] = {}
    for number, shard in enumerate(shards):
        for offset in range(0, len(shard) - CONTEXT, CONTEXT):
            window = shard[offset : offset + CONTEXT + 1].astype("int64")
            contents[number, offset] = content_of([window[:-1], window[1:]])
    ledger = assert_is_what_was_given(run, contents)
    metrics = run.events("metrics")[-1].data
    assert (ledger.last, metrics["steps"], metrics["samples"]) == (16, 16, 2 * len(contents))
    assert metrics["tokens"] == 2 * len(contents) * CONTEXT
    steps = run.events("step")
    assert steps[-1].data["tokens_per_s"] > 0
    assert "rows_per_s" not in steps[-1].data


def test_d01_the_ledger_of_rows_names_each_row_once_an_epoch(tmp_path: Path) -> None:
    store = tmp_path / "run" / "store"
    spec = rows_spec(store)
    run = Run(tmp_path / "run", spec)
    disturb(run)
    dataset, rows = load_data(spec, store, quiet), load_rows(spec.rows, store, quiet, spec.rows.identity)
    names = rows.train.column("flight_id").to_pylist()
    contents: dict[Sample, str] = {
        (name,): content_of([dataset.train.numeric[i], dataset.train.categorical[i]]) for i, name in enumerate(names)
    }
    assert_is_what_was_given(run, contents)


def rows_spec(store: Path) -> RunSpec:
    """About 60 stored rows in batches of 8, two epochs, on the layout and schedule of the tokens."""
    like = token_spec(store)
    spec = training_run(store, days=4, valid_days=1, rows=21)
    schedule = replace(like.schedule, epochs=2)
    return replace(spec, layout=like.layout, batch=like.batch, schedule=schedule, restart=like.restart)
