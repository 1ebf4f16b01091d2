"""Reference models: the historical rate by hand, logistic regression against scikit-learn, gradient boosting."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from sklearn.linear_model import LogisticRegression as Theirs
from sklearn.metrics import roc_auc_score
from support.training_data import quiet, training_run

from trainer.artifact import batch_logits
from trainer.baselines import PRIOR_ROWS, RateColumn, boosting_scores, historical_rate, log_loss, logistic_module
from trainer.data import Dataset, load_data

COLUMNS = (RateColumn("carrier"), RateColumn("minute", 60))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    store = tmp_path_factory.mktemp("store")
    return load_data(training_run(store, days=10, rows=300), store, quiet)


def past() -> tuple[pa.Table, np.ndarray]:
    table = pa.table({"carrier": ["A"] * 30 + ["B"] * 9 + [None], "minute": [0.0] * 30 + [61.0] * 9 + [None]})
    return table, np.array([1.0] * 10 + [0.0] * 20 + [1.0] * 9 + [0.0], dtype=np.float32)


def test_the_historical_rate_is_smoothed_towards_the_overall_rate() -> None:
    learned, target = past()
    overall = 19 / 40
    asked = pa.table({"carrier": ["A", "B", "A", "C", None], "minute": [59.9, 119.0, 60.0, 0.0, None]})
    expected = [
        (10 + PRIOR_ROWS * overall) / (30 + PRIOR_ROWS),
        (9 + PRIOR_ROWS * overall) / (9 + PRIOR_ROWS),
        overall,
        overall,
        (0 + PRIOR_ROWS * overall) / (1 + PRIOR_ROWS),
    ]
    assert np.allclose(historical_rate(learned, target, asked, COLUMNS), expected, rtol=1e-12)


def test_the_historical_rate_of_a_row_does_not_depend_on_the_rows_asked_beside_it() -> None:
    learned, target = past()
    asked = pa.table({"carrier": ["Z", "A", "B"], "minute": [5.0, 1.0, 70.0]})
    whole = historical_rate(learned, target, asked, COLUMNS)
    alone = [historical_rate(learned, target, asked.slice(i, 1), COLUMNS)[0] for i in range(3)]
    assert whole.tolist() == alone


def test_logistic_regression_is_that_of_scikit_learn(dataset: Dataset) -> None:
    module, converged = logistic_module(dataset, quiet)
    assert converged
    # An untrained intercept column for each code of each category, as the module has.
    train = dataset.train
    coded = [np.eye(size)[train.categorical[:, i]] for i, size in enumerate(dataset.inputs.category_sizes)]
    theirs = Theirs(C=1.0, tol=1e-8, max_iter=5000).fit(np.hstack([train.numeric, *coded]), train.target)
    state = {name: weight.numpy() for name, weight in module.state_dict().items()}
    ours = np.concatenate([state["linear.weight"][0], *(state[f"categories.{i}.weight"][:, 0] for i in range(3))])
    assert np.allclose(ours, theirs.coef_[0], atol=2e-3)
    assert module.linear.bias.item() == pytest.approx(theirs.intercept_[0], abs=2e-3)


def test_codes_that_training_never_held_weigh_nothing(dataset: Dataset) -> None:
    module, _ = logistic_module(dataset, quiet)
    assert module.state_dict()["categories.0.weight"][:2, 0].tolist() == [0.0, 0.0]


def test_the_fit_beats_and_repeats_to_the_bit(dataset: Dataset) -> None:
    beats: list[int] = []
    first, _ = logistic_module(dataset, lambda: beats.append(1))
    second, _ = logistic_module(dataset, quiet)
    assert len(beats) > 3
    assert batch_logits(first, dataset.valid).tobytes() == batch_logits(second, dataset.valid).tobytes()


def test_gradient_boosting_finds_what_a_linear_model_cannot_and_repeats(dataset: Dataset) -> None:
    scores, trees = boosting_scores(dataset, dataset.valid, seed=3)
    again, _ = boosting_scores(dataset, dataset.valid, seed=3)
    assert np.array_equal(scores, again)
    assert trees > 1
    linear = batch_logits(logistic_module(dataset, quiet)[0], dataset.valid)
    target = dataset.valid.target
    assert roc_auc_score(target, scores) > roc_auc_score(target, linear) + 0.02


def test_reference_models_learn_from_training_rows_only(tmp_path: Path, dataset: Dataset) -> None:
    del tmp_path
    broken = Dataset(
        dataset.train,
        type(dataset.valid)(
            dataset.valid.numeric * 0, dataset.valid.categorical, 1 - dataset.valid.target, dataset.valid.row_ids
        ),
        dataset.inputs,
        dataset.counts,
    )
    ours, theirs = logistic_module(dataset, quiet)[0], logistic_module(broken, quiet)[0]
    assert log_loss(ours, dataset.train) == log_loss(theirs, dataset.train)


def test_boosting_without_validation_rows_uses_all_trees(dataset: Dataset) -> None:
    empty = type(dataset.valid)(
        *(getattr(dataset.valid, n)[:0] for n in ("numeric", "categorical", "target", "row_ids"))
    )
    few = type(dataset.train)(
        *(getattr(dataset.train, n)[:200] for n in ("numeric", "categorical", "target", "row_ids"))
    )
    _, trees = boosting_scores(Dataset(few, empty, dataset.inputs, {}), few, seed=1)
    assert trees == 300
