"""`headway runs`: training runs, their attempts and events; cancel one."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from headway.cli.compare import command as compare
from headway.cli.replay import command as replay
from headway.errors import HeadwayError
from headway.home import Settings
from headway.words import no_single

if TYPE_CHECKING:
    from headway.catalog.run_facts import RunEvent, TrainingRun
    from headway.services import Services

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_RUN = click.argument("run_id", metavar="RUN")
_CANCEL_WAIT_S = 60.0


class UnclearRun(HeadwayError):
    """A text that begins the name of no run, or of several."""


@click.group("runs")
def command() -> None:
    """Look at training runs, follow their events, cancel one.

    RUN is a run's id, or its first characters.
    """


@command.command("list")
@click.option("--pipeline", "-p", help="Only runs of this pipeline.")
@click.option("--partition", help="Only runs of this as_of.")
@click.option(
    "--limit", type=click.IntRange(1), default=50, show_default=True, help="Newest runs first, at most this many."
)
@_JSON
@click.pass_obj
def list_runs(settings: Settings, pipeline: str | None, partition: str | None, limit: int, as_json: bool) -> None:
    """List training runs, newest first."""
    from headway.services import open_services

    with open_services(settings) as services:
        runs = services.catalog.runs(services.principal, pipeline, partition, limit)
    rows = [_row(run) for run in runs]
    if as_json:
        click.echo(json.dumps({"runs": rows}, indent=2))
        return
    for row in rows:
        click.echo(
            f"{row['run_id']}  {row['pipeline']} {row['as_of']}  {row['status']:<10}  attempt {row['attempts']}  "
            f"{row['worker_seconds']:>8.1f} worker-s  {row['created_at']}  "
            f"{row['reason'] or row['waiting'] or ''}"
        )
    click.echo(f"{len(rows)} runs")


@command.command("show")
@_RUN
@_JSON
@click.pass_obj
def show(settings: Settings, run_id: str, as_json: bool) -> None:
    """Show what a run pins, its attempts, metrics, cost and artifacts."""
    from headway.services import open_services
    from headway.training.describe import loss_curve, stragglers
    from headway.training.restarts import restarts

    with open_services(settings) as services:
        run = find_run(services, run_id)
        curve = loss_curve(services, run)
        stale = _replaced_snapshots(services, run)
        slow = stragglers(services, run)
        restarted = [restart.to_json() for restart in restarts(services, run)]
        told = _measured(services, run)
    document = _document(run, stale) | {"stragglers": slow or "none", "restarts": restarted or "none"} | told
    epochs = [{n: _finite(v) for n, v in vars(row).items()} for row in curve]
    if as_json:
        click.echo(json.dumps({**document, "epochs": epochs}, indent=2))
        return
    for name, value in document.items():
        lines = value if isinstance(value, list) else [value]
        for index, line in enumerate(lines):
            click.echo(f"{name if index == 0 else '':<20}  {_shown(line)}")
    for row in epochs:
        click.echo(f"{'epoch ' + str(row['epoch']):<20}  {_shown({k: v for k, v in row.items() if k != 'epoch'})}")


@command.command("logs")
@_RUN
@click.option("--follow", "-f", is_flag=True, help="Go on until the run ends; Ctrl-C stops looking, not the run.")
@click.option("--attempt", type=click.IntRange(1), help="Only this attempt.")
@click.option("--rank", type=click.IntRange(0), help="What this rank printed, instead of the run's events.")
@_JSON
@click.pass_obj
def logs(settings: Settings, run_id: str, follow: bool, attempt: int | None, rank: int | None, as_json: bool) -> None:
    """Print a run's events in order. With -f the run is looked after as well, should nobody else do it."""
    from headway.services import open_services
    from headway.training.launchers import launcher_for
    from headway.training.rank_logs import follow_rank_log
    from headway.training.reconcile import Reconciler

    if rank is not None and as_json:
        raise click.UsageError("--rank prints text as it is; leave --json out")
    with open_services(settings) as services:
        run = find_run(services, run_id)
        if rank is not None:
            for piece in follow_rank_log(services, launcher_for(settings), run, rank, attempt, follow):
                click.echo(piece, nl=False)
            return
        reconciler = Reconciler(services, launcher_for(settings)) if follow else None
        after, told = 0, list[str]()
        while True:
            if reconciler is not None:
                away = [a.detail for a in reconciler.run(run.run_id) if a.kind == "unavailable"]
                if away != told:
                    click.echo("\n".join(away) or "the launcher answers again", err=True)
                told = away
            for event in services.catalog.run_events(services.principal, run.run_id, attempt=attempt, after=after):
                _print_event(event, as_json)
                after = event.seq
            if services.catalog.run_events(services.principal, run.run_id, attempt=attempt, after=after, limit=1):
                continue
            if not follow or services.catalog.run(services.principal, run.run_id).status != "open":
                return
            time.sleep(0.5)


