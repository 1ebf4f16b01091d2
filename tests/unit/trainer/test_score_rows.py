"""Scores: a row's bits depend on that row alone, and the command does what its contract says."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training_data import CATEGORICAL, NUMERIC, ROOT, model_spec, snapshot_table, training_run, write_models

from trainer.artifact import probabilities
from trainer.check import check_artifact, hostile_rows
from trainer.predictor import Predictor, Scores, load_artifact

ROWS = snapshot_table(40, 300, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    spec = training_run(folder / "store", days=4, rows=60, model=model_spec(options={"width": 128, "blocks": 2}))
    write_models(spec, folder / "store", folder)
    return folder


@pytest.fixture(scope="module")
def network(folder: Path) -> Predictor:
    return load_artifact(folder / "network")


def test_a_larger_batch_would_change_last_bits(network: Predictor) -> None:
    # Why rows are scored one by one. Were this to fail, the next test would show nothing.
    numeric, categorical = network.inputs.encode(ROWS)
    with torch.inference_mode():
        together = network.module(torch.from_numpy(numeric), torch.from_numpy(categorical)).numpy()
    alone = network.score(ROWS).logit
    assert np.allclose(together, alone, atol=1e-4)
    assert (together != alone).any()


KNOWN: list[Scores] = []


@given(picked=st.lists(st.integers(0, len(ROWS) - 1), min_size=1, max_size=40))
@settings(max_examples=40, deadline=None)
def test_a_row_scores_to_the_same_bits_in_any_company_and_order(network: Predictor, picked: list[int]) -> None:
    whole = network.score(ROWS) if not KNOWN else KNOWN[0]
    KNOWN[:] = [whole]
    some = network.score(ROWS.take(picked))
    assert some.logit.tobytes() == whole.logit[picked].tobytes()
    assert some.probability.tobytes() == whole.probability[picked].tobytes()


def test_columns_of_no_input_and_the_order_of_columns_do_not_matter(network: Predictor) -> None:
    inputs = ROWS.select([*NUMERIC[::-1], *CATEGORICAL])
    assert network.score(inputs).probability.tobytes() == network.score(ROWS).probability.tobytes()


def test_no_rows_are_no_scores(network: Predictor) -> None:
    scores = network.score(ROWS.slice(0, 0))
    assert (len(scores.probability), len(scores.logit)) == (0, 0)


def test_missing_and_out_of_range_values_score_to_a_probability(folder: Path) -> None:
    for kind in ("network", "logistic"):
        rows = hostile_rows(load_artifact(folder / kind).inputs)
        assert rows.column("weather__temp").null_count
        assert 1e308 in rows.column("weather__temp").to_pylist()
        assert 2**63 - 1 in rows.column("distance").to_pylist()
        assert check_artifact(folder / kind)["finite_outputs"] is True


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=20))
@settings(max_examples=60, deadline=None)
def test_probabilities_are_the_logistic_function_and_never_leave_its_range(logits: list[float]) -> None:
    found = probabilities(np.array(logits, dtype=np.float32))
    assert ((found >= 0) & (found <= 1)).all()
    exact = 1 / (1 + np.exp(-np.clip(np.array(logits, dtype=np.float64), -700, 700)))
    assert np.allclose(found, exact, rtol=1e-12, atol=1e-300)
    assert (np.diff(probabilities(np.sort(np.array(logits, dtype=np.float32)))) >= 0).all()


def score(artifact: Path, source: Path, target: Path) -> "subprocess.CompletedProcess[str]":
    arguments = ["--artifact", str(artifact), "--input", str(source), "--output", str(target)]
    return subprocess.run(
        [sys.executable, "-m", "trainer.score", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_the_command_scores_a_file_in_order(folder: Path, network: Predictor, tmp_path: Path) -> None:
    pq.write_table(ROWS, tmp_path / "in.parquet", row_group_size=17)
    done = score(folder / "network", tmp_path / "in.parquet", tmp_path / "out.parquet")
    assert done.returncode == 0, done.stderr
    scores = pq.read_table(tmp_path / "out.parquet")
    assert scores.schema.types == [pa.float64(), pa.float32()]
    expected = network.score(ROWS)
    # Another process, other memory: the same bits.
    assert scores.column("score").to_numpy().tobytes() == expected.probability.tobytes()
    assert scores.column("logit").to_numpy().tobytes() == expected.logit.tobytes()


def test_the_command_refuses_in_one_line_and_writes_nothing(folder: Path, tmp_path: Path) -> None:
    pq.write_table(ROWS.drop_columns(["origin"]), tmp_path / "in.parquet")
    done = score(folder / "network", tmp_path / "in.parquet", tmp_path / "out.parquet")
    assert done.returncode == 64
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: input 'origin'")
    assert not (tmp_path / "out.parquet").exists()


def test_a_model_loads_from_its_folder_wherever_that_is(folder: Path, network: Predictor, tmp_path: Path) -> None:
    moved = load_artifact(Path(shutil.copytree(folder / "network", tmp_path / "moved")))
    assert moved.manifest.digest == network.manifest.digest
    assert moved.score(ROWS).logit.tobytes() == network.score(ROWS).logit.tobytes()
