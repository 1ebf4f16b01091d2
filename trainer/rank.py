"""What one rank does, from its data to its artifacts, once torch is imported; `trainer.worker` runs it.

Phases: data, group, train (and save), then all ranks leave the group and rank 0 alone goes on: baseline (for rows),
export, done. The artifacts are made from the weights of the best checkpoint, read back from the disk.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch._dynamo  # pyright: ignore[reportUnusedImport] - the first optimizer step would load it, and look slow
from torch import nn

from trainer.artifact import write_language, write_network
from trainer.baselines import fit_logistic
from trainer.blobs import Json, Manifest
from trainer.checkpoint import Checkpoints, DiskFull, Retention, Sink, StaleAttempt, StorageFailed, checkpoint_facts
from trainer.data import DataRefused, Dataset, load_data
from trainer.encoders import EncodingRefused
from trainer.engines import make_engine
from trainer.engines.base import ParameterGroups
from trainer.events import cpu_model
from trainer.examples import Examples, RowExamples
from trainer.export import ExportFailed, export_weights
from trainer.loop import (
    LossNotFinite,
    Preempted,
    Progress,
    ResumeRefused,
    Stop,
    Trainer,
    check_samples,
    seed_everything,
)
from trainer.models.factory import CodeRefused, build_model, parallel_plan, parameter_groups
from trainer.models.inputs import Inputs
from trainer.parallel.plan import ParallelPlan, PlanMismatch
from trainer.pieces import ParameterMismatch
from trainer.process_group import Group, Identity, PeerLost, join
from trainer.profiling import Profiler
from trainer.spec import AttemptSpec, ExitCode, LayoutSpec, RunSpec, SpecRefused, TokenDataSpec
from trainer.tokens import TokenDataset, load_tokens
from trainer.watch import measure_work

_REFUSED = (SpecRefused, DataRefused, EncodingRefused, CodeRefused, PlanMismatch)
_INFRASTRUCTURE = (PeerLost, StaleAttempt, StorageFailed, DiskFull, ExportFailed)
_AGREED = (
    Preempted,
    DiskFull,
    StaleAttempt,
    StorageFailed,
    LossNotFinite,
    ParameterMismatch,
    ResumeRefused,
    ExportFailed,
)
"""What all ranks raise after the same step, or over the same checkpoint: they can leave the group in order."""

_START_STEP = -1

_EXPORT_TIMEOUTS = 10
"""How many times a collective's timeout the ranks may take to write the weights together."""
_SAMPLE = 4
"""Samples by which a step's operations are counted."""


class WriteNetwork(Protocol):
    """See `trainer.artifact.write_network`."""

    def __call__(
        self,
        state: Mapping[str, torch.Tensor],
        spec: RunSpec,
        dataset: Dataset,
        metrics: Mapping[str, Json],
        folder: Path,
        *,
        run_id: str,
        code_root: Path,
    ) -> Manifest:
        """Write the artifact; returns its manifest."""
        ...


class FitLogistic(Protocol):
    """See `trainer.baselines.fit_logistic`."""

    def __call__(
        self, spec: RunSpec, dataset: Dataset, folder: Path, heartbeat: Callable[[], None], *, run_id: str
    ) -> Manifest:
        """Write the artifact; returns its manifest."""
        ...


@dataclass(frozen=True)
class Parts:
    """What a rank is made of beside the loop: data, model, artifacts."""

    load_data: Callable[[RunSpec, Path, Callable[[], None]], Dataset] = load_data
    build_model: Callable[[RunSpec, Inputs, Path], nn.Module] = build_model
    parameter_groups: Callable[[RunSpec, nn.Module, Path], ParameterGroups] = parameter_groups
    parallel_plan: Callable[[RunSpec, Path], ParallelPlan | None] = parallel_plan
    write_network: WriteNetwork = write_network
    fit_logistic: FitLogistic = fit_logistic


