"""Pins everything that a training run of one `as_of` depends on, and writes its run spec.

Only content-addressed bytes are stored here (code and spec); no row is written and nothing starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from headway.artifacts.manifest import read_manifest
from headway.catalog import FeatureSnapshot
from headway.declaration import PipelineSpec, TrainingSpec, duration_us
from headway.declaration_text import END_TOKEN
from headway.errors import HeadwayError
from headway.loading import Pipeline
from headway.services import Services
from headway.training.identity import CODE_ROOT, environment, is_dirty
from headway.training.stage import StoredCode, store_code
from headway.training.window import WHOLE, NoTraining, Window, declared_training, whole_window, window_of
from trainer.blobs import Json, canonical_json, digest_json
from trainer.spec import (
    PLAIN_DEGREE,
    BatchSpec,
    DataFile,
    DataSpec,
    LayoutSpec,
    ModelSpec,
    OptimizerSpec,
    RestartSpec,
    RunSpec,
    ScheduleSpec,
    SpecRefused,
    TokenDataSpec,
    TokenFile,
    parse_layout,
)

if TYPE_CHECKING:
    from headway.catalog.run_facts import RunFacts

VALUES_ENTRY = "values.parquet"
WORKER_SECONDS = "worker_seconds"


class SnapshotsMissing(HeadwayError):
    """Partitions of the training window that have no published snapshot."""


class InputAlwaysNull(HeadwayError):
    """An input that holds next to nothing over the whole window."""


class FeatureSetsMixed(HeadwayError):
    """Snapshots of one window that were made by different versions of the feature set."""


class LayoutRefused(HeadwayError):
    """The declared layout, batch or schedule cannot run."""


@dataclass(frozen=True)
class Overrides:
    """What a launch may change; everything but `retry` and `note` makes it another run.

    `nodes` alone fixes their number; `min_nodes` makes a range of it, or of the most that are declared.
    """

    epochs: int | None = None
    steps: int | None = None
    lr: float | None = None
    seed: int | None = None
    nodes: int | None = None
    min_nodes: int | None = None
    repeat: int = 0
    retry: bool = False
    note: str = ""


@dataclass(frozen=True)
class PinnedWindow:
    """A window with the snapshots that stand in it now, and the partitions that were left out by name."""

    window: Window
    snapshots: tuple[FeatureSnapshot, ...]
    left_out: Mapping[str, str]
    rows: int


@dataclass(frozen=True)
class RunPlan:
    """A run before it is asked for: what it pins, what it computes, and what it may cost (worker-seconds)."""

    pipeline: Pipeline
    pinned: PinnedWindow
    spec: RunSpec
    facts: RunFacts
    reserve_seconds: int
    month_seconds: int


def plan_run(
    services: Services, pipeline: Pipeline, as_of: str, overrides: Overrides | None = None, dagster_run_id: str = ""
) -> RunPlan:
    """Pin the window's snapshots, code, environment and configuration of one run.

    Raises:
        NoTraining, UnknownPartition, WindowEmpty: there is nothing to train on that day.
        SnapshotsMissing: names the partitions without a snapshot.
        InputAlwaysNull: names the inputs without values.
        LayoutRefused: names the field and the reason.
    """
    asked = overrides or Overrides()
    declared = _declared(pipeline.spec, asked)
    pinned = pin_window(services, pipeline.spec, as_of)
    code = store_code(services.store, CODE_ROOT, pipeline.folder, pipeline.name)
    try:
        spec = _run_spec(services, pipeline, declared, pinned, code)
    except SpecRefused as error:
        raise LayoutRefused(str(error), "change `training` in defs.yaml, or what the launch overrides") from error
    return RunPlan(
        pipeline=pipeline,
        pinned=pinned,
        spec=spec,
        facts=_facts(services, pipeline, pinned, spec, code, asked, declared, dagster_run_id),
        reserve_seconds=duration_us(declared.budget.per_run) // 1_000_000,
        month_seconds=duration_us(declared.budget.per_month) // 1_000_000,
    )


def pin_window(services: Services, spec: PipelineSpec, as_of: str) -> PinnedWindow:
    """The published snapshots of a training window, and the refused partitions that the declaration lets go.

    Raises:
        SnapshotsMissing: a partition was never built, or more were refused than the declaration allows.
        FeatureSetsMixed: they were made by different versions of the feature set.
        InputAlwaysNull: an input of the model is null almost everywhere.
    """
    if spec.text is not None:
        return _pin_text(services, spec, as_of)
    window = window_of(spec, as_of)
    states = services.catalog.current_snapshots(services.principal, spec.name, window.train)
    absent = [p for p in window.train if p not in states]
    if absent:
        raise SnapshotsMissing(
            f"{len(absent)} of {len(window.train)} partitions of the training window of {as_of} have no snapshot: "
            f"{_some(absent)}",
            f"materialize feature_snapshot for {absent[0]} to {absent[-1]} first",
        )
    refused = {p: states[p].reason for p in window.train if states[p].snapshot is None}
    if len(refused) > declared_training(spec).max_missing_share * len(window.train):
        raise SnapshotsMissing(
            f"{len(refused)} of {len(window.train)} snapshots of the training window of {as_of} were refused: "
            + _some([f"{p} ({reason})" for p, reason in refused.items()]),
            "mend them, or raise training.max_missing_share to train without them",
        )
    snapshots = tuple(s for p in window.train if (s := states[p].snapshot) is not None)
    _refuse_mixed_features(snapshots)
    _refuse_empty_inputs(spec, snapshots)
    return PinnedWindow(window, snapshots, refused, sum(s.rows for s in snapshots))


def _pin_text(services: Services, spec: PipelineSpec, as_of: str) -> PinnedWindow:
    """The one snapshot of a pipeline that learns from text.

    Raises:
        NoTraining: a month was asked for.
        SnapshotsMissing: it was never built, or was refused.
    """
    if as_of != WHOLE:
        raise NoTraining(
            f"{spec.name!r} learns from text and has no as_of {as_of!r}", "ask for its training without an as_of"
        )
    state = services.catalog.current_snapshots(services.principal, spec.name, [WHOLE]).get(WHOLE)
    if state is None or state.snapshot is None:
        why = "was never built" if state is None else f"was refused: {state.reason}"
        raise SnapshotsMissing(f"the snapshot of {spec.name!r} {why}", "materialize feature_snapshot first")
    return PinnedWindow(whole_window(), (state.snapshot,), {}, state.snapshot.rows)


def model_options(spec: PipelineSpec) -> dict[str, Any]:
    """Options of the model's factory: those declared, and for text the sizes that follow from it.

    Raises:
        NoTraining: the pipeline declares no training.
    """
    options: dict[str, Any] = dict(declared_training(spec).options)
    if spec.text is not None:
        options |= {"vocab": spec.text.tokenizer.vocab, "sequence": spec.text.context}
    return options


def declared_layout(training: TrainingSpec) -> LayoutSpec:
    """The layout that a declaration asks for.

    Raises:
        SpecRefused: text that is no layout, or nodes and processes that it does not fill.
    """
    if training.layout:
        if training.zero is not None:
            raise SpecRefused("layout.zero", f"{training.zero} beside a layout; write zero={training.zero} into it")
        layout = parse_layout(training.engine, training.layout, training.most_nodes, training.processes_per_node)
    else:
        layout = _plain_layout(training)
    return replace(
        layout,
        schedule=training.schedule,
        offload=training.offload,
        activation_checkpointing=training.activation_checkpointing,
        compile=training.compile,
        min_nodes=training.fewest_nodes if training.fewest_nodes < training.most_nodes else 0,
    )


def declared_optimizer(training: TrainingSpec) -> OptimizerSpec:
    """The optimizer that a declaration asks for."""
    return OptimizerSpec(lr=training.lr, weight_decay=training.weight_decay)


def declared_batch(training: TrainingSpec) -> BatchSpec:
    """The batch that a declaration asks for."""
    return BatchSpec(global_size=training.batch, accumulation=training.accumulation)


def null_shares(snapshots: Sequence[FeatureSnapshot]) -> dict[str, float]:
    """Share of null cells per feature over several snapshots, each weighted by its rows."""
    nulls: dict[str, float] = {}
    rows = sum(s.rows for s in snapshots)
    for snapshot in snapshots:
        shares = snapshot.facts.metadata.get("null_shares")
        for feature, share in shares.items() if isinstance(shares, Mapping) else ():
            if isinstance(share, int | float):
                nulls[feature] = nulls.get(feature, 0.0) + float(share) * snapshot.rows
    return {feature: count / max(1, rows) for feature, count in nulls.items()}


def _refuse_mixed_features(snapshots: Sequence[FeatureSnapshot]) -> None:
    first: dict[int, str] = {}
    for snapshot in snapshots:
        first.setdefault(snapshot.feature_set_version, snapshot.partition)
    if len(first) > 1:
        shown = ", ".join(f"version {number} from {partition}" for number, partition in first.items())
        raise FeatureSetsMixed(
            f"the window's snapshots were made by different versions of the feature set: {shown}",
            "materialize feature_snapshot for the whole window again, so that all have the version in force",
        )


def _refuse_empty_inputs(spec: PipelineSpec, snapshots: Sequence[FeatureSnapshot]) -> None:
    limit = declared_training(spec).max_null_share
    shares = null_shares(snapshots)
    empty = {f: shares[f] for f in spec.model_inputs() if shares.get(f, 0.0) > limit}
    if empty:
        shown = ", ".join(f"{f} ({share:.1%})" for f, share in empty.items())
        raise InputAlwaysNull(
            f"inputs of {spec.name!r} are null in more than {limit:.0%} of the window's rows: {shown}",
            "look whether they are known in time at all; list them under training.exclude, or raise "
            "training.max_null_share",
        )


def _declared(spec: PipelineSpec, asked: Overrides) -> TrainingSpec:
    changed: dict[str, Any] = {
        name: value
        for name in ("epochs", "steps", "lr", "seed", "nodes")
        if (value := getattr(asked, name)) is not None
    }
    if asked.min_nodes is not None:
        changed["nodes"] = {"min": asked.min_nodes, "max": changed.get("nodes", declared_training(spec).most_nodes)}
    try:
        return TrainingSpec.model_validate({**declared_training(spec).model_dump(), **changed})
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r}" for e in error.errors())
        raise LayoutRefused(f"the launch overrides what cannot be: {said}", "change it in the Launchpad") from error


def _plain_layout(training: TrainingSpec) -> LayoutSpec:
    processes = training.processes_per_node or 1
    stage = 1 if training.zero is None and training.engine == "deepspeed" else training.zero or 0
    nodes = training.most_nodes
    degree: Any = {PLAIN_DEGREE[training.engine]: nodes * processes}
    return LayoutSpec(engine=training.engine, zero=stage, nodes=nodes, processes_per_node=processes, **degree)


def _run_spec(
    services: Services, pipeline: Pipeline, declared: TrainingSpec, pinned: PinnedWindow, code: StoredCode
) -> RunSpec:
    spec = pipeline.spec
    module, _, function = declared.factory.partition(".")
    built = RunSpec(
        pipeline=spec.name,
        data=_row_data(services, spec, declared, pinned) if spec.text is None else _token_data(services, spec, pinned),
        model=ModelSpec(
            file=f"pipelines/{spec.name}/{module}.py",
            function=function,
            code_digest=code.digest,
            code_manifest=code.manifest_digest,
            options=model_options(spec),
        ),
        seed=declared.seed,
        layout=declared_layout(declared),
        precision=declared.precision,
        optimizer=declared_optimizer(declared),
        batch=declared_batch(declared),
        schedule=ScheduleSpec(
            epochs=declared.epochs,
            steps=declared.steps,
            judge_every=declared.judge_every,
            patience=declared.early_stopping.patience,
            checkpoint_every=declared.checkpoint_every,
            keep_last=declared.checkpoints.keep_last,
            keep_every_hours=declared.checkpoints.keep_every_hours,
            synchronous=declared.checkpoints.synchronous,
        ),
        restart=RestartSpec(max_attempts=declared.max_attempts),
    )
    built.check()
    return built


def _row_data(services: Services, spec: PipelineSpec, declared: TrainingSpec, pinned: PinnedWindow) -> DataSpec:
    return DataSpec(
        files=tuple(_data_file(services, s) for s in pinned.snapshots),
        identity=spec.sources[spec.label.source].row_id,
        target=spec.label.target,
        observed_at=spec.label.observation_time,
        known_at=spec.label.known_at,
        cut=pinned.window.cut,
        validation_from=pinned.window.validation_from,
        categorical=declared.categorical,
        numeric=spec.model_inputs(),
    )


def _token_data(services: Services, spec: PipelineSpec, pinned: PinnedWindow) -> TokenDataSpec:
    from headway.text.layout import TOKENIZER_ENTRY, part_of_shard

    assert spec.text is not None
    manifest = read_manifest(services.store, pinned.snapshots[0].manifest_digest)
    return TokenDataSpec(
        files=tuple(
            TokenFile(part, entry.sha256, entry.size, entry.size // 2)
            for entry in manifest.entries
            if (part := part_of_shard(entry.name)) is not None
        ),
        tokenizer=manifest.entry(TOKENIZER_ENTRY).sha256,
        vocab=spec.text.tokenizer.vocab,
        context=spec.text.context,
        end_token=END_TOKEN,
    )


def _data_file(services: Services, snapshot: FeatureSnapshot) -> DataFile:
    entry = read_manifest(services.store, snapshot.manifest_digest).entry(VALUES_ENTRY)
    return DataFile(partition=snapshot.partition, sha256=entry.sha256, size=entry.size, rows=snapshot.rows)


def _facts(
    services: Services,
    pipeline: Pipeline,
    pinned: PinnedWindow,
    spec: RunSpec,
    code: StoredCode,
    asked: Overrides,
    declared: TrainingSpec,
    dagster_run_id: str,
) -> RunFacts:
    from headway.catalog.run_facts import RunFacts

    stored = services.store.put_bytes(canonical_json(spec.to_json()), "application/json")
    pinned_environment = services.store.put_bytes(canonical_json(environment()), "application/json")
    inputs = {(i.dataset, i.version, i.content_digest) for s in pinned.snapshots for i in s.inputs}
    return RunFacts(
        pipeline=spec.pipeline,
        partition=pinned.window.as_of,
        inputs=tuple(s.snapshot_id for s in pinned.snapshots),
        datasets=tuple(sorted(inputs)),
        code_digest=spec.model.code_digest,
        code_dirty=is_dirty(pipeline.folder),
        environment_digest=pinned_environment.digest,
        config_digest=config_digest(spec),
        spec_digest=stored.digest,
        seed=spec.seed,
        repeat=asked.repeat,
        layout=_layout(spec),
        nodes=spec.layout.nodes,
        budget_id=spec.pipeline,
        max_attempts=declared.max_attempts,
        note=asked.note or None,
        dagster_run_id=dagster_run_id or None,
        blobs=(stored, pinned_environment, *code.blobs),
    )


def config_digest(spec: RunSpec) -> str:
    """The digest of a spec's configuration: everything but its data and code, which the identity names itself."""
    document = dict(spec.to_json())
    del document["data"]
    document["model"] = {"file": spec.model.file, "function": spec.model.function, "options": dict(spec.model.options)}
    if isinstance(spec.data, DataSpec):
        document["columns"] = {"categorical": list(spec.data.categorical), "numeric": list(spec.data.numeric)}
    else:
        document["tokens"] = {"context": spec.data.context}
    return digest_json(document)


def _layout(spec: RunSpec) -> dict[str, Json]:
    return spec.layout.to_json()


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:10])
    return shown if len(names) <= 10 else f"{shown} and {len(names) - 10} more"
