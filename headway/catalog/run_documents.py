"""Between rows, stored answers and the records of runs. A replayed answer decodes to the very record."""

from collections.abc import Iterable
from typing import Any, cast

import sqlalchemy as sa

from headway.artifacts.digests import Json
from headway.catalog.commands import Document, load
from headway.catalog.documents import blobs_of
from headway.catalog.run_facts import Attempt, RunEvent, RunFacts, RunResult, RunStatus, Submission, TrainingRun

_PLAIN_FACTS = (
    "pipeline",
    "partition",
    "code_digest",
    "environment_digest",
    "config_digest",
    "spec_digest",
    "seed",
    "repeat",
    "nodes",
    "budget_id",
    "max_attempts",
    "note",
    "dagster_run_id",
)
_PLAIN_ATTEMPT = (
    "run_id",
    "attempt",
    "state",
    "reason",
    "code",
    "launcher",
    "external_name",
    "created_at",
    "started_at",
    "heartbeat_at",
    "ended_at",
    "worker_seconds",
    "cancel_reason",
    "waiting",
    "reason_code",
    "retry",
)


def run_facts_of(document: Json) -> RunFacts:
    """Return the facts that `encode` wrote."""
    fields = cast("dict[str, Any]", document)
    return RunFacts(
        **fields
        | {
            "inputs": tuple(fields["inputs"]),
            "datasets": tuple((name, version, content) for name, version, content in fields["datasets"]),
            "blobs": blobs_of(fields["blobs"]),
        }
    )


def result_of(document: Json) -> RunResult:
    """Return the result that `encode` wrote."""
    fields = dict(cast("dict[str, Any]", document))
    blobs = blobs_of(fields.pop("blobs"))
    return RunResult(**fields, blobs=blobs)


def attempt_of(document: Json) -> Attempt:
    """Return the attempt that `encode` wrote."""
    return Attempt(**cast("dict[str, Any]", document))


def run_of(document: Json) -> TrainingRun:
    """Return the run that `encode` wrote."""
    fields = cast("dict[str, Any]", document)
    return TrainingRun(
        **fields
        | {
            "facts": run_facts_of(fields["facts"]),
            "attempts": tuple(attempt_of(item) for item in fields["attempts"]),
            "result": None if fields["result"] is None else result_of(fields["result"]),
        }
    )


def submission_of(document: Document) -> Submission:
    """Return the submission that `encode` wrote."""
    fields = cast("dict[str, Any]", document)
    attempt = None if fields["attempt"] is None else attempt_of(fields["attempt"])
    return Submission(fields["decision"], run_of(fields["run"]), attempt)


def attempt_of_row(row: "sa.Row[Any]") -> Attempt:
    """Return the attempt of a `run_attempt` row."""
    plain = {name: getattr(row, name) for name in _PLAIN_ATTEMPT}
    return Attempt(**plain, token=row.fencing_token, layout=cast("Any", load(row.layout)))


def result_of_row(row: "sa.Row[Any]") -> RunResult:
    """Return the result of a `run_result` row."""
    artifacts, metrics = cast("Any", load(row.artifacts)), cast("Any", load(row.metrics))
    return RunResult(artifacts, metrics, row.best_step, blobs_of(load(row.blobs)))


def run_of_row(row: "sa.Row[Any]", attempts: Iterable[Attempt], result: RunResult | None) -> TrainingRun:
    """Return the run of a `training_run` row with its attempts in order and its result."""
    facts = RunFacts(
        **{name: getattr(row, name) for name in _PLAIN_FACTS},
        code_dirty=bool(row.code_dirty),
        inputs=tuple(cast("list[str]", load(row.inputs))),
        datasets=tuple((name, version, content) for name, version, content in cast("Any", load(row.datasets))),
        layout=cast("Any", load(row.layout)),
        blobs=blobs_of(load(row.blobs)),
    )
    ordered = tuple(attempts)
    last = ordered[-1]
    return TrainingRun(
        facts=facts,
        run_id=row.run_id,
        identity_digest=row.identity_digest,
        status=_status(last),
        attempts=ordered,
        cancel_requested=last.cancel_reason is not None,
        result=result,
        failed_by_code=last.failed_by_code,
        created_at=row.created_at,
        worker_seconds=sum(attempt.worker_seconds or 0.0 for attempt in ordered),
    )


def event_of_row(row: "sa.Row[Any]") -> RunEvent:
    """Return the event of a `run_event` row."""
    data = cast("Any", load(row.payload))
    return RunEvent(row.seq, row.attempt, row.node, row.node_seq, row.kind, data, row.at)


def _status(last: Attempt) -> RunStatus:
    if last.state in ("queued", "admitted", "running"):
        return "open"
    if last.state == "succeeded":
        return "succeeded"
    # Whatever ended an attempt that somebody had asked to stop: it must not be started again by a machine.
    return "cancelled" if last.cancel_reason is not None else last.state
