"""The training loop: it owns the step count, and everything else is a function of it.

Samples, order, rates and random numbers of a step depend on the run spec and the step's number only, so that a run that
goes on from a checkpoint takes the very steps of one that was never disturbed. Batches are made in a thread beside the
training. After every step all ranks look whether one of them was asked to stop; after the last step of an epoch, or
each so many steps, the validation split is judged, what it gave is told, and the best step so far is saved.
"""

import hashlib
import math
import random
import time
from collections.abc import Mapping, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from trainer.batches import Batch, BatchPlan
from trainer.blobs import Json
from trainer.checkpoint import Best, Checkpoints, DiskFull, Kind, Saved, Sink
from trainer.engines.base import Engine, State, StepResult
from trainer.examples import Ahead, Examples
from trainer.pace import Pace
from trainer.process_group import Group
from trainer.profiling import Profiler
from trainer.spec import OptimizerSpec, RunSpec, SpecRefused, TokenDataSpec
from trainer.timing import timed_waits
from trainer.watch import Watch, Work


class LossNotFinite(ArithmeticError):
    """The loss or the gradient became infinite or NaN; the message names the step."""


class Preempted(Exception):
    """The run stopped because it was asked to; the message says after which step, why, and what was saved."""


class ResumeRefused(ValueError):
    """A checkpoint whose position means nothing in this run; the message names what differs."""


class Stop(Protocol):
    """Whether this rank was asked to stop."""

    @property
    def reason(self) -> str | None:
        """Why to stop (sigterm, preempt, cancel); None while nobody asked."""
        ...


@dataclass(frozen=True)
class Progress:
    """How far a run is; what a checkpoint holds beside the engine's state.

    `samples` is the position in the data: real samples seen, `step` the steps taken. `loss_sum` is the sum of the mean
    losses of the real samples since the last judgement. `waited` counts judgements without a better validation loss,
    `skipped` steps whose gradient overflowed in fp16. `history` has one entry per judgement, as the `epoch` events say.
    """

    step: int = 0
    samples: int = 0
    loss_sum: float = 0.0
    best_step: int | None = None
    best_epoch: int | None = None
    best_loss: float | None = None
    waited: int = 0
    finished: bool = False
    skipped: int = 0
    history: tuple[Mapping[str, Any], ...] = field(default=())

    @property
    def best(self) -> Best | None:
        """The best step so far."""
        if self.best_step is None or self.best_loss is None:
            return None
        return Best(self.best_step, self.best_loss)


