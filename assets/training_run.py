"""Stage `training_run`: pins a window of snapshots, asks for the run, follows it, reports what it measured.

The run is not this step's child: when the step or its process dies, the run goes on, and the next execution adopts it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import dagster as dg

from assets.describe import code_references, curve_metadata, guarded, table
from assets.keys import snapshot_key, training_key
from assets.partitions import partitions_definition, training_dependency
from assets.runs import asker, is_being_cancelled
from headway.catalog.errors import UnknownRun
from headway.errors import HeadwayError
from headway.loading import Pipeline
from headway.processes import step_dies_with_run
from headway.training.identity import CODE_ROOT
from headway.training.window import WHOLE, as_of_calendar
from resources.platform import Platform
from trainer.blobs import code_tree_digest, digest_json
from trainer.spec import TokenDataSpec

if TYPE_CHECKING:
    from headway.catalog.run_facts import RunEvent, TrainingRun
    from headway.training.plan import RunPlan
    from headway.training.reconcile import Action

CHECKS = {
    "finished": "The run succeeded, and its artifact is what its manifest says.",
    "finite_metrics": "Every metric that the run reported is a finite number.",
}
_STOP_WAIT_S = 60.0


class TrainingConfig(dg.Config):
    """What the Launchpad may change. All but `retry`, `note` and `profile` (`steps=10:15`) make it another run."""

    epochs: int | None = None
    steps: int | None = None
    lr: float | None = None
    seed: int | None = None
    nodes: int | None = None
    min_nodes: int | None = None
    repeat: int = 0
    retry: bool = False
    note: str = ""
    profile: str = ""


def build_training_run(pipeline: Pipeline) -> dg.AssetsDefinition:
    """The training run asset of a pipeline, one partition per month of `as_of`; text has no partitions."""
    spec = pipeline.spec
    key = training_key(spec.name)
    monthly = spec.text is None

    @dg.asset(
        key=key,
        group_name=spec.name,
        description=f"One training of `{spec.name}` on the {'snapshots before `as_of`' if monthly else 'snapshot'}, on "
        "several nodes, resumable.",
        owners=[spec.owner],
        kinds={"pytorch"},
        tags={"headway/stage": "training_run"},
        metadata={"dagster/code_references": code_references(pipeline, "training", "model.py")},
        code_version=code_version(pipeline),
        partitions_def=partitions_definition(as_of_calendar(spec)) if monthly else None,
        backfill_policy=dg.BackfillPolicy.multi_run(1) if monthly else None,
        deps=[dg.AssetDep(snapshot_key(spec.name), partition_mapping=training_dependency(spec) if monthly else None)],
        check_specs=[
            dg.AssetCheckSpec(name, asset=key, blocking=True, description=text) for name, text in CHECKS.items()
        ],
    )
    def training_run(
        context: dg.AssetExecutionContext, config: TrainingConfig, platform: Platform
    ) -> dg.MaterializeResult:  # pyright: ignore[reportMissingTypeArgument] - Dagster reads this
        from headway.training.plan import Overrides, plan_run
        from headway.training.submit import submit
        from headway.training.trace import ask_for_trace, wanted_steps

        step_dies_with_run()
        try:
            wanted = wanted_steps(config.profile)
            plan = plan_run(
                platform.services(),
                pipeline,
                context.partition_key if monthly else WHOLE,
                Overrides(**config.model_dump(exclude={"profile"})),
                context.run.run_id,
            )
            context.log.info(_plan_line(plan))
            run_id = plan.facts.run_id(platform.principal().tenant)
            with cancelled_with_dagster(context, platform, run_id):
                asked = submit(platform.services(), platform.launcher(), plan, asker=asker(context), retry=config.retry)
                context.log.info(f"run {run_id}: {_decision(asked.decision)}")
                if wanted is not None and asked.decision != "up_to_date":
                    ask_for_trace(platform.launcher().run_dir(run_id), wanted)
                run = asked.run if asked.decision == "up_to_date" else _follow(context, platform, key, run_id)
        except HeadwayError as error:
            raise dg.Failure(str(error), allow_retries=False) from error
        return _report(platform, plan, run, asked.decision)

    return training_run


def code_version(pipeline: Pipeline) -> str:
    """A short name of the code that a run executes: `trainer/` and the pipeline's folder."""
    return digest_json([code_tree_digest(CODE_ROOT, ("trainer",)), pipeline.tree_digest])[7:19]


def _decision(decision: str) -> str:
    return {
        "started": "started",
        "adopted": "it is under way already: following it",
        "up_to_date": "up to date, nothing to train",
    }[decision]


def _plan_line(plan: "RunPlan") -> str:
    layout = plan.spec.layout
    return (
        f"{_data_in_words(plan)}; {layout.engine} on "
        f"{_nodes_in_words(plan)} nodes x {layout.processes_per_node}; reserves {plan.reserve_seconds} worker-seconds"
        + (f"; left out: {', '.join(plan.pinned.left_out)}" if plan.pinned.left_out else "")
    )


def _data_in_words(plan: "RunPlan") -> str:
    pinned, window = plan.pinned, plan.pinned.window
    if isinstance(plan.spec.data, TokenDataSpec):
        tokens = sum(f.tokens for f in plan.spec.data.of_split("train"))
        return f"{pinned.rows:,} documents, {tokens:,} tokens to learn from"
    return (
        f"{len(pinned.snapshots)} snapshots, {pinned.rows:,} label rows, {window.train[0]} to {window.train[-1]} "
        f"({window.months} of {window.declared_months} declared months)"
    )


