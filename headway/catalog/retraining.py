"""Requests to train again: one open per pipeline, each with its reservation; and what was decided, also not to do."""

from dataclasses import dataclass, replace

import sqlalchemy as sa

from headway.catalog import budgets, reports
from headway.catalog.commands import Document, Step, dump, load
from headway.catalog.encoding import encode
from headway.catalog.endpoints import read as read_endpoint
from headway.catalog.errors import (
    RetrainMoved,
    RetrainOpen,
    RetrainRefused,
    UnknownRetrainRequest,
    UnknownRun,
)
from headway.catalog.monitoring_documents import (
    retrain_decision_of_row,
    retrain_request_of,
    retrain_request_of_row,
)
from headway.catalog.monitoring_facts import (
    CLOSED_STATES,
    RETRAIN_MOVES,
    DecisionFacts,
    RetrainDecision,
    RetrainEvent,
    RetrainFacts,
    RetrainRequest,
    RetrainState,
)
from headway.catalog.tables import retrain_decision, retrain_event, retrain_request, training_run

OWNER_KIND = "retrain_request"


@dataclass(frozen=True)
class Move:
    """Where a request goes, why, and what became known about it; None leaves what is known."""

    state: RetrainState
    reason: str
    as_of: str | None
    run_id: str | None
    dagster_run_id: str | None
    candidate_version: int | None
    cost_seconds: float | None


def aggregate(pipeline: str) -> str:
    """Return the aggregate of a pipeline's requests and their moves."""
    return f"retrain:{pipeline}"


def decision_aggregate(pipeline: str) -> str:
    """Return the aggregate of what is decided about a pipeline."""
    return f"retrain_decision:{pipeline}"


def owner_of(request_id: str) -> str:
    """Return the owner of a request's budget entries."""
    return f"retrain:{request_id}"


def open_request(step: Step, facts: RetrainFacts) -> Document:
    """Return the request of this cause, opened with its reservation when there is none.

    That one is open per pipeline is kept by the unique index: whoever inserts second gets no row.
    """
    request_id = facts.request_id(step.tenant)
    known = find(step.connection, step.tenant, request_id)
    if known is not None:
        return encode(known)
    read_endpoint(step.connection, step.tenant, facts.endpoint_id)
    reports.check_known(step.connection, step.tenant, facts.evidence)
    opened = RetrainRequest(
        facts, request_id, facts.state, facts.reason, facts.as_of, None, None, None, None, 1, step.now, None
    )
    if not step.insert_once(retrain_request, **_row(opened)):
        raise RetrainOpen(facts.pipeline, _read_open(step, facts.pipeline))
    owner = owner_of(request_id)
    amount, period = facts.cost_seconds, facts.period
    budgets.reserve(step, facts.budget_id, owner, amount, period=period, owner_kind=OWNER_KIND)
    _append(step, opened)
    return encode(opened)


def opened_at(connection: sa.Connection, tenant: str, facts: RetrainFacts) -> int:
    """Return the epoch that the request of this cause is at, or would be opened at."""
    known = find(connection, tenant, facts.request_id(tenant))
    return 1 if known is None else known.epoch


def move(step: Step, request_id: str, expected_epoch: int, change: Move) -> Document:
    """Move a request by one compare-and-set on its epoch; closing it settles its reservation in the same commit."""
    before = read(step.connection, step.tenant, request_id)
    known = {name: value for name, value in vars(change).items() if value is not None}
    closed = step.now if change.state in CLOSED_STATES else None
    after = replace(before, **known, epoch=expected_epoch + 1, closed_at=closed)
    if after.run_id is not None and after.run_id != before.run_id:
        _check_run(step, after.run_id)
    updated = step.connection.execute(
        sa.update(retrain_request)
        .where(retrain_request.c.tenant_id == step.tenant, retrain_request.c.request_id == request_id)
        .where(retrain_request.c.epoch == expected_epoch)
        .values(_row(after))
        .returning(retrain_request.c.epoch)
    ).first()
    if updated is None:
        raise RetrainMoved(request_id, expected_epoch, before.epoch)
    _check_legal(before, after)
    if closed is not None:
        facts = before.facts
        used, owner = after.cost_seconds or 0.0, owner_of(request_id)
        period, held = facts.period, facts.cost_seconds
        budgets.settle(step, facts.budget_id, period, owner, held, used, owner_kind=OWNER_KIND)
    _append(step, after)
    return encode(after)


def note(step: Step, facts: DecisionFacts) -> Document:
    """Record a decision unless the pipeline's newest one says the same."""
    newest = read_newest(step.connection, step.tenant, facts.pipeline)
    if newest is not None and same_decision(newest, facts):
        return {"written": False}
    step.insert(
        retrain_decision,
        **encode(facts),
        seq=1 if newest is None else newest.seq + 1,
        at=step.now,
        command_key=step.key,
        actor=step.principal.actor,
    )
    return {"written": True}


