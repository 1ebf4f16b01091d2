"""Evaluation: one row per evaluated row, every model's scores, and what a plan may say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.training_data import ROOT, quiet, snapshot_table, training_run, write_models

from trainer.baselines import RateColumn, boosting_scores, historical_rate
from trainer.data import DataRefused, Split, load_data, load_rows
from trainer.evaluate import evaluate, parse_plan
from trainer.predictor import ArtifactRefused, load_artifact
from trainer.spec import RunSpec, SpecRefused

KEEP = ["flight_id", "observed_at", "carrier", "origin"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSpec, Path]:
    folder = tmp_path_factory.mktemp("world")
    spec = training_run(folder / "store", days=5, rows=80, valid_days=1)
    write_models(spec, folder / "store", folder)
    second = snapshot_table(21, 50)
    unknown = pa.array([i < 3 for i in range(50)])
    for name in ("late", "arrived_at"):
        column = pa.array(
            [None if u else v for u, v in zip(unknown.to_pylist(), second.column(name).to_pylist(), strict=True)],
            second.schema.field(name).type,
        )
        second = second.set_column(second.schema.get_field_index(name), name, column)
    for number, table in enumerate([snapshot_table(20, 60), second]):
        pq.write_table(table, folder / f"rows-{number}.parquet")
    return spec, folder


def plan_of(world: tuple[RunSpec, Path], **changes: object) -> dict[str, Any]:
    spec, folder = world
    return {
        "train": {"spec": spec.to_json(), "store_root": str(folder / "store"), "code_root": str(ROOT)},
        "rows": [str(folder / "rows-0.parquet"), str(folder / "rows-1.parquet")],
        "keep": KEEP,
        "artifacts": {"candidate": str(folder / "network"), "logistic": str(folder / "logistic")},
        "historical_rate": ["carrier", {"column": "departure_minute", "width": 60}],
        "reference_models": ["historical_rate", "logistic", "gradient_boosting"],
        **changes,
    }


def evaluated(plan: dict[str, Any], output: Path) -> tuple[pa.Table, dict[str, Any]]:
    evaluate(parse_plan(json.dumps(plan).encode()), output)
    return pq.read_table(output / "scores.parquet"), json.loads((output / "report.json").read_bytes())


def asked_rows(folder: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(folder / f"rows-{n}.parquet") for n in (0, 1)])


def test_every_row_gets_the_score_of_every_model(world: tuple[RunSpec, Path], tmp_path: Path) -> None:
    spec, folder = world
    network, logistic = folder / "network", folder / "logistic"
    artifacts = {"candidate": str(network), "logistic": str(logistic)}
    scores, report = evaluated(plan_of(world, artifacts=artifacts), tmp_path)
    models = ["candidate", "historical_rate", "logistic", "gradient_boosting"]
    assert scores.column_names == [*KEEP, "label", *(f"score_{m}" for m in models)]
    rows = asked_rows(folder)
    assert scores.select(KEEP).equals(rows.select(KEEP))
    by_hand = load_artifact(network).score(rows).probability
    assert scores.column("score_candidate").to_numpy().tobytes() == by_hand.tobytes()
    assert (
        scores.column("score_logistic").to_numpy().tobytes()
        == load_artifact(logistic).score(rows).probability.tobytes()
    )
    learned = load_rows(spec.rows, folder / "store", quiet)
    rate = historical_rate(
        learned.train, learned.train_target, rows, [RateColumn("carrier"), RateColumn("departure_minute", 60)]
    )
    assert np.array_equal(scores.column("score_historical_rate").to_numpy(), rate)
    dataset = load_data(spec, folder / "store", quiet)
    asked = Split(*dataset.inputs.encode(rows), np.zeros(110, np.float32), np.arange(110))
    assert np.array_equal(
        scores.column("score_gradient_boosting").to_numpy(), boosting_scores(dataset, asked, spec.seed)[0]
    )
    assert (report["rows"], report["labelled_rows"], report["fit_rows"]) == (110, 107, len(dataset.train))
    assert set(report["seconds"]) == {"read", *models}
    assert any("smoothed" in note for note in report["notes"])


def test_a_label_that_was_never_known_is_null(world: tuple[RunSpec, Path], tmp_path: Path) -> None:
    scores, _ = evaluated(plan_of(world, reference_models=[]), tmp_path)
    label = scores.column("label")
    assert label.type == pa.float64()
    assert label.to_pylist()[60:63] == [None] * 3
    assert label.null_count == 3
    assert label.to_pylist()[:60] == [float(v) for v in snapshot_table(20, 60).column("late").to_pylist()]
    assert scores.column("score_candidate").null_count == 0


def test_logistic_regression_without_an_artifact_is_fitted_and_close_to_it(
    world: tuple[RunSpec, Path], tmp_path: Path
) -> None:
    given, _ = evaluated(plan_of(world, reference_models=["logistic"]), tmp_path / "given")
    alone = {"candidate": plan_of(world)["artifacts"]["candidate"], "logistic": None}
    fitted, report = evaluated(plan_of(world, reference_models=["logistic"], artifacts=alone), tmp_path / "fitted")
    assert any("fitted here" in note for note in report["notes"])
    assert np.allclose(*(t.column("score_logistic").to_numpy() for t in (given, fitted)), atol=1e-5)


def test_an_altered_artifact_is_refused_and_nothing_is_written(world: tuple[RunSpec, Path], tmp_path: Path) -> None:
    wrong = {"candidate": str(world[1] / "store")}
    with pytest.raises(ArtifactRefused):
        evaluated(plan_of(world, artifacts=wrong), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rows_without_a_needed_column_name_the_file(world: tuple[RunSpec, Path], tmp_path: Path) -> None:
    pq.write_table(snapshot_table(20, 5).drop_columns(["arrivals__count_3h"]), tmp_path / "short.parquet")
    with pytest.raises(DataRefused, match=r"short\.parquet.*arrivals__count_3h"):
        evaluated(plan_of(world, rows=[str(tmp_path / "short.parquet")]), tmp_path / "out")
    (tmp_path / "text.parquet").write_text("no table")
    for name in ("text.parquet", "absent.parquet"):
        with pytest.raises(DataRefused, match=f"{name}: no Parquet file"):
            evaluated(plan_of(world, rows=[str(tmp_path / name)]), tmp_path / "out")
    with pytest.raises(DataRefused, match="no file"):
        evaluated(plan_of(world, rows=[]), tmp_path / "out")


def test_a_label_that_is_neither_0_nor_1_is_refused(world: tuple[RunSpec, Path], tmp_path: Path) -> None:
    table = snapshot_table(20, 5)
    table = table.set_column(1, "late", pa.array([0, 1, 2, 0, 1]))
    pq.write_table(table, tmp_path / "odd.parquet")
    with pytest.raises(DataRefused, match=r"2\.0"):
        evaluated(plan_of(world, rows=[str(tmp_path / "odd.parquet")]), tmp_path / "out")


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an unknown field": (lambda p: p.update(more=1), "plan"),
    "no candidate": (lambda p: p.update(artifacts={}), "artifacts"),
    "an unknown artifact": (lambda p: p["artifacts"].update(rival="x"), "artifacts"),
    "an unknown model": (lambda p: p.update(reference_models=["oracle"]), "reference_models"),
    "no width": (lambda p: p.update(historical_rate=[{"column": "a", "width": 0}]), r"historical_rate\[0\]"),
    "a text for a list": (lambda p: p.update(keep="carrier"), "keep"),
    "a spec that cannot run": (lambda p: p["train"]["spec"].update(format="x"), "format"),
    "a champion": (lambda p: p["artifacts"].update(champion="x"), "artifacts"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_plan_that_says_something_else_is_refused_by_field(world: tuple[RunSpec, Path], case: str) -> None:
    change, field = WRONG[case]
    plan = json.loads(json.dumps(plan_of(world)))
    change(plan)
    with pytest.raises(SpecRefused, match=field):
        parse_plan(json.dumps(plan).encode())
    with pytest.raises(SpecRefused, match="JSON"):
        parse_plan(b"{")


def test_evaluated_rows_never_reach_the_reference_models(world: tuple[RunSpec, Path], tmp_path: Path) -> None:
    first, _ = evaluated(plan_of(world, rows=plan_of(world)["rows"][:1]), tmp_path / "one")
    both, _ = evaluated(plan_of(world), tmp_path / "two")
    for name in first.column_names:
        assert both.column(name).slice(0, 60).equals(first.column(name)), name
