"""What the ranks of `bench_trainer` do: bare torch steps, the same through an engine and the loop, saves of both kinds.

Every function is called as `function(group, ...)` on each rank by `trainer.forked.fork_ranks`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # The first optimizer step would import it.  # pyright: ignore[reportUnusedImport]
from torch import nn

from trainer.batches import Batch
from trainer.checkpoint import Checkpoints
from trainer.engines import make_engine
from trainer.engines.base import Engine, StepResult
from trainer.events import EventSink
from trainer.loop import Trainer
from trainer.models.decoder import Decoder, DecoderOptions, decoder_plan
from trainer.models.factory import one_group
from trainer.process_group import Group
from trainer.spec import (
    PLAIN_DEGREE,
    BatchSpec,
    DataFile,
    DataSpec,
    LayoutSpec,
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    ScheduleSpec,
)
from trainer.tokens import TokenExamples
from trainer.watch import measure_work

_WARM_UP = 2
_CLIP_NORM = 1.0


class NobodyAsks:
    """Nobody asks this rank to stop."""

    reason: str | None = None


def run_spec(engine: str, zero: int, world: int, model: dict[str, Any], rows: int, steps: int) -> RunSpec:
    """A run of `rows` sequences per step over `world` ranks, with the plain degree of an engine."""
    degree: dict[str, Any] = {PLAIN_DEGREE[engine]: world}
    choice: Any = engine
    layout = LayoutSpec(engine=choice, zero=zero, nodes=world, **degree)
    nothing = "sha256:" + "0" * 64
    return RunSpec(
        pipeline="bench",
        data=DataSpec((DataFile("bench", nothing, 1, 1),), ("id",), "next", "seen", "known", 2, 1, ("token",), ()),
        model=ModelSpec(file="trainer/models/decoder.py", function="Decoder", code_digest=nothing, options=model),
        seed=1,
        layout=layout,
        optimizer=OptimizerSpec(lr=1e-3, clip_norm=_CLIP_NORM),
        batch=BatchSpec(global_size=rows),
        schedule=ScheduleSpec(steps=steps, judge_every=steps, checkpoint_every=10 * steps, synchronous=True),
    )


class Bare:
    """A training step in plain torch, on a model of its own."""

    def __init__(self, spec: RunSpec) -> None:
        torch.manual_seed(spec.seed)
        self._model = Decoder(DecoderOptions.parse(spec.model.options))
        o = spec.optimizer
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, foreach=True
        )

    def step(self, batch: Batch, clock: Callable[[], float] = time.perf_counter) -> float:
        """Learn from `batch`; seconds that it took by `clock`."""
        began = clock()
        self._optimizer.zero_grad(set_to_none=True)
        loss = batch.loss_sum(self._model(*batch.inputs)) / batch.items
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), _CLIP_NORM, foreach=True)
        self._optimizer.step()
        loss.item()
        return clock() - began


class _Alternating:
    """An engine that takes a bare step beside each of its own: before it in even steps, after it in odd ones."""

    def __init__(self, engine: Engine, bare: Bare, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._bare = bare
        self._clock = clock
        self.entered: list[float] = []
        self.bare_s: list[float] = []
        self.own_s: list[float] = []

    def step(self, micro_batches: Sequence[Batch], real_items: int, lr_factor: float) -> StepResult:
        self.entered.append(self._clock())
        first = len(self.entered) % 2 == 0
        if first:
            self.bare_s.append(self._bare.step(micro_batches[0], self._clock))
        began = self._clock()
        result = self._engine.step(micro_batches, real_items, lr_factor)
        self.own_s.append(self._clock() - began)
        if not first:
            self.bare_s.append(self._bare.step(micro_batches[0], self._clock))
        return result

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever an engine has
        return getattr(self._engine, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "before_update":
            self._engine.before_update = value  # pyright: ignore[reportAttributeAccessIssue]
        else:
            super().__setattr__(name, value)


def overhead(group: Group, model: dict[str, Any], rows: int, steps: int) -> dict[str, float]:
    """Medians of a bare step, of the engine's, and of all that the loop does per step.

    In seconds of the process's CPU, all threads: seconds on the wall say little where others compute too.
    """
    torch.set_num_threads(1)
    spec = run_spec("ddp", 0, 1, model, rows, steps)
    with tempfile.TemporaryDirectory() as folder:
        engine = _Alternating(_engine(spec, group), Bare(spec), time.process_time)
        train, valid = (_tokens(model, rows * steps, seed) for seed in (1, 2))
        sink = EventSink(group.rank, Path(folder) / "node", None)
        checkpoints = Checkpoints(Path(folder), 1, group, sink, {})
        (Path(folder) / "attempts" / "1").mkdir(parents=True)
        work = measure_work(spec, Decoder(DecoderOptions.parse(model)), train.take(torch.arange(2), None), train.items)
        loop: Any = engine
        Trainer(spec, train, valid, loop, group, checkpoints, sink, NobodyAsks(), 2.0, work).run()
        sink.close()
    whole = np.diff(engine.entered)
    bare = np.array(engine.bare_s)
    # From one step's engine to the next: the engine, the bare step beside it, and everything that the loop does.
    ours = whole[_WARM_UP:] - bare[_WARM_UP:-1]
    return {
        "bare_s": float(np.median(bare[_WARM_UP:])),
        "engine_s": statistics.median(engine.own_s[_WARM_UP:]),
        "loop_s": float(np.median(ours)),
    }


def bare_steps(group: Group, model: dict[str, Any], rows: int, steps: int) -> float:
    """Median seconds of a bare step on `rows` sequences; the ranks have nothing to do with each other."""
    torch.set_num_threads(1)
    bare = Bare(run_spec("ddp", 0, 1, model, rows, steps))
    tokens = _tokens(model, rows * (steps + _WARM_UP), 1 + group.rank)
    group.sum(0.0)
    return statistics.median(
        [bare.step(tokens.take(torch.arange(rows) + i * rows, None)) for i in range(steps + _WARM_UP)][_WARM_UP:]
    )


def engine_steps(group: Group, engine: str, zero: int, model: dict[str, Any], rows: int, steps: int) -> float:
    """Median seconds of an engine's step on `rows` sequences per rank."""
    torch.set_num_threads(1)
    spec = run_spec(engine, zero, group.world_size, model, rows * group.world_size, steps)
    made = _engine(spec, group)
    tokens = _tokens(model, rows * (steps + _WARM_UP), 1 + group.rank)
    items = rows * group.world_size * tokens.items
    took: list[float] = []
    for i in range(steps + _WARM_UP):
        batch = tokens.take(torch.arange(rows) + i * rows, None)
        began = time.perf_counter()
        made.step([batch], items, 1.0)
        took.append(time.perf_counter() - began)
    return statistics.median(took[_WARM_UP:])


