"""The models that a network has to beat: historical rates, logistic regression, gradient boosting.

All are fitted on the training rows of the run, the same that the network learns from, in the same encoding. Validation
rows only stop gradient boosting, as they stop the network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from sklearn.ensemble import HistGradientBoostingClassifier
from threadpoolctl import threadpool_limits

from trainer.artifact import batch_logits, write_artifact
from trainer.blobs import Json, Manifest
from trainer.data import Dataset, Split
from trainer.encoders import LARGEST, category_values, numeric_values
from trainer.models.logistic import LogisticRegression
from trainer.spec import RunSpec

C = 1.0
"""Inverse strength of the L2 penalty: the sum of losses plus |weights|^2 / (2 C) is minimised, as in scikit-learn."""

PRIOR_ROWS = 20
"""How many rows with the overall rate are added to each combination of a historical rate."""

_STEPS = 30
# Largest slope, per row, at which a fit counts as converged.
_GRADIENT = 1e-8
_CHUNK = 16_384
_TREES = 300
_THREADS = 2
# What gradient boosting can take as categories; more are taken as numbers, in the order of their names.
_MOST_CATEGORIES = 255


@dataclass(frozen=True)
class RateColumn:
    """A column of a historical rate; `width` cuts a numeric one into equal bins that start at 0."""

    name: str
    width: float | None = None


def historical_rate(
    learned: pa.Table, target: NDArray[np.float32], asked: pa.Table, columns: Sequence[RateColumn]
) -> NDArray[np.float64]:
    """Past rate of each asked row's combination of columns, smoothed towards the overall rate.

    `(positives + PRIOR_ROWS * overall) / (rows + PRIOR_ROWS)`: a combination that was never seen gets the overall rate.
    A missing value is a value of its own.

    Args:
        learned: Rows whose outcome is known.
        target: Their outcomes, 0 and 1.
        asked: Rows to score.
        columns: What makes a combination.
    """
    groups = _groups(
        pa.concat_tables([t.select([c.name for c in columns]) for t in (learned, asked)], promote_options="permissive"),
        columns,
    )
    past, now = groups[: len(learned)], groups[len(learned) :]
    size = int(groups.max(initial=-1)) + 1
    overall = float(target.mean(dtype=np.float64))
    positives = np.bincount(past, target.astype(np.float64), size)
    rates = (positives + PRIOR_ROWS * overall) / (np.bincount(past, minlength=size) + PRIOR_ROWS)
    return rates[now]


def boosting_scores(dataset: Dataset, asked: Split, seed: int) -> tuple[NDArray[np.float64], int]:
    """Probabilities of gradient boosting for the rows of `asked`, and its number of trees.

    Fitted on the training rows; the validation rows stop it. Missing numbers are given as missing, without indicators.

    Args:
        dataset: Rows to learn from.
        asked: Rows to score, in the same encoding.
        seed: Seed of the fit.
    """
    count = len(dataset.inputs.numeric)
    small = [count + i for i, size in enumerate(dataset.inputs.category_sizes) if size <= _MOST_CATEGORIES]
    # scikit-learn's own hints know only the defaults' types.
    model = cast("Any", HistGradientBoostingClassifier)(
        max_iter=_TREES,
        categorical_features=small,
        early_stopping=len(dataset.valid) > 0,
        n_iter_no_change=20,
        random_state=seed,
    )
    valid = (
        {"X_val": _with_missing(dataset, dataset.valid), "y_val": dataset.valid.target} if len(dataset.valid) else {}
    )
    with threadpool_limits(min(_THREADS, int(os.environ.get("OMP_NUM_THREADS", _THREADS)))):
        model.fit(_with_missing(dataset, dataset.train), dataset.train.target, **valid)
        return model.predict_proba(_with_missing(dataset, asked))[:, 1], int(model.n_iter_)


def fit_logistic(
    spec: RunSpec, dataset: Dataset, folder: Path, heartbeat: Callable[[], None], *, run_id: str
) -> Manifest:
    """Fit logistic regression on the training rows and write it as an artifact of kind `logistic`.

    Args:
        spec: The run whose rows these are.
        dataset: Its rows.
        folder: Where to; it holds no artifact yet.
        heartbeat: Called with each pass over the rows.
        run_id: The run.

    Raises:
        ArtifactExists: `folder` holds a manifest.
    """
    module, converged = logistic_module(dataset, heartbeat)
    metrics: dict[str, Json] = {
        "converged": converged,
        "train_loss": log_loss(module, dataset.train),
        "valid_loss": log_loss(module, dataset.valid) if len(dataset.valid) else None,
    }
    return write_artifact("logistic", module, None, spec, dataset, metrics, folder, run_id)


def logistic_module(dataset: Dataset, heartbeat: Callable[[], None]) -> tuple[LogisticRegression, bool]:
    """Logistic regression with an L2 penalty, fitted on the training rows by Newton's method, and if it converged.

    Steps that would raise the loss are halved. `heartbeat` is called with each pass over the rows.
    """
    problem = _Logistic(dataset.train, dataset.inputs.category_sizes)
    parameters = np.zeros(problem.size)
    for _ in range(_STEPS):
        heartbeat()
        loss, gradient, curvature = problem.derivatives(parameters)
        if np.abs(gradient).max() < _GRADIENT:
            return problem.module(parameters), True
        step = np.linalg.solve(curvature, gradient)
        while problem.loss(parameters - step) > loss and np.abs(step).max() > _GRADIENT:
            step /= 2
        parameters -= step
    return problem.module(parameters), False


def log_loss(module: torch.nn.Module, split: Split) -> float:
    """Mean negative log likelihood of a split."""
    logits = torch.from_numpy(batch_logits(module, split)).double()
    target = torch.from_numpy(split.target).double()
    return float(torch.nn.functional.binary_cross_entropy_with_logits(logits, target))


def _with_missing(dataset: Dataset, split: Split) -> NDArray[np.float32]:
    """Numbers with NaN where they were missing, then category codes."""
    count = len(dataset.inputs.numeric)
    numbers = split.numeric[:, :count].copy()
    indicator = count
    for index, item in enumerate(dataset.inputs.numeric):
        if item.missing:
            numbers[split.numeric[:, indicator] == 1, index] = np.nan
            indicator += 1
    return np.concatenate([numbers, split.categorical.astype(np.float32)], axis=1)


def _groups(table: pa.Table, columns: Sequence[RateColumn]) -> NDArray[np.int64]:
    """A number for each row's combination of values."""
    groups = np.zeros(len(table), dtype=np.int64)
    for column in columns:
        if column.width is None:
            texts = cast("Any", category_values(table, column.name).combine_chunks()).dictionary_encode()
            values = texts.indices.fill_null(-1).to_numpy()
        else:
            bins = np.floor(numeric_values(table, column.name) / column.width)
            # A bin that no number falls into.
            values = np.where(np.isnan(bins), -2 * LARGEST, bins)
        _, codes = np.unique(values, return_inverse=True)
        _, groups = np.unique(groups * (int(codes.max(initial=0)) + 1) + codes, return_inverse=True)
    return groups