class Trainer:
    """One rank's part of the training of one run.

    Args:
        spec: The run.
        train: Samples to learn from.
        valid: Samples that decide when to stop.
        engine: The model, spread over `group`.
        group: The ranks.
        checkpoints: Where states are saved.
        sink: Where events go; only rank 0 tells.
        stop: Whether this rank was asked to stop.
        step_event_every_s: Seconds between `step` events.
        work: What a step computes, on rank 0.
        profiler: Traces steps, on rank 0.

    Raises:
        SpecRefused: a split has no samples; the message says how many there are.
    """

    def __init__(
        self,
        spec: RunSpec,
        train: Examples,
        valid: Examples,
        engine: Engine,
        group: Group,
        checkpoints: Checkpoints,
        sink: Sink,
        stop: Stop,
        step_event_every_s: float,
        work: Work | None = None,
        profiler: Profiler | None = None,
    ) -> None:
        check_samples(spec, train, valid)
        self._spec = spec
        self._engine = engine
        self._group = group
        self._checkpoints = checkpoints
        self._sink = sink
        self._stop = stop
        self._train, self._valid = train, valid
        self._plan = BatchPlan(
            len(train), spec.batch.global_size, engine.mesh.data_ranks, spec.batch.accumulation, spec.seed
        )
        self._total = spec.schedule.steps or self._plan.steps_per_epoch * spec.schedule.epochs
        self._judge_every = spec.schedule.judge_every or self._plan.steps_per_epoch
        self._order = (-1, torch.empty(0, dtype=torch.int64))
        self._saved_step = -1
        self._needed = False
        engine.before_update = checkpoints.settle
        self._clock = engine.clock
        self._watch = Watch(group, engine, sink, work)
        self._pace = Pace(group, sink, spec.restart)
        self._profiler = profiler
        self._every_s = step_event_every_s
        self._told = (time.monotonic(), 0)
        self._told_step: int | None = None
        self.progress = Progress()

    def resume(self, parts: list[State]) -> None:
        """Go on from a checkpoint: its parts in rank order.

        Raises:
            ResumeRefused: its position is of other rows, another batch or another seed.
            ParameterMismatch: its parameters are not those of the model.
        """
        saved = parts[0]
        for name, now in self._meaning().items():
            if saved["meaning"].get(name) != now:
                raise ResumeRefused(f"{name} is {saved['meaning'].get(name)} in the checkpoint and {now} in this run")
        self.progress = Progress(**{**saved["progress"], "history": tuple(saved["progress"]["history"])})
        self._engine.load([part["engine"] for part in parts])
        self._saved_step = self.progress.step
        self._told = (time.monotonic(), self.progress.samples)

    def run(self) -> Progress:
        """Train to the end of the schedule, or until validation does not get better any more.

        Raises:
            Preempted: a rank was asked to stop; all ranks raise it after the same step.
            LossNotFinite: names the step.
            DiskFull: the best step, or the last one before a stop that was asked for, could not be saved.
            PeerLost: another rank is gone.
        """
        try:
            with timed_waits(self._clock):
                self._run_steps()
        except LossNotFinite:
            # What was good before is kept; all ranks are here.
            self._checkpoints.finish()
            raise
        finally:
            if self._profiler is not None:
                self._profiler.close()
        return self.progress

    def _run_steps(self) -> None:
        self._tell_position()
        self._watch.begin()
        self._look_for_profile()
        ahead = Ahead(self._batches, self.progress.step, self._total)
        try:
            self._take_steps(ahead)
        finally:
            ahead.close()
        self._watch.end(self.progress.step)

    def _take_steps(self, ahead: Ahead[list[Batch]]) -> None:
        while not self.progress.finished:
            self._stop_when_asked()
            with self._traced():
                result = self._step(ahead)
            self._clock.step_done()
            self._pace.step_done()
            if self._told_step is None or time.monotonic() - self._told[0] >= self._every_s:
                self._tell_step(result)
            step = self.progress.step
            better = self._judge() if step == self._total or step % self._judge_every == 0 else False
            finished = self.progress.finished
            if finished and self._told_step != step:
                self._tell_step(result)
            if better:
                self._save("best", needed=True, at_once=finished)
            elif finished or self.progress.step % self._spec.schedule.checkpoint_every == 0:
                self._save("last", at_once=finished)

    def _traced(self) -> AbstractContextManager[None]:
        return nullcontext() if self._profiler is None else self._profiler.around(self.progress.step + 1)

    def _look_for_profile(self) -> None:
        if self._profiler is not None:
            with self._clock.part("profile"):
                self._profiler.look(self.progress.step)

    def _batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of `step`. Called beside the training: it draws no random number."""
        epoch, _ = self._plan.place(step)
        if self._order[0] != epoch:
            self._order = (epoch, self._plan.order(epoch))
        parts = self._plan.micro_batches(self._order[1], step, self._engine.mesh.data_index)
        return [self._train.take(places, weight) for places, weight in parts]

    def _step(self, ahead: Ahead[list[Batch]]) -> StepResult:
        step = self.progress.step
        epoch, _ = self._plan.place(step)
        with self._clock.part("data"):
            batches = ahead.take(step)
        seed_everything(self._spec.seed, step, self._engine.mesh.data_index)
        real_samples = self._plan.real_rows(step)
        result = self._engine.step(
            batches, real_samples * self._train.items, rate_factor(step, self._total, self._spec.optimizer)
        )
        self._sink.beat()
        # A gradient that overflows under a scale is tried again with a lower one, as long as there is a lower one.
        bearable = math.isfinite(result.grad_norm) or (result.skipped and result.scale > 1.0)
        if not (math.isfinite(result.loss) and bearable):
            raise LossNotFinite(
                f"the loss is not finite at step {step + 1} (epoch {epoch + 1}): loss {result.loss}, "
                f"gradient norm {result.grad_norm}"
            )
        self.progress = replace(
            self.progress,
            step=step + 1,
            samples=self._plan.samples(step + 1),
            loss_sum=self.progress.loss_sum + result.loss * real_samples,
            skipped=self.progress.skipped + result.skipped,
        )
        return result

    def _judge(self) -> bool:
        """Judge the validation split, tell what it gave, decide whether to go on; whether this step is the best yet."""
        with self._clock.part("validation"):
            judged = self.validate()
        before, loss = self.progress, judged["valid_loss"]
        epoch = self._plan.place(before.step - 1)[0] + 1
        seen = before.samples - self._plan.samples((before.step - 1) // self._judge_every * self._judge_every)
        better = before.best_loss is None or loss < before.best_loss
        entry: dict[str, Json] = {
            "epoch": epoch,
            "step": before.step,
            "train_loss": before.loss_sum / seen,
            **judged,
            "best": better,
        }
        waited = 0 if better else before.waited + 1
        self.progress = replace(
            before,
            loss_sum=0.0,
            best_step=before.step if better else before.best_step,
            best_epoch=epoch if better else before.best_epoch,
            best_loss=loss if better else before.best_loss,
            waited=waited,
            finished=before.step >= self._total or waited >= self._spec.schedule.patience,
            history=(*before.history, entry),
        )
        if self._group.rank == 0:
            self._sink.emit("epoch", entry)
        return better

    def validate(self) -> dict[str, Any]:
        """What the validation split gives, `valid_loss` in any case; the same bits on every rank.

        Raises:
            LossNotFinite: names the step.
        """
        size = self._plan.global_size // self._plan.data_ranks // self._plan.accumulation
        judged = self._valid.judge(self._engine, self._group, size, self._sink.beat)
        if not math.isfinite(judged["valid_loss"]):
            raise LossNotFinite(
                f"the validation loss is not finite after step {self.progress.step}: {judged['valid_loss']}"
            )
        return judged

    def _stop_when_asked(self) -> None:
        step = self.progress.step
        found = self._group.stop_step(step, self._stop.reason)
        if found is None or step < found[0]:
            return
        saved = "was there already"
        self._land(self._checkpoints.finish(deadline_s=self._spec.restart.grace_s))
        if self._saved_step != step:
            saved = self._save("last", needed=True, at_once=True, deadline_s=self._spec.restart.grace_s)
        raise Preempted(f"stopped after step {step} ({found[1]}), checkpoint {saved}")

    def _save(
        self, kind: Kind, *, needed: bool = False, at_once: bool = False, deadline_s: float | None = None
    ) -> str | None:
        """Save on all ranks; what became of it where the training waits: when it is `at_once`, or the run asks so.

        A full disk ends the training when the best step would be lost, or a save that is `needed`; else it goes on.
        """
        with self._clock.part("checkpoint"):
            return self._save_now(kind, needed, at_once, deadline_s)

    def _save_now(self, kind: Kind, needed: bool, at_once: bool, deadline_s: float | None) -> str | None:
        self._phase("save", self._spec.restart.group_timeout_s)
        self._land(self._checkpoints.finish(deadline_s=deadline_s))
        self._needed = needed
        part = {"engine": self._engine.state(), "progress": self._progress_tree(), "meaning": self._meaning()}
        facts = {"epoch": self._plan.place(self.progress.step - 1)[0] + 1, "samples": self.progress.samples}
        self._checkpoints.begin(self.progress.step, part, kind, self.progress.best, facts, deadline_s=deadline_s)
        outcome = None
        if at_once or self._spec.schedule.synchronous:
            outcome = self._land(self._checkpoints.finish())
        self._phase("train", None)
        return outcome

    def _land(self, saved: Saved | None) -> str | None:
        """Take up what became of a save that has ended."""
        if saved is None:
            return None
        if saved.outcome == "published":
            self._saved_step = saved.step
        elif saved.outcome == "disk full":
            if self._needed:
                raise DiskFull(saved.detail)
            if self._group.rank == 0:
                message = f"{saved.detail}; training goes on without a checkpoint of step {saved.step}"
                self._sink.emit("error", {"rank": 0, "kind": "DiskFull", "message": message, "stack": ""})
        return saved.outcome

    def _progress_tree(self) -> State:
        return {**asdict(self.progress), "history": [dict(entry) for entry in self.progress.history]}

    def _meaning(self) -> State:
        """What a position depends on."""
        return {"rows": self._plan.rows, "global_size": self._plan.global_size, "seed": self._plan.seed}

    def _phase(self, name: str, may_take_s: float | None) -> None:
        self._sink.emit("phase", {"name": name, "may_take_s": may_take_s})

    def _scaling(self, result: StepResult) -> dict[str, Json]:
        """How fp16 goes: the loss scale of the step, and the steps so far that it made useless."""
        if self._spec.precision != "fp16":
            return {}
        return {"loss_scale": result.scale, "skipped": self.progress.skipped}

    def _tell_position(self) -> None:
        """Say where in the data this attempt begins, and over how many ranks it divides each batch."""
        if self._group.rank != 0:
            return
        step = self.progress.step
        position: dict[str, Json] = {
            "step": step,
            "epoch": self._plan.place(step)[0] + 1,
            "samples": self.progress.samples,
            "data_ranks": self._plan.data_ranks,
            "world_size": self._group.world_size,
        }
        self._sink.emit("position", position)

    def _tell_step(self, result: StepResult) -> None:
        """Tell of the step that was just taken: of the first and the last one, and of one every so often."""
        now, (then, samples) = time.monotonic(), self._told
        progress = self.progress
        self._told, self._told_step = (now, progress.samples), progress.step
        told = self._watch.look(progress.step)
        if self._group.rank != 0:
            return
        self._look_for_profile()
        self._sink.emit(
            "step",
            {
                "step": progress.step,
                "epoch": self._plan.place(progress.step - 1)[0] + 1,
                "samples": progress.samples,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": self._spec.optimizer.lr * rate_factor(progress.step - 1, self._total, self._spec.optimizer),
                f"{self._train.unit}_per_s": (progress.samples - samples) * self._train.items / max(now - then, 1e-9),
                "steps_total": self._total,
                **told,
                **self._scaling(result),
            },
        )


def check_samples(spec: RunSpec, train: Sized, valid: Sized) -> None:
    """Refuse splits without samples, before anything is trained.

    Raises:
        SpecRefused: says how many samples there are, and the batch.
    """
    what = f"samples of {spec.data.context} tokens" if isinstance(spec.data, TokenDataSpec) else "rows"
    for name, samples in (("train", train), ("valid", valid)):
        if len(samples) == 0:
            raise SpecRefused(
                f"data.{name}",
                f"0 {what} (train {len(train)}, valid {len(valid)}, batch {spec.batch.global_size} on "
                f"{spec.layout.world_size} ranks); at least 1 is needed",
            )


def rate_factor(step: int, total: int, spec: OptimizerSpec) -> float:
    """What the base rates are multiplied by in `step` (from 0) of `total`: linear warm-up, then half a cosine to 0."""
    warm = math.ceil(spec.warmup_share * total)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1.0 + math.cos(math.pi * (step - warm) / max(total - warm, 1)))


def seed_everything(seed: int, step: int, rank: int) -> None:
    """Set python's, numpy's and torch's random state from (seed, step, rank): a checkpoint need not hold any."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    random.seed(digest[:8])
    np.random.seed(int.from_bytes(digest[8:12], "little"))
    # Not torch.manual_seed: that notes its caller's stack for the GPUs that are not there, each time.
    torch.default_generator.manual_seed(int.from_bytes(digest[16:24], "little"))
