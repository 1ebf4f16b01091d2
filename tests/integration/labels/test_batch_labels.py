"""Labels of the pipeline's own label source: known by the world's time, for every answer about the event, once."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.loop_bench import (
    DAYS,
    ENDPOINT,
    HOUR,
    WEEK,
    answer_days,
    copied,
    moment_of,
    opened,
    pipeline_of,
    planted,
    set_world,
)
from support.workbench import Workbench

from headway.catalog.monitoring_facts import Label
from headway.catalog.registry_facts import PredictionBatch
from headway.monitoring.labels import BatchLabels, LabelDesk, batch_labels, corrections
from headway.monitoring.windows import week_bounds

START, END = week_bounds(WEEK)


@pytest.fixture
def bench(loop: Workbench, tmp_path: Path) -> Workbench:
    made = copied(loop, tmp_path / "bench")
    answer_days(made)
    return made


def _fill(bench: Workbench) -> BatchLabels:
    with opened(bench) as services:
        return batch_labels(services, pipeline_of(bench), ENDPOINT, START, END)


def _labels(bench: Workbench) -> list[Label]:
    with opened(bench) as services:
        return [label for _, label in services.catalog.labels_between(services.principal, ENDPOINT, START, END)]


def _rows(bench: Workbench) -> Iterator[dict[str, Any]]:
    header, *lines = (bench.folder / "labels.csv").read_text().splitlines()
    for line in lines:
        yield dict(zip(header.split(","), line.split(","), strict=True))


def test_labels_come_when_their_outcome_is_known_in_the_world(bench: Workbench) -> None:
    known = sorted(moment_of(row["known"]) for row in _rows(bench))
    first = _fill(bench)
    by_then = sum(moment <= moment_of("2026-03-06T00:00:00Z") for moment in known)
    assert 0 < by_then < 120
    assert (first.predictions, first.labelled, first.added, first.unchanged) == (120, by_then, by_then, 0)
    assert (first.quarantined, first.refused) == ((), 0)
    set_world(bench, "2026-03-07T00:00:00Z")
    second = _fill(bench)
    assert (second.labelled, second.added, second.unchanged) == (120, 120 - by_then, by_then)
    third = _fill(bench)
    assert (third.labelled, third.added) == (120, 0)
    labels = _labels(bench)
    assert sorted(label.observed_at for label in labels) == known
    assert {label.source for label in labels} == {"backfill"}
    outcomes = {int(row["size"]): int(row["target"]) for row in _rows(bench)}
    with opened(bench) as services:
        for label in labels:
            assert label.prediction_id is not None
            size = int(label.prediction_id.split("-")[1])
            assert label.value == outcomes[size], "the outcome of the event that was asked about"
            asked = services.catalog.prediction(services.principal, label.prediction_id).asked_at
            assert asked is not None
            assert label.observed_at == asked + 5 * HOUR


def test_a_row_that_comes_before_its_outcome_gives_no_label_yet(bench: Workbench) -> None:
    pipeline = pipeline_of(bench)
    source = pipeline.spec.sources["labels"].model_copy(update={"available_time": "t"})
    spec = pipeline.spec.model_copy(update={"sources": {**pipeline.spec.sources, "labels": source}})
    by_then = sum(moment_of(row["known"]) <= moment_of("2026-03-06T00:00:00Z") for row in _rows(bench))
    with opened(bench) as services:
        done = batch_labels(services, replace(pipeline, spec=spec), ENDPOINT, START, END)
    assert (done.predictions, done.labelled) == (120, by_then)


def test_every_answer_about_an_event_gets_its_label(bench: Workbench) -> None:
    set_world(bench, "2026-03-07T00:00:00Z")
    with opened(bench) as services:
        (some, *_) = services.catalog.predictions(services.principal, ENDPOINT, START, END)
        assert some.asked_at is not None
        again = planted("asked-again", some.asked_at + 60_000_000, event_key=some.event_key)
        nothing = planted("no-event", some.asked_at + 60_000_000, event_key="sha256:" + "0" * 64)
        detail = services.store.put_bytes(b"detail")
        batch = PredictionBatch(ENDPOINT, 1, 1, (again, nothing), (detail,))
        services.catalog.record_predictions(services.principal, None, batch)
    assert _fill(bench).labelled == 121
    with opened(bench) as services:
        found = services.catalog.current_labels(services.principal, [some.prediction_id, "asked-again", "no-event"])
    assert set(found) == {some.prediction_id, "asked-again"}
    assert found[some.prediction_id].value == found["asked-again"].value


def test_a_changed_outcome_corrects_and_changed_back_corrects_again(bench: Workbench) -> None:
    set_world(bench, "2026-03-07T00:00:00Z")
    _fill(bench)
    original = (bench.folder / "labels.csv").read_text()
    lines = original.splitlines()
    row = next(line for line in lines[1:] if line.endswith(",1") and DAYS[0] in line.split(",")[1])
    name = int(row.split(",")[3])
    for text, value in ((original.replace(row, row[:-1] + "0"), 0), (original, 1)):
        (bench.folder / "labels.csv").write_text(text)
        bench.ingest("labels", partitions=DAYS[:1])
        done = _fill(bench)
        assert (done.added, done.unchanged) == (1, 119)
        own = [label for label in _labels(bench) if f"online-{name:04d}" in str(label.prediction_id)]
        assert next(label.value for label in own if label.current) == value
    assert len(own) == 3, "corrections delete nothing"
    assert _fill(bench).added == 0


def test_where_a_system_said_the_same_nothing_is_added(bench: Workbench) -> None:
    set_world(bench, "2026-03-07T00:00:00Z")
    outcomes = {int(row["size"]): int(row["target"]) for row in _rows(bench)}
    with opened(bench) as services:
        asked = services.catalog.predictions(services.principal, ENDPOINT, START, END)[:10]
        items = [
            {"prediction_id": p.prediction_id, "value": outcomes[int(p.prediction_id.split("-")[1])]} for p in asked
        ]
        items[0]["value"] = 1 - int(str(items[0]["value"]))
        desk = LabelDesk(services, {"pipeline": pipeline_of(bench)}.__getitem__)
        told = desk.accept(services.principal, ENDPOINT, items)
        assert [t["status"] for t in told] == ["accepted"] * 10
        done = batch_labels(services, pipeline_of(bench), ENDPOINT, START, END)
        assert (done.labelled, done.added, done.unchanged) == (120, 111, 9)
        current = services.catalog.current_labels(services.principal, [asked[0].prediction_id])
        assert current[asked[0].prediction_id].source == "auto", "another word of the source is kept, and stands back"
        assert corrections(services, ENDPOINT, START, END) == 1


def test_a_quarantined_partition_is_left_out_and_named(bench: Workbench) -> None:
    set_world(bench, "2026-03-07T00:00:00Z")
    with opened(bench) as services:
        version = services.catalog.current(services.principal, "pipeline/labels", DAYS[1])
        assert version is not None
        services.catalog.retire_version(services.principal, None, "pipeline/labels", version.version, "taken back")
    done = _fill(bench)
    assert done.quarantined == (DAYS[1],)
    assert (done.predictions, done.labelled) == (120, 80)


def test_a_person_corrects_on_the_command_line_and_outranks_the_source(bench: Workbench) -> None:
    set_world(bench, "2026-03-07T00:00:00Z")
    _fill(bench)
    label = next(label for label in _labels(bench) if label.value == 0)
    prediction = str(label.prediction_id)
    file = bench.folder.parent / "corrections.csv"
    file.write_text(f"prediction_id,value\n{prediction},1\nnobody,1\n{prediction},7\n")
    common = ("--pipeline", str(bench.folder))
    refused = bench.run("labels", "add", str(file), *common, "--actor", "ann")
    assert refused.exit_code == 2
    assert "needs --actor and --reason" in refused.output
    done = bench.run("labels", "add", str(file), *common, "--actor", "ann", "--reason", "saw it", "--json")
    assert done.exit_code == 1, "one was refused"
    told = json.loads(done.stdout)["labels"]
    assert [t["status"] for t in told] == ["accepted", "waiting", "refused"]
    again = bench.run("labels", "add", str(file), *common, "--actor", "ann", "--reason", "saw it")
    assert "pipeline: 3 labels: 1 accepted, 1 refused, 1 waiting" in again.output
    shown = bench.run("labels", "show", prediction[:20], "--json")
    rows = json.loads(shown.stdout)["labels"]
    assert [(r["source"], r["value"], r["current"]) for r in rows] == [("backfill", 0, False), ("human", 1, True)]
    assert (rows[1]["actor"], rows[1]["reason"]) == ("ann", "saw it")
    assert "* online-" in bench.run("labels", "show", prediction).output
    inbox = json.loads(bench.run("labels", "inbox", "--json").stdout)
    assert [r["waits_for"] for r in inbox["labels"]] == ["no_prediction"]
    assert "1 label waiting (1 no_prediction)" in bench.run("labels", "inbox").output
    listed = json.loads(bench.run("labels", "list", "--json").stdout)
    assert (listed["predictions"], len(listed["labels"])) == (120, 120)
    assert "120 answers asked" in bench.run("labels", "list", "--from", "2026-03-02", "--to", "2026-03-07").output
    assert _fill(bench).added == 0, "the source's own word did not change"
    with opened(bench) as services:
        assert corrections(services, ENDPOINT, START, END) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "not JSON"),
        ("a.json", '{"labels": 3}', "no list of labels"),
        ("a.json", '[{"value": 1, "value": 0}]', "stands twice"),
        ("a.csv", "value,flight\n1,2\n", "that are no fields"),
    ],
)
def test_files_that_hold_no_labels_are_refused(
    loop: Workbench, tmp_path: Path, name: str, content: str, message: str
) -> None:
    file = tmp_path / name
    file.write_text(content)
    told = loop.run("labels", "add", str(file), "--pipeline", str(loop.folder))
    assert told.exit_code == 2
    assert message in told.output