def saves(
    group: Group, engine: str, zero: int, model: dict[str, Any], rows: int, saves: int, between: int, folder: str
) -> dict[str, list[float]]:
    """Seconds that saves hold the training up: durable ones that it waits for, and those beside it, in turns.

    Of those beside it count the call itself, every wait before an update that would change what is copied, and the wait
    for the rest when `between` steps later the next save would begin. `beside_s` are the steps after such a save has
    begun, `alone_s` steps with none.
    """
    torch.set_num_threads(1)
    spec = run_spec(engine, zero, group.world_size, model, rows * group.world_size, 10)
    made = _engine(spec, group)
    sink = EventSink(group.rank, Path(folder) / f"node-{group.rank}", None)
    (Path(folder) / "attempts" / "1").mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(Path(folder), 1, group, sink, {})
    made.before_update = checkpoints.settle
    tokens = _tokens(model, rows, 1 + group.rank)
    batch, items = tokens.take(torch.arange(rows), None), rows * group.world_size * tokens.items
    found: dict[str, list[float]] = {"durable_s": [], "beside_stall_s": [], "alone_s": [], "beside_s": []}
    step = 0

    def take_step() -> float:
        nonlocal step
        step += 1
        began = time.perf_counter()
        made.step([batch], items, 1.0)
        return time.perf_counter() - began

    for _ in range(_WARM_UP):
        take_step()
    for turn in range(saves + 1):
        found["alone_s"] += [take_step(), take_step()]
        began = time.perf_counter()
        checkpoints.save(step, {"engine": made.state()}, "last", None)
        found["durable_s"].append(time.perf_counter() - began)
        take_step()
        before = checkpoints.stall.seconds
        began = time.perf_counter()
        part = {"engine": made.state()}
        made_s = time.perf_counter() - began
        checkpoints.begin(step, part, "last", None)
        found["beside_s"] += [take_step() for _ in range(between)]
        checkpoints.finish()
        found["beside_stall_s"].append(checkpoints.stall.seconds - before + made_s)
        if turn == 0:
            # The first of either kind makes the buffers and the folder.
            found = {name: [] for name in found}
    sink.close()
    return found


def _engine(spec: RunSpec, group: Group) -> Engine:
    torch.manual_seed(spec.seed)
    options = DecoderOptions.parse(spec.model.options)
    model = Decoder(options)
    return make_engine(spec, model, one_group(model, spec.optimizer), group, decoder_plan(options))


def _tokens(model: dict[str, Any], samples: int, seed: int) -> TokenExamples:
    """So many samples of random tokens."""
    length = model["sequence"] * samples + 1
    shard = np.random.default_rng(seed).integers(0, model["vocab"], length).astype(np.uint16)
    return TokenExamples([shard], model["sequence"])