def _nodes_in_words(plan: "RunPlan") -> str:
    layout = plan.spec.layout
    return f"{layout.nodes}" + (f" (after a loss at least {layout.min_nodes})" if layout.min_nodes else "")


def _follow(context: dg.AssetExecutionContext, platform: Platform, key: dg.AssetKey, run_id: str) -> "TrainingRun":
    from assets.training_live import LiveView
    from headway.training.describe import event_line
    from headway.training.follow import Follower, follow

    partition = context.partition_key if context.has_partition_key else None
    live = LiveView(context, key, partition, platform.launcher().run_dir(run_id))

    def on_event(event: "RunEvent") -> None:
        live.take(event)
        line = event_line(event)
        if line:
            context.log.info(line)

    def on_action(action: "Action") -> None:
        context.log.info(f"attempt {action.attempt}: {action.kind}: {action.detail}")

    return follow(platform.services(), platform.launcher(), run_id, Follower(on_event, on_action))


@contextmanager
def cancelled_with_dagster(context: dg.AssetExecutionContext, platform: Platform, run_id: str) -> Iterator[None]:
    """When this step is interrupted: cancel the run if Dagster is cancelling its own, else leave it to be adopted."""
    try:
        yield
    except (dg.DagsterExecutionInterruptedError, KeyboardInterrupt):
        if is_being_cancelled(context):
            _cancel(context, platform, run_id)
        else:
            context.log.info(f"this process has to go; run {run_id} goes on and will be adopted")
        raise


def _cancel(context: dg.AssetExecutionContext, platform: Platform, run_id: str) -> None:
    from headway.training.reconcile import Reconciler

    services = platform.services()
    try:
        reason = f"Dagster run {context.run.run_id} was cancelled"
        services.catalog.request_cancel(services.principal, None, run_id, reason)
    except UnknownRun:
        context.log.info(f"run {run_id} was not asked for yet: nothing to cancel")
        return
    reconciler = Reconciler(services, platform.launcher())
    deadline = time.monotonic() + _STOP_WAIT_S
    while time.monotonic() < deadline:
        reconciler.run(run_id)
        if services.catalog.run(services.principal, run_id).status != "open":
            context.log.info(f"run {run_id} is cancelled, its workers are gone")
            return
        time.sleep(0.2)
    context.log.warning(f"run {run_id} did not end in {_STOP_WAIT_S:.0f} s; the reconciler goes on ending it")


def _report(platform: Platform, plan: "RunPlan", run: "TrainingRun", decision: str) -> dg.MaterializeResult:  # pyright: ignore[reportMissingTypeArgument]
    if run.status != "succeeded" or run.result is None:
        reason = run.attempts[-1].reason
        raise dg.Failure(
            f"run {run.run_id} is {run.status}: {reason}",
            metadata={
                "run_id": run.run_id,
                "attempts": len(run.attempts),
                "reason_code": run.last.reason_code or run.status,
                "logs": _command(f"runs logs {run.run_id}"),
            },
            allow_retries=False,
        )
    from assets.training_facts import measured_metadata
    from headway.training.describe import loss_curve, non_finite
    from headway.training.measured import measured
    from headway.training.results import verify_stored

    damaged = verify_stored(platform.services(), run)
    key = training_key(plan.spec.pipeline)
    broken = non_finite(run.result.metrics)
    facts: dict[str, Any] = {
        "status": run.status,
        "asked": "up to date" if decision == "up_to_date" else decision,
        "run_id": run.run_id,
        "attempts": len(run.attempts),
        "snapshots": len(run.facts.inputs),
        "rows": plan.pinned.rows,
        "months": plan.pinned.window.months,
        "worker_seconds": run.worker_seconds,
        "code_digest": run.facts.code_digest,
        "code_dirty": run.facts.code_dirty,
        "environment_digest": run.facts.environment_digest,
        "config_digest": run.facts.config_digest,
        "seed": run.facts.seed,
        "show": _command(f"runs show {run.run_id}"),
    }
    facts |= {f"artifact/{name}": digest for name, digest in run.result.artifacts.items()}
    facts |= {f"metric/{n}": v for n, v in run.result.metrics.items() if isinstance(v, int | float)}
    curve = loss_curve(platform.services(), run)
    facts |= table("epochs", [vars(row) for row in curve])
    if curve:
        facts |= curve_metadata(
            platform.store(),
            "Loss by epoch",
            [row.epoch for row in curve],
            train=[row.train_loss for row in curve],
            validation=[row.valid_loss for row in curve],
        )
    facts |= measured_metadata(platform.store(), plan.spec, measured(platform.services(), run))
    return dg.MaterializeResult(
        metadata=guarded(facts),
        data_version=dg.DataVersion(run.result.artifacts.get("network") or next(iter(run.result.artifacts.values()))),
        check_results=[
            dg.AssetCheckResult(
                asset_key=key,
                check_name="finished",
                passed=not damaged,
                severity=dg.AssetCheckSeverity.ERROR,
                description=damaged or "the run succeeded, and every file of its artifacts is what its manifest says",
                metadata={"run_id": run.run_id},
            ),
            dg.AssetCheckResult(
                asset_key=key,
                check_name="finite_metrics",
                passed=not broken,
                severity=dg.AssetCheckSeverity.ERROR,
                metadata={"not_finite": ", ".join(broken), "metrics": len(run.result.metrics)},
            ),
        ],
    )


def _command(line: str) -> dg.MarkdownMetadataValue:
    return dg.MetadataValue.md(f"`headway {line}`")