class _Logistic:
    """Penalised loss per row of one parameter vector: intercept, weights of numbers, weights of category codes."""

    def __init__(self, rows: Split, category_sizes: tuple[int, ...]) -> None:
        self.rows = rows
        self.sizes = category_sizes
        count, categories = rows.categorical.shape
        self.width = 1 + rows.numeric.shape[1]
        self.starts = np.cumsum([0, *category_sizes])
        self.size = self.width + int(self.starts[-1])
        columns = (rows.categorical + self.starts[:-1]).reshape(-1)
        places = (np.ones(len(columns)), columns, np.arange(count + 1) * categories)
        self.codes: Any = csr_array(places, shape=(count, int(self.starts[-1])))

    def loss(self, parameters: NDArray[np.float64]) -> float:
        total = sum(_losses(logits, target).sum() for _, _, logits, target in self._parts(parameters))
        return (float(total) + self._penalty(parameters)) / len(self.rows)

    def derivatives(self, parameters: NDArray[np.float64]) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
        """Loss, gradient and matrix of second derivatives, each per row."""
        width, total = self.width, self._penalty(parameters)
        gradient, curvature = np.zeros(self.size), np.zeros((self.size, self.size))
        for numbers, codes, logits, target in self._parts(parameters):
            total += float(_losses(logits, target).sum())
            probability = 1.0 / (1.0 + np.exp(-np.clip(logits, -700, 700)))
            residual, weight = probability - target, probability * (1.0 - probability)
            gradient[:width] += residual @ numbers
            gradient[width:] += codes.T @ residual
            weighted = numbers * weight[:, None]
            curvature[:width, :width] += numbers.T @ weighted
            curvature[width:, :width] += codes.T @ weighted
            curvature[width:, width:] += (codes.T @ codes.multiply(weight[:, None])).toarray()
        curvature[:width, width:] = curvature[width:, :width].T
        gradient[1:] += parameters[1:] / C
        curvature[range(1, self.size), range(1, self.size)] += 1.0 / C
        return total / len(self.rows), gradient / len(self.rows), curvature / len(self.rows)

    def module(self, parameters: NDArray[np.float64]) -> LogisticRegression:
        state = {
            "linear.bias": parameters[:1],
            "linear.weight": parameters[None, 1 : self.width],
            **{
                f"categories.{index}.weight": parameters[self.width + start : self.width + start + size, None]
                for index, (start, size) in enumerate(zip(self.starts, self.sizes, strict=False))
            },
        }
        module = LogisticRegression(self.sizes, self.width - 1)
        module.load_state_dict({name: torch.from_numpy(weight).float() for name, weight in state.items()})
        return module

    def _penalty(self, parameters: NDArray[np.float64]) -> float:
        return float(parameters[1:] @ parameters[1:]) / (2 * C)

    def _parts(
        self, parameters: NDArray[np.float64]
    ) -> Iterator[tuple[NDArray[np.float64], Any, NDArray[np.float64], NDArray[np.float64]]]:
        """Numbers with a leading 1, codes, logits and targets of some rows at a time: float64 of all would be large."""
        for start in range(0, len(self.rows), _CHUNK):
            rows = slice(start, start + _CHUNK)
            target = self.rows.target[rows].astype(np.float64)
            numbers = np.column_stack([np.ones(len(target)), self.rows.numeric[rows].astype(np.float64)])
            codes = self.codes[rows]
            yield numbers, codes, numbers @ parameters[: self.width] + codes @ parameters[self.width :], target


def _losses(logits: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """`log(1 + exp(z)) - y z` of each row, without overflow."""
    return np.logaddexp(0.0, logits) - target * logits