@command.command("cancel")
@_RUN
@click.option("--reason", default="asked for on the command line", show_default=True)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until its processes are gone.")
@click.pass_obj
def cancel(settings: Settings, run_id: str, reason: str, wait: bool) -> None:
    """Cancel a run: its workers save and stop, and its budget comes back. Only a person may start it again."""
    from headway.services import open_services
    from headway.training.launchers import launcher_for
    from headway.training.reconcile import Reconciler

    with open_services(settings) as services:
        run = find_run(services, run_id)
        services.catalog.request_cancel(services.principal, None, run.run_id, reason)
        reconciler = Reconciler(services, launcher_for(settings))
        deadline = time.monotonic() + (_CANCEL_WAIT_S if wait else 0.0)
        while True:
            reconciler.run(run.run_id)
            run = services.catalog.run(services.principal, run.run_id)
            if run.status != "open" or time.monotonic() >= deadline:
                break
            time.sleep(0.2)
    click.echo(f"{run.run_id} {run.status}" + (": asked to stop" if run.status == "open" else ""))


@command.command("profile")
@_RUN
@click.argument("steps", metavar="STEPS")
@click.pass_obj
def profile(settings: Settings, run_id: str, steps: str) -> None:
    """Trace steps of a run that trains, for instance 10:15; `headway runs show` says where the trace lies.

    STEPS are counted from 1 over the whole run. A trace opens in https://ui.perfetto.dev.
    """
    from headway.services import open_services
    from headway.training.launchers import launcher_for
    from headway.training.trace import TraceRefused, ask_for_trace, wanted_steps

    wanted = wanted_steps(steps)
    if wanted is None:
        raise TraceRefused("no steps are named", "write for instance 10:15")
    with open_services(settings) as services:
        run = find_run(services, run_id)
        if run.status != "open":
            raise TraceRefused(f"run {run.run_id} is {run.status}: it takes no steps", "trace a run that trains")
        ask_for_trace(launcher_for(settings).run_dir(run.run_id), wanted)
    click.echo(f"{run.run_id}: steps {wanted.first} to {wanted.last} will be traced, unless they have passed")


command.add_command(compare)
command.add_command(replay)


def find_run(services: Services, reference: str) -> TrainingRun:
    """The one run whose id begins with a text.

    Raises:
        UnclearRun: there is none, or more than one.
    """
    found = services.catalog.run_ids(services.principal, reference) if reference else []
    if len(found) != 1:
        raise UnclearRun(no_single("run", found, reference), "`headway runs list` shows the ids")
    return services.catalog.run(services.principal, found[0])


