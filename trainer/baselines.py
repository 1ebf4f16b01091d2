"""The models that a network has to beat: historical rates, logistic regression, gradient boosting.

All are fitted on the training rows of the run, the same that the network learns from, in the same encoding. Validation
rows only stop gradient boosting, as they stop the network.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize

from trainer.artifact import batch_logits, write_artifact
from trainer.blobs import Json, Manifest
from trainer.data import Dataset, Split
from trainer.models.logistic import LogisticRegression
from trainer.spec import RunSpec

C = 1.0
"""Inverse strength of the L2 penalty: the sum of losses plus |weights|^2 / (2 C) is minimised, as in scikit-learn."""

_ITERATIONS = 300


def fit_logistic(
    spec: RunSpec, dataset: Dataset, folder: Path, heartbeat: Callable[[], None], *, run_id: str
) -> Manifest:
    """Fit logistic regression on the training rows and write it as an artifact of kind `logistic`.

    Args:
        spec: The run whose rows these are.
        dataset: Its rows.
        folder: Where to; it holds no artifact yet.
        heartbeat: Called after each iteration.
        run_id: The run.

    Raises:
        ArtifactExists: `folder` holds a manifest.
    """
    module = logistic_module(dataset, heartbeat)
    metrics: dict[str, Json] = {
        "train_loss": log_loss(module, dataset.train),
        "valid_loss": log_loss(module, dataset.valid) if len(dataset.valid) else None,
    }
    return write_artifact("logistic", module, None, spec, dataset, metrics, folder, run_id)


def logistic_module(dataset: Dataset, heartbeat: Callable[[], None]) -> LogisticRegression:
    """Logistic regression with an L2 penalty, fitted on the training rows by L-BFGS in float64."""
    problem = _Logistic(dataset.train, dataset.inputs.category_sizes)
    found = minimize(
        problem.loss_and_gradient,
        np.zeros(problem.size),
        jac=True,
        method="L-BFGS-B",
        callback=lambda _: heartbeat(),
        options={"maxiter": _ITERATIONS, "ftol": 1e-10, "gtol": 1e-6},
    )
    return problem.module(found.x)


def log_loss(module: torch.nn.Module, split: Split) -> float:
    """Mean negative log likelihood of a split."""
    logits = torch.from_numpy(batch_logits(module, split)).double()
    target = torch.from_numpy(split.target).double()
    return float(torch.nn.functional.binary_cross_entropy_with_logits(logits, target))


class _Logistic:
    """Penalised loss per row of one parameter vector: intercept, weights of numbers, weights of category codes."""

    def __init__(self, rows: Split, category_sizes: tuple[int, ...]) -> None:
        self.numbers = rows.numeric.astype(np.float64)
        self.codes = rows.categorical
        self.target = rows.target.astype(np.float64)
        self.sizes = category_sizes
        width = self.numbers.shape[1]
        ends = np.cumsum([1, width, *category_sizes])
        self.size = int(ends[-1])
        self.weights = slice(1, int(ends[1]))
        self.tables = [slice(int(a), int(b)) for a, b in pairwise(ends[1:])]

    def loss_and_gradient(self, parameters: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        rows = len(self.target)
        logits = self.numbers @ parameters[self.weights] + parameters[0]
        for index, table in enumerate(self.tables):
            logits += parameters[table][self.codes[:, index]]
        # log(1 + exp(z)) - y z, without overflow.
        loss = np.logaddexp(0.0, logits) - self.target * logits
        residual = 1.0 / (1.0 + np.exp(-np.clip(logits, -700, 700))) - self.target
        gradient = np.empty(self.size)
        gradient[0] = residual.sum()
        gradient[self.weights] = residual @ self.numbers
        for index, table in enumerate(self.tables):
            gradient[table] = np.bincount(self.codes[:, index], residual, self.sizes[index])
        gradient[1:] += parameters[1:] / C
        penalty = float(parameters[1:] @ parameters[1:]) / (2 * C)
        return (float(loss.sum()) + penalty) / rows, gradient / rows

    def module(self, parameters: NDArray[np.float64]) -> LogisticRegression:
        module = LogisticRegression(self.sizes, self.numbers.shape[1])
        with torch.no_grad():
            module.linear.bias.fill_(float(parameters[0]))
            module.linear.weight.copy_(torch.from_numpy(parameters[self.weights])[None, :])
            for index, table in enumerate(self.tables):
                weight = module.categories[index].weight
                assert isinstance(weight, torch.Tensor)
                weight.copy_(torch.from_numpy(parameters[table])[:, None])
        return module
