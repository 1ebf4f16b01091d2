"""Toy data and models for ranks under test, steered by the run spec's `model.options`.

Options: `rows`, `valid` (row counts), `groups` (two optimizer groups), `frozen` (the first layer), `dropout`,
`poison` (the step, from 0, in which the loss becomes NaN), `fail` (the step in which the model raises),
`quit_at` and `quit_with` (the step in which it ends the process, and how), `garble` (the step in which it raises with
text that no document takes),
`slow_rank` and `slow_s` (how much longer each forward pass of a rank takes),
`flip` (positions of training rows whose target is turned round).
"""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import trainer.checkpoint
from trainer.batches import BatchPlan, RowBatch
from trainer.blobs import Json, Manifest, ManifestEntry, canonical_json, digest_bytes
from trainer.data import Dataset, Split
from trainer.encoders import InputEncoding
from trainer.engines import make_engine
from trainer.engines.base import ParameterGroups, StepResult
from trainer.loop import seed_everything
from trainer.process_group import Identity, join
from trainer.rank import Parts
from trainer.spec import RunSpec, parse_run

CATEGORIES = 5
NUMERIC = 4


class ToyModel(nn.Module):
    def __init__(self, options: Mapping[str, Any], kill: Mapping[str, Any], pause_s: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CATEGORIES, 3)
        self.enter = nn.Linear(NUMERIC + 3, 9)
        self.drop = nn.Dropout(float(options.get("dropout", 0.0)))
        self.middle = nn.Linear(9, 7)
        self.leave = nn.Linear(7, 1)
        self.enter.requires_grad_(not options.get("frozen", False))
        self._options = options
        self._kill = kill
        self._pause_s = pause_s
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
        if self._options.get("quit_at") == step:
            sys.exit(self._options["quit_with"])
        if self._options.get("garble") == step:
            raise ValueError("before \udcff and \0 after")
        slow = rank == self._options.get("slow_rank")
        time.sleep(self._pause_s + (self._options["slow_s"] if slow else 0.0))
        return logits * float("nan") if self._options.get("poison") == step and rank == 1 else logits


def toy_split(rows: int, first: int, flip: list[int] | None = None) -> Split:
    random = np.random.default_rng(first)
    numeric = random.normal(size=(rows, NUMERIC)).astype(np.float32)
    categorical = random.integers(0, CATEGORIES, size=(rows, 1))
    target = (numeric[:, 0] + 0.5 * categorical[:, 0] + random.normal(size=rows) > 1).astype(np.float32)
    for position in flip or []:
        target[position] = 1 - target[position]
    return Split(numeric, categorical, target, np.arange(first, first + rows))


def toy_parts(kill: Mapping[str, Any], pause_s: float, quota: int | None) -> Parts:
    if quota is not None:
        _limit_checkpoints(quota)
    return Parts(
        load_data=_load,
        build_model=lambda spec, _inputs, _root: ToyModel(spec.model.options, kill, pause_s),
        parameter_groups=_groups,
        parallel_plan=lambda _spec, _root: None,
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


def _limit_checkpoints(quota: int) -> None:
    """Let the disk be full when the folder of checkpoints holds `quota` bytes: what fits of a file is still written."""
    write = trainer.checkpoint.write_synced

    def write_what_fits(path: Path, data: bytes) -> None:
        used = sum(_on_disk(file.stat().st_size) for file in path.parent.parent.rglob("*") if file.is_file())
        fits = quota - used >= _on_disk(len(data))
        write(path, data if fits else data[: max(0, quota - used)])
        if not fits:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    trainer.checkpoint.write_synced = write_what_fits


def _on_disk(size: int) -> int:
    return -(-size // 4096) * 4096


# Programs for `support.trainer_runs.start_ranks`, beside the rank itself.


def engine_steps(spec_json: str, steps: int, out: str, drop_rank: int | None = None) -> int:
    """Take `steps` steps with the spec's engine and write losses, gradient norms and the weights' digest per rank.

    `drop_rank` is a rank whose rows are given weight 0: its gradient is lost.
    """
    spec = parse_run(spec_json)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = join(os.environ, Identity("steps", 1, 1, spec.digest), timeout_s=60.0)
    model = _seeded_model(spec)
    engine = make_engine(spec, model, _groups(spec, model, Path()), group)
    rows = toy_split(spec.model.options.get("rows", 40), 0, spec.model.options.get("flip"))
    plan = BatchPlan(len(rows), spec.batch.global_size, world_size, spec.batch.accumulation, spec.seed)
    results: list[StepResult] = []
    for step in range(steps):
        batches = [
            _batch(rows, places, torch.zeros(len(places)) if rank == drop_rank else weight)
            for places, weight in plan.micro_batches(plan.order(plan.place(step)[0]), step, rank)
        ]
        results.append(engine.step(batches, plan.real_rows(step), 1.0))
    _write_results(f"{out}-{rank}.json", results, model)
    group.leave()
    return 0


def bare_steps(spec_json: str, steps: int, out: str) -> int:
    """The same steps as `engine_steps`, in one process with plain torch and the whole batch at once: the oracle."""
    spec = parse_run(spec_json)
    model, o = _seeded_model(spec), spec.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=o.lr, weight_decay=o.weight_decay, betas=(o.beta1, o.beta2), eps=o.eps
    )
    rows = toy_split(spec.model.options.get("rows", 40), 0)
    plan = BatchPlan(len(rows), spec.batch.global_size, 1, 1, spec.seed)
    results: list[StepResult] = []
    for step in range(steps):
        epoch, start = plan.place(step)
        batch = _batch(rows, plan.order(epoch)[start : start + plan.real_rows(step)], None)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch.numeric, batch.categorical), batch.target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm)
        optimizer.step()
        results.append(StepResult(loss.item(), norm.item()))
    _write_results(f"{out}-0.json", results, model)
    return 0


def _seeded_model(spec: RunSpec) -> ToyModel:
    seed_everything(spec.seed, -1, 0)
    return ToyModel(spec.model.options, {}, 0.0)


def _batch(rows: Split, places: Tensor, weight: Tensor | None) -> RowBatch:
    taken = places.numpy()
    numeric, categorical, target = rows.numeric[taken], rows.categorical[taken], rows.target[taken]
    return RowBatch(torch.from_numpy(numeric), torch.from_numpy(categorical), torch.from_numpy(target), weight)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _write_results(path: str, results: list[StepResult], model: nn.Module) -> None:
    weights = safetensors.torch.save({name: _whole(tensor).clone() for name, tensor in model.state_dict().items()})
    losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
    Path(path).write_bytes(canonical_json({"losses": losses, "norms": norms, "weights": digest_bytes(weights)}))