def _measured(services: Services, run: TrainingRun) -> dict[str, Any]:
    """The newest step, where a step's time goes (seconds on rank 0), what each rank held, and traces."""
    from headway.training.measured import measured

    found = measured(services, run)
    told: dict[str, Any] = {}
    if found.points:
        newest = found.ordered[-1]
        speed = {"step": newest.step, "of": newest.total, "loss": newest.loss, f"{newest.unit}_per_s": newest.rate}
        speed |= {"step_s": newest.step_s, "mfu": newest.mfu, "eta_s": newest.eta_s if run.status == "open" else None}
        told["newest_step"] = {name: _finite(value) for name, value in speed.items()}
        told["step_time"] = found.split()
    if found.ranks:
        kept = ("rank", "step_s", "busy_s", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "peak_bytes")
        told["rank"] = [{name: rank.get(name) for name in kept} for rank in found.ranks]
    if found.traces:
        told["trace"] = [f"{t.path} in the run's directory, {t.bytes} bytes, {t.manifest}" for t in found.traces]
    return told


def _replaced_snapshots(services: Services, run: TrainingRun) -> list[str]:
    """Partitions whose snapshot is another one now than when the run pinned it."""
    pinned = set(run.facts.inputs)
    partitions = [services.catalog.snapshot(services.principal, i).partition for i in run.facts.inputs]
    states = services.catalog.current_snapshots(services.principal, run.facts.pipeline, partitions)
    return [p for p, s in states.items() if s.snapshot is None or s.snapshot.snapshot_id not in pinned]


def _row(run: TrainingRun) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "pipeline": run.facts.pipeline,
        "as_of": run.facts.partition,
        "status": run.status,
        "attempts": len(run.attempts),
        "reason": run.last.reason,
        "waiting": run.last.waiting,
        "worker_seconds": run.worker_seconds,
        "note": run.facts.note,
        "created_at": _instant(run.created_at),
    }


def _document(run: TrainingRun, stale: list[str]) -> dict[str, Any]:
    facts = run.facts
    document = _row(run) | {
        "identity": run.identity_digest,
        "layout": dict(facts.layout),
        "seed": facts.seed,
        "repeat": facts.repeat,
        "code_digest": facts.code_digest,
        "code_dirty": facts.code_dirty,
        "environment_digest": facts.environment_digest,
        "config_digest": facts.config_digest,
        "spec_digest": facts.spec_digest,
        "snapshots": len(facts.inputs),
        "dataset_versions": len(facts.datasets),
        "out_of_date": (
            [f"{len(stale)} pinned snapshots were replaced since: {', '.join(stale[:5])}"] if stale else "no"
        ),
        "dagster_run_id": facts.dagster_run_id,
        "attempt": [
            {
                "attempt": a.attempt,
                "state": a.state,
                "nodes": a.layout.get("nodes"),
                "launcher": a.launcher,
                "code": a.code,
                "reason": a.reason,
                "reason_code": a.reason_code,
                "retry": a.retry,
                "waiting": a.waiting,
                "worker_seconds": a.worker_seconds,
                "started_at": _instant(a.started_at),
                "ended_at": _instant(a.ended_at),
            }
            for a in run.attempts
        ],
    }
    if run.result is not None:
        document |= {
            "artifacts": dict(run.result.artifacts),
            "best_step": run.result.best_step,
            "metrics": dict(run.result.metrics),
        }
    return document


def _print_event(event: RunEvent, as_json: bool) -> None:
    from headway.training.describe import event_line

    if as_json:
        document = {
            "seq": event.seq,
            "attempt": event.attempt,
            "node": event.node,
            "node_seq": event.node_seq,
            "kind": event.kind,
            "data": dict(event.data),
            "at": _instant(event.at),
        }
        click.echo(json.dumps(document))
        return
    line = event_line(event)
    if line:
        click.echo(f"{_instant(event.at)}  {line}")


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_shown(v)}" for k, v in value.items() if v is not None)
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _finite(value: object) -> object:
    """NaN as null: JSON has no NaN."""
    return None if isinstance(value, float) and value != value else value


def _instant(moment: int | None) -> str | None:
    return None if moment is None else datetime.fromtimestamp(moment / 1_000_000, UTC).isoformat(timespec="seconds")
