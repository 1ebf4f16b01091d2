"""Toy data and models for ranks under test, steered by the run spec's `model.options`.

Options: `rows`, `valid` (row counts), `groups` (two optimizer groups), `frozen` (the first layer), `dropout`,
`poison` (the step, from 0, in which the loss becomes NaN), `fail` (the step in which the model raises),
`pause_s` (seconds per forward pass), `flip` (positions of training rows whose target is turned round).
"""

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from trainer.blobs import Json, Manifest, ManifestEntry, digest_bytes
from trainer.data import Dataset, Split
from trainer.encoders import InputEncoding
from trainer.engines.base import ParameterGroups
from trainer.rank import Parts
from trainer.spec import RunSpec

CATEGORIES = 5
NUMERIC = 4


class ToyModel(nn.Module):
    def __init__(self, options: Mapping[str, Any], kill: Mapping[str, Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CATEGORIES, 3)
        self.enter = nn.Linear(NUMERIC + 3, 9)
        self.drop = nn.Dropout(float(options.get("dropout", 0.0)))
        self.middle = nn.Linear(9, 7)
        self.leave = nn.Linear(7, 1)
        self.enter.requires_grad_(not options.get("frozen", False))
        self._options = options
        self._kill = kill
        self._passes = 0

    def forward(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        x = torch.cat([numeric, self.embedding(categorical[:, 0])], dim=1)
        x = torch.tanh(self.middle(self.drop(torch.tanh(self.enter(x)))))
        logits = self.leave(x).squeeze(1)
        if self.training:
            logits = self._trouble(logits)
        return logits

    def _trouble(self, logits: Tensor) -> Tensor:
        step, rank = self._passes, int(os.environ["RANK"])
        self._passes += 1
        if self._kill.get("rank") == rank and self._kill["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._options.get("fail") == step:
            raise ValueError("the model of this test fails here")
        time.sleep(float(self._options.get("pause_s", 0.0)))
        return logits * float("nan") if self._options.get("poison") == step and rank == 1 else logits


def toy_split(rows: int, first: int, flip: list[int] | None = None) -> Split:
    random = np.random.default_rng(first)
    numeric = random.normal(size=(rows, NUMERIC)).astype(np.float32)
    categorical = random.integers(0, CATEGORIES, size=(rows, 1))
    target = (numeric[:, 0] + 0.5 * categorical[:, 0] + random.normal(size=rows) > 1).astype(np.float32)
    for position in flip or []:
        target[position] = 1 - target[position]
    return Split(numeric, categorical, target, np.arange(first, first + rows))


def toy_parts(kill: Mapping[str, Any]) -> Parts:
    return Parts(
        load_data=_load,
        build_model=lambda spec, _inputs, _root: ToyModel(spec.model.options, kill),
        parameter_groups=_groups,
        write_network=_write_network,
        fit_logistic=_fit_logistic,
    )


def _load(spec: RunSpec, _store_root: Path, heartbeat: Callable[[], None]) -> Dataset:
    heartbeat()
    options = spec.model.options
    rows, valid = options.get("rows", 40), options.get("valid", 11)
    return Dataset(
        toy_split(rows, 0, options.get("flip")),
        toy_split(valid, 1_000_000),
        cast("InputEncoding", None),
        {"train": rows, "valid": valid},
    )


def _groups(spec: RunSpec, model: nn.Module, _root: Path) -> ParameterGroups:
    if not spec.model.options.get("groups"):
        return [{"params": list(model.parameters())}]
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0, "lr": 0.03},
        {"params": [p for name, p in named if not name.endswith("bias")], "weight_decay": 0.1},
    ]


def _write_network(
    state: Mapping[str, Tensor],
    spec: RunSpec,
    dataset: Dataset,
    metrics: Mapping[str, Json],
    folder: Path,
    *,
    run_id: str,
    code_root: Path,
) -> Manifest:
    return _write(folder, safetensors.torch.save(dict(state)))


def _fit_logistic(
    spec: RunSpec, dataset: Dataset, folder: Path, heartbeat: Callable[[], None], *, run_id: str
) -> Manifest:
    heartbeat()
    return _write(folder, b"")


def _write(folder: Path, data: bytes) -> Manifest:
    folder.mkdir(parents=True)
    (folder / "weights.safetensors").write_bytes(data)
    manifest = Manifest((ManifestEntry("weights.safetensors", len(data), digest_bytes(data)),))
    (folder / "manifest.json").write_bytes(manifest.canonical())
    return manifest