def noted_at(connection: sa.Connection, tenant: str, facts: DecisionFacts) -> int:
    """Return the number that a decision has, when it is the newest, or would get."""
    newest = read_newest(connection, tenant, facts.pipeline)
    if newest is None:
        return 1
    return newest.seq if same_decision(newest, facts) else newest.seq + 1


def same_decision(one: DecisionFacts, other: DecisionFacts) -> bool:
    """Return whether two decisions about a pipeline say the same, on the same facts."""
    return (one.decision, one.reason, one.fingerprint) == (other.decision, other.reason, other.fingerprint)


def find(connection: sa.Connection, tenant: str, request_id: str) -> RetrainRequest | None:
    """Return a request, None when there is none."""
    mine = (retrain_request.c.tenant_id == tenant, retrain_request.c.request_id == request_id)
    row = connection.execute(sa.select(retrain_request).where(*mine)).first()
    return None if row is None else retrain_request_of_row(row)


def read(connection: sa.Connection, tenant: str, request_id: str) -> RetrainRequest:
    """Return a request.

    Raises:
        UnknownRetrainRequest: there is none.
    """
    found = find(connection, tenant, request_id)
    if found is None:
        raise UnknownRetrainRequest(request_id)
    return found


def read_all(connection: sa.Connection, tenant: str, pipeline: str | None) -> list[RetrainRequest]:
    """Return the requests of a pipeline, or of all, the newest first."""
    columns = retrain_request.c
    statement = sa.select(retrain_request).where(columns.tenant_id == tenant)
    if pipeline is not None:
        statement = statement.where(columns.pipeline == pipeline)
    rows = connection.execute(statement.order_by(columns.created_at.desc(), columns.request_id))
    return [retrain_request_of_row(row) for row in rows]


def read_events(connection: sa.Connection, tenant: str, request_id: str) -> list[RetrainEvent]:
    """Return the moves of a request in order."""
    mine = (retrain_event.c.tenant_id == tenant, retrain_event.c.request_id == request_id)
    rows = connection.execute(sa.select(retrain_event).where(*mine).order_by(retrain_event.c.epoch))
    return [RetrainEvent(retrain_request_of(load(row.row)), row.actor, row.at) for row in rows]


def read_newest(connection: sa.Connection, tenant: str, pipeline: str) -> RetrainDecision | None:
    """Return the newest decision about a pipeline, None when there is none."""
    found = read_decisions(connection, tenant, pipeline, 1)
    return found[0] if found else None


def read_decisions(connection: sa.Connection, tenant: str, pipeline: str, limit: int) -> list[RetrainDecision]:
    """Return at most `limit` decisions about a pipeline, the newest first."""
    mine = (retrain_decision.c.tenant_id == tenant, retrain_decision.c.pipeline == pipeline)
    statement = sa.select(retrain_decision).where(*mine).order_by(retrain_decision.c.seq.desc()).limit(limit)
    return [retrain_decision_of_row(row) for row in connection.execute(statement)]


def _read_open(step: Step, pipeline: str) -> str:
    columns = retrain_request.c
    mine = (columns.tenant_id == step.tenant, columns.pipeline == pipeline, columns.closed_at.is_(None))
    return step.connection.execute(sa.select(columns.request_id).where(*mine)).scalar_one()


def _check_run(step: Step, run_id: str) -> None:
    mine = (training_run.c.tenant_id == step.tenant, training_run.c.run_id == run_id)
    if step.connection.execute(sa.select(training_run.c.run_id).where(*mine)).first() is None:
        raise UnknownRun(run_id)


def _check_legal(before: RetrainRequest, after: RetrainRequest) -> None:
    allowed = RETRAIN_MOVES.get(before.state, frozenset())
    if after.state not in allowed:
        listed = ", ".join(sorted(allowed)) or "nothing: it is closed"
        raise RetrainRefused(before.request_id, before.state, after.state, f"from there it may become {listed}")
    if after.state == "running" and after.as_of is None:
        why = "say which as_of it trains: a run without one is no run"
        raise RetrainRefused(before.request_id, before.state, after.state, why)


def _append(step: Step, request: RetrainRequest) -> None:
    step.insert(
        retrain_event,
        request_id=request.request_id,
        epoch=request.epoch,
        row=dump(encode(request)),
        command_key=step.key,
        actor=step.principal.actor,
        at=step.now,
    )


def _row(request: RetrainRequest) -> dict[str, object]:
    facts = request.facts
    own = {name: value for name, value in vars(request).items() if name != "facts"}
    return {
        **own,
        "pipeline": facts.pipeline,
        "endpoint_id": facts.endpoint_id,
        "facts": dump(encode(facts)),
    }