class Rank:
    """One rank of an attempt; `environ` follows torchrun's contract.

    Args:
        environ: The rank's environment.
        attempt: The attempt.
        spec: The run.
        sink: Where events and heartbeats go.
        stop: Whether this rank was asked to stop.
        step_event_every_s: Seconds between `step` events.
        parts: What it is made of, when not of the usual.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        attempt: AttemptSpec,
        spec: RunSpec,
        sink: Sink,
        stop: Stop,
        step_event_every_s: float,
        parts: Parts | None = None,
    ) -> None:
        self._environ = environ
        self._attempt = attempt
        self._declared = spec
        # Checked in `run`: of an elastic run, the attempt may have fewer nodes than are declared.
        self._spec = spec
        self._sink = sink
        self._stop = stop
        self._parts = parts or Parts()
        self._step_event_every_s = step_event_every_s
        self._sharded: Manifest | None = None
        self._run_dir = Path(attempt.run_dir)
        self._code_root = Path(attempt.code_root)

    def run(self) -> None:
        """Do the rank's whole work.

        Raises:
            Preempted: it was asked to stop, and has saved what there was to save.
            Exception: any error; `exit_code` says what it means.
        """
        self._spec = self._declared.on_nodes(self._attempt.nodes)
        self._check_world()
        _configure_torch(self._spec)
        self._tell_environment()
        self._phase("data", None)
        dataset = self._load()
        check_samples(self._spec, dataset.train, dataset.valid)
        progress, checkpoints = self._train(dataset)
        if int(self._environ["RANK"]) == 0:
            self._finish(dataset, progress, checkpoints)

    def _load(self) -> Dataset | TokenDataset:
        store_root = Path(self._attempt.store_root)
        if isinstance(self._spec.data, TokenDataSpec):
            return load_tokens(self._spec.data, store_root, self._keep)
        return self._parts.load_data(self._spec, store_root, self._keep)

    def _train(self, dataset: Dataset | TokenDataset) -> tuple[Progress, Checkpoints]:
        timeout_s = self._spec.restart.group_timeout_s
        self._phase("group", 2 * timeout_s)
        identity = Identity(self._attempt.run_id, self._attempt.attempt, self._attempt.token, self._declared.digest)
        group = join(self._environ, identity, timeout_s=timeout_s, keep=self._keep)
        self._phase("train", None)
        # Every rank begins with the same weights, whatever its number.
        seed_everything(self._spec.seed, _START_STEP, 0)
        model = self._parts.build_model(self._spec, dataset.inputs, self._code_root)
        declared = self._parts.parameter_groups(self._spec, model, self._code_root)
        plan = self._parts.parallel_plan(self._spec, self._code_root)
        train, valid = _examples(dataset)
        sample = train.take(torch.arange(min(len(train), _SAMPLE)), None)
        work = measure_work(self._spec, model, sample, train.items) if group.rank == 0 else None
        engine = make_engine(self._spec, model, declared, group, plan)
        # Groups that engines and meshes make do not inherit it: they would wait half an hour for a stopped peer.
        group.allow(timeout_s)
        schedule = self._spec.schedule
        checkpoints = Checkpoints(
            self._run_dir,
            self._attempt.attempt,
            group,
            self._sink,
            {"run_id": self._attempt.run_id, "spec_digest": self._declared.digest, **checkpoint_facts(self._spec)},
            Retention(schedule.keep_last, schedule.keep_every_hours),
        )
        trainer = Trainer(
            self._spec,
            train,
            valid,
            engine,
            group,
            checkpoints,
            self._sink,
            self._stop,
            self._step_event_every_s,
            work,
            Profiler(self._run_dir, self._attempt.attempt, self._sink) if group.rank == 0 else None,
        )
        try:
            self._resume(trainer, checkpoints)
            progress = trainer.run()
            self._export_sharded(progress, checkpoints, group)
        except _AGREED:
            group.leave()
            raise
        group.leave()
        return progress, checkpoints

    def _export_sharded(self, progress: Progress, checkpoints: Checkpoints, group: Group) -> None:
        """All ranks: of a model that no rank holds whole, write the best weights piece by piece, as `weights`."""
        if not is_sharded(self._spec.layout):
            return
        assert progress.best_step is not None, "training ends with a judgement"
        may_take_s = _EXPORT_TIMEOUTS * self._spec.restart.group_timeout_s
        self._phase("weights", may_take_s)
        facts: dict[str, Json] = {"kind": "weights", "run_id": self._attempt.run_id, "step": progress.best_step}
        parts = checkpoints.parts(progress.best_step)
        self._sharded = export_weights(
            parts,
            self._artifacts() / "weights",
            group,
            facts | {"spec_digest": self._declared.digest},
            deadline_s=may_take_s,
        )

    def _resume(self, trainer: Trainer, checkpoints: Checkpoints) -> None:
        # The parts end with this function: they keep files open, which would hold their space when they are removed.
        saved = checkpoints.newest()
        if saved is not None:
            trainer.resume(saved)

    def _finish(self, dataset: Dataset | TokenDataset, progress: Progress, checkpoints: Checkpoints) -> None:
        """Rank 0 alone: export the artifacts from the best step, and tell."""
        best_step = progress.best_step
        assert best_step is not None, "training ends with a judgement"
        metrics = final_metrics(progress, dataset)
        artifacts = self._export(dataset, metrics, lambda: checkpoints.weights(best_step))
        if self._sharded is not None:
            artifacts["weights"] = self._sharded
        checkpoints.check_fence()
        self._sink.emit("metrics", metrics)
        for name, manifest in artifacts.items():
            path = str((self._artifacts() / name).relative_to(self._run_dir))
            self._sink.emit("artifact", {"name": name, "manifest": manifest.digest, "path": path})
        self._phase("done", None)

    def _export(
        self,
        dataset: Dataset | TokenDataset,
        metrics: Mapping[str, Json],
        weights: Callable[[], Mapping[str, torch.Tensor]],
    ) -> dict[str, Manifest]:
        """Write the artifacts: the network, and for rows a logistic regression beside it."""
        run_id, folder, spec, code_root = self._attempt.run_id, self._artifacts(), self._declared, self._code_root
        if isinstance(dataset, TokenDataset):
            self._begin_phase("export")
            network = write_language(
                weights(), spec, dataset, metrics, folder / "network", run_id=run_id, code_root=code_root
            )
            return {"network": network}
        self._begin_phase("baseline")
        logistic = self._parts.fit_logistic(spec, dataset, folder / "logistic", self._keep, run_id=run_id)
        self._begin_phase("export")
        network = self._parts.write_network(
            weights(), spec, dataset, metrics, folder / "network", run_id=run_id, code_root=code_root
        )
        return {"network": network, "logistic": logistic}

    def _begin_phase(self, name: str) -> None:
        self._phase(name, None)
        self._keep()

    def _tell_environment(self) -> None:
        """What the bits depend on beside the run spec and the installed versions, as rank 0 finds it."""
        if int(self._environ["RANK"]) == 0:
            facts: dict[str, Json] = {
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
                "cpu": cpu_model(),
            }
            self._sink.emit("environment", facts)

    def _check_world(self) -> None:
        given, own = int(self._environ["WORLD_SIZE"]), self._spec.layout.world_size
        if not given == own == self._attempt.world_size:
            raise SpecRefused(
                "layout.nodes",
                f"the run spec has {own} ranks, the attempt {self._attempt.world_size}, and {given} were started",
            )

    def _artifacts(self) -> Path:
        return self._run_dir / "attempts" / str(self._attempt.attempt) / "artifact"

    def _keep(self) -> None:
        """Called by what takes long outside of the loop: one more sign of life, and the place to stop when asked."""
        self._sink.beat()
        if self._stop.reason is not None:
            raise Preempted(
                f"stopped outside of the training loop ({self._stop.reason}), where nothing is left to save"
            )

    def _phase(self, name: str, may_take_s: float | None) -> None:
        self._sink.emit("phase", {"name": name, "may_take_s": may_take_s})


def final_metrics(progress: Progress, dataset: Dataset | TokenDataset) -> dict[str, Json]:
    """What a finished run is told by: what the best judgement gave, and how far training went. Holds no times."""
    best: Mapping[str, Any] = next(entry for entry in progress.history if entry["step"] == progress.best_step)
    told: dict[str, Json] = {name: value for name, value in best.items() if name not in ("epoch", "step", "best")}
    told |= {
        "best_epoch": progress.best_epoch,
        "best_step": progress.best_step,
        "epochs": len(progress.history),
        "steps": progress.step,
        "samples": progress.samples,
    }
    if isinstance(dataset, TokenDataset):
        return {**told, "tokens": progress.samples * dataset.train.items, **dataset.counts}
    counts = {"rows" if name == "rows" else f"rows_{name}": count for name, count in dataset.counts.items()}
    return {**told, **counts}


def _examples(dataset: Dataset | TokenDataset) -> tuple[Examples, Examples]:
    if isinstance(dataset, TokenDataset):
        return dataset.train, dataset.valid
    return RowExamples(dataset.train), RowExamples(dataset.valid)


def is_sharded(layout: LayoutSpec) -> bool:
    """Whether no rank holds all parameters: shards, matrices, layers or experts are divided, or ZeRO stage 3."""
    return max(layout.shard, layout.tp, layout.pp, layout.ep) > 1 or (layout.zero == 3 and layout.dp > 1)


def exit_code(error: BaseException) -> ExitCode:
    """What the end by `error` means to whoever started the rank."""
    if isinstance(error, Preempted):
        return ExitCode.PREEMPTED
    if isinstance(error, _REFUSED):
        return ExitCode.REFUSED_SPEC
    if isinstance(error, _INFRASTRUCTURE):
        return ExitCode.LOST_PEER
    return ExitCode.USER_CODE


def _configure_torch(spec: RunSpec) -> None:
    torch.set_num_threads(spec.threads)
    torch.use_deterministic_algorithms(spec.determinism == "deterministic")
    # Guards against code that reads memory before it writes it, at a tenth of the step's time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
