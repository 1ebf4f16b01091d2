"""Training runs and attempts: what asking for a run means, fencing, endings, and the events of each node.

A run's state is the fold of its own events (those without a node); the attempt's row is a cache, moved by epoch.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, get_args

import sqlalchemy as sa

from headway.artifacts.digests import Json
from headway.catalog import budgets
from headway.catalog.commands import Document, Step, dump, load
from headway.catalog.datasets import read_version
from headway.catalog.encoding import encode
from headway.catalog.errors import (
    AttemptsSpent,
    BudgetExhausted,
    BudgetMissing,
    EventGap,
    InputNotReleased,
    InvalidFact,
    Nondeterminism,
    RunCancelled,
    RunRefused,
    StaleAttempt,
    UnknownAttempt,
    UnknownRun,
)
from headway.catalog.facts import (
    blob_documents,
    check_count,
    check_name,
    check_text,
    check_time,
    run_node,
    snapshot_node,
)
from headway.catalog.lineage import keep_blobs, link
from headway.catalog.run_documents import attempt_of_row, event_of_row, result_of_row, run_of_row
from headway.catalog.run_facts import (
    FINAL_STATES,
    OPEN_STATES,
    Asker,
    Attempt,
    Checkpoint,
    FinalState,
    Retry,
    RunEvent,
    RunFacts,
    RunResult,
    Submission,
    TrainingRun,
    check_json,
)
from headway.catalog.snapshots import read_snapshot
from headway.catalog.tables import checkpoint, run_attempt, run_event, run_result, training_run

_MANY = 500


@dataclass(frozen=True)
class Ask:
    """How a run is asked for: by whom, whether in spite of an earlier failure, at what price, run by what.

    `layout` is that of a new attempt; None: the run's own.
    """

    asker: Asker
    retry: bool
    reserve_seconds: int
    launcher: str
    layout: Mapping[str, Json] | None = None

    def __post_init__(self) -> None:
        if self.asker not in ("person", "machine"):
            raise InvalidFact("asker", self.asker, "person or machine")
        check_count("reserve_seconds", self.reserve_seconds)
        check_name("launcher", self.launcher)
        check_json("layout", self.layout)


@dataclass(frozen=True)
class Ending:
    """How an attempt ended, as observed. Only a success has a result, with at least one artifact.

    `reason_code` and `retry` come together, from the launcher's table of reasons, or not at all.
    """

    state: FinalState
    reason: str | None
    code: int | None
    worker_seconds: float
    result: RunResult | None
    reason_code: str | None = None
    retry: Retry | None = None

    def __post_init__(self) -> None:
        if self.state not in FINAL_STATES:
            raise InvalidFact("state", self.state, f"one of {', '.join(FINAL_STATES)}")
        check_text("reason", self.reason)
        if self.code is not None and (isinstance(self.code, bool) or not isinstance(self.code, int)):
            raise InvalidFact("code", self.code, "an exit code, or None when nobody saw one")
        if not math.isfinite(self.worker_seconds) or self.worker_seconds < 0:
            raise InvalidFact("worker_seconds", self.worker_seconds, "finite seconds, 0 or more")
        if (self.state == "succeeded") != (self.result is not None):
            raise InvalidFact("result", self.result, "the result of a success, and of nothing else")
        if (self.reason_code is None) != (self.retry is None) or self.retry not in (None, *get_args(Retry)):
            raise InvalidFact("retry", self.retry, "free, counted or never, together with a reason code")
        if self.result is not None and not self.result.artifacts:
            raise InvalidFact("result.artifacts", {}, "at least one artifact: a success without one has made nothing")


def aggregate(run_id: str) -> str:
    """Return the aggregate of a run."""
    return f"run:{run_id}"


def submit(step: Step, facts: RunFacts, ask: Ask) -> Document:
    """Answer an ask for the run of these facts: start it, adopt what is open, or say that it is done."""
    run_id = facts.run_id(step.tenant)
    run = find_run(step.connection, step.tenant, run_id)
    if run is None:
        _check_inputs(step, facts)
        _insert_run(step, facts, run_id)
        return _started(step, facts, run_id, 1, ask)
    return _asked_again(step, run, ask, facts.max_attempts)


def restart(step: Step, run_id: str, reserve_seconds: int, layout: Mapping[str, Json] | None) -> Document:
    """Answer the reconciler's ask for another attempt of a run, under the rules of a machine."""
    run = read_run(step.connection, step.tenant, run_id)
    ask = Ask("machine", False, reserve_seconds, run.last.launcher, layout)
    return _asked_again(step, run, ask, run.facts.max_attempts)


def own_seq(connection: sa.Connection, tenant: str, run_id: str) -> int:
    """Return the number of the run's last event of its own (no node's); 0 when there is none."""
    statement = sa.select(sa.func.coalesce(sa.func.max(run_event.c.seq), 0))
    return connection.execute(statement.where(*_events(tenant, run_id), run_event.c.node.is_(None))).scalar_one()


def last_attempt(connection: sa.Connection, tenant: str, run_id: str) -> int:
    """Return the number of the run's newest attempt; 0 when there is none."""
    statement = sa.select(sa.func.coalesce(sa.func.max(run_attempt.c.attempt), 0))
    mine = (run_attempt.c.tenant_id == tenant, run_attempt.c.run_id == run_id)
    return connection.execute(statement.where(*mine)).scalar_one()


def mark_running(step: Step, run_id: str, number: int, token: int) -> Document:
    """Record that an attempt's processes were seen."""
    attempt = _fenced(step, run_id, number, token)
    if attempt.state != "running":
        _to_running(step, run_id, number)
    return encode(_attempt(step.connection, step.tenant, run_id, number))


def note_waiting(step: Step, run_id: str, number: int, token: int, code: str, message: str) -> Document:
    """Record why an open attempt does not run yet, or not any more; the same words again change nothing."""
    attempt = _fenced(step, run_id, number, token)
    words = f"{code}: {message}"
    if attempt.waiting != words:
        _move(step, run_id, number, waiting=words)
        _append(step, run_id, number, "attempt.waiting", {"code": code, "message": message})
    return encode(_attempt(step.connection, step.tenant, run_id, number))


def beat(connection: sa.Connection, tenant: str, run_id: str, number: int, token: int, at: int) -> None:
    """Note that an open attempt was seen alive at `at`; an older sight changes nothing."""
    check_time("at", at)
    seen = sa.func.coalesce(run_attempt.c.heartbeat_at, at)
    later = sa.case((seen < at, at), else_=seen)
    updated = connection.execute(
        sa.update(run_attempt)
        .where(*_one(tenant, run_id, number), run_attempt.c.fencing_token == token, _is_open())
        .values(heartbeat_at=later)
        .returning(run_attempt.c.attempt)
    ).first()
    if updated is None:
        _refuse_stale(_attempt(connection, tenant, run_id, number), token)


def finish(
    step: Step,
    run_id: str,
    number: int,
    token: int,
    ending: Ending,
    restart: bool,
    next_layout: Mapping[str, Json] | None,
) -> Document:
    """Record an attempt's end with its result, settle its budget, and start the next attempt if that is due.

    The same end again changes nothing.
    """
    attempt = _attempt(step.connection, step.tenant, run_id, number)
    if attempt.token != token or not attempt.is_open:
        if attempt.token == token and _same_end(step, attempt, ending):
            return encode(read_run(step.connection, step.tenant, run_id))
        _refuse_stale(attempt, token)
    if ending.state == "succeeded" and attempt.state != "running":
        _to_running(step, run_id, number)
    _move(
        step,
        run_id,
        number,
        state=ending.state,
        reason=ending.reason,
        code=ending.code,
        worker_seconds=ending.worker_seconds,
        reason_code=ending.reason_code,
        retry=ending.retry,
        waiting=None,
        ended_at=step.now,
    )
    end = {"state": ending.state, "reason": ending.reason, "code": ending.code, "worker_seconds": ending.worker_seconds}
    if ending.reason_code is not None:
        end |= {"reason_code": ending.reason_code, "retry": ending.retry}
    _append(step, run_id, number, "attempt.finished", end)
    _settle(step, attempt, ending.worker_seconds)
    if ending.result is not None:
        _insert_result(step, run_id, number, ending.result)
    if restart and ending.state in ("failed", "lost"):
        _start_next(step, run_id, number, next_layout)
    return encode(read_run(step.connection, step.tenant, run_id))


def _start_next(step: Step, run_id: str, number: int, layout: Mapping[str, Json] | None) -> None:
    """Start the attempt that follows one which infrastructure ended; it reserves what that one did.

    Where a rule forbids it the run stays as it ended, and `restart` answers with the rule.
    """
    run = read_run(step.connection, step.tenant, run_id)
    mine = (run_attempt.c.tenant_id == step.tenant, run_attempt.c.run_id == run_id, run_attempt.c.attempt == number)
    reserved = step.connection.execute(sa.select(run_attempt.c.reserved).where(*mine)).scalar_one()
    ask = Ask("machine", False, reserved, run.last.launcher, layout)
    with suppress(AttemptsSpent, BudgetExhausted, BudgetMissing, RunCancelled, RunRefused):
        _asked_again(step, run, ask, run.facts.max_attempts)


def request_cancel(step: Step, run_id: str, reason: str) -> Document:
    """Note that somebody wants the run to stop: an open attempt, or the next one that a machine would start."""
    run = read_run(step.connection, step.tenant, run_id)
    last = run.last
    if last.cancel_reason is None and (last.is_open or (last.state in ("failed", "lost") and not last.failed_by_code)):
        _update(step, run_id, last.attempt, cancel_reason=reason)
        _append(step, run_id, last.attempt, "cancel.requested", {"reason": reason})
    return encode(read_run(step.connection, step.tenant, run_id))


def record_checkpoint(step: Step, made: Checkpoint, token: int) -> Document:
    """Keep a complete checkpoint of an open attempt."""
    _fenced(step, made.run_id, made.attempt, token)
    new = step.insert_once(
        checkpoint,
        run_id=made.run_id,
        attempt=made.attempt,
        step=made.step,
        manifest_digest=made.manifest_digest,
        world_layout=dump(made.layout),
        created_at=step.now,
    )
    stored = next(
        item
        for item in read_checkpoints(step.connection, step.tenant, made.run_id)
        if (item.attempt, item.step) == (made.attempt, made.step)
    )
    if not new and stored.manifest_digest != made.manifest_digest:
        subject = f"checkpoint of run {made.run_id} attempt {made.attempt} step {made.step}"
        raise Nondeterminism(subject, "manifest_digest", stored.manifest_digest, made.manifest_digest)
    return encode(stored)


def append_events(
    connection: sa.Connection,
    tenant: str,
    actor: str,
    stream: tuple[str, int, int],
    first_seq: int,
    events: Sequence[Mapping[str, Json]],
) -> int:
    """Store what is new of a node's events, whose run the caller has locked; return the number expected next."""
    run_id, number, node = stream
    _attempt(connection, tenant, run_id, number)
    cursor = event_cursor(connection, tenant, run_id, number, node)
    if first_seq > cursor + 1:
        raise EventGap(run_id, number, node, cursor + 1, first_seq)
    fresh = list(enumerate(events, first_seq))[cursor + 1 - first_seq :]
    if fresh:
        newest = sa.select(sa.func.coalesce(sa.func.max(run_event.c.seq), 0)).where(*_events(tenant, run_id))
        shift = connection.execute(newest).scalar_one() + 1 - fresh[0][0]
        rows = [
            {
                "tenant_id": tenant,
                "run_id": run_id,
                "seq": shift + seq,
                "attempt": number,
                "kind": event["kind"],
                "payload": dump(event["data"]),
                "command_key": f"events:{number}/{node}",
                "actor": actor,
                "at": event["at"],
                "node": node,
                "node_seq": seq,
            }
            for seq, event in fresh
        ]
        connection.execute(sa.insert(run_event), rows)
    return max(cursor, first_seq + len(events) - 1) + 1


def check_events(first_seq: int, events: Sequence[Mapping[str, Json]]) -> None:
    """Refuse events that no stream can hold, before anything is stored.

    Raises:
        InvalidFact: a number below 1, an event without kind, data or time, or one whose own number contradicts its
            place.
    """
    check_count("first_seq", first_seq)
    if first_seq < 1:
        raise InvalidFact("first_seq", first_seq, "1 or more")
    for seq, event in enumerate(events, first_seq):
        kind, data, at = event.get("kind"), event.get("data"), event.get("at")
        if not isinstance(kind, str) or not isinstance(data, Mapping) or not isinstance(at, int):
            raise InvalidFact(f"events[{seq}]", dict(event), '{"kind": text, "data": object, "at": microseconds}')
        check_name(f"events[{seq}].kind", kind)
        check_json(f"events[{seq}].data", data)
        check_time(f"events[{seq}].at", at)
        if event.get("seq", seq) != seq:
            raise InvalidFact(f"events[{seq}].seq", event["seq"], f"{seq}, which its place gives it")


def event_cursor(connection: sa.Connection, tenant: str, run_id: str, number: int, node: int) -> int:
    """Return the number of the last stored event of a node's stream; 0 when there is none."""
    statement = sa.select(sa.func.coalesce(sa.func.max(run_event.c.node_seq), 0))
    mine = (*_events(tenant, run_id), run_event.c.attempt == number, run_event.c.node == node)
    return connection.execute(statement.where(*mine)).scalar_one()


def read_events(
    connection: sa.Connection,
    tenant: str,
    run_id: str,
    number: int | None,
    after: int,
    limit: int,
    kinds: Sequence[str] | None,
) -> list[RunEvent]:
    """Return a run's events after one, in order: of one attempt or all, of some kinds or all."""
    statement = sa.select(run_event).where(*_events(tenant, run_id), run_event.c.seq > after)
    if number is not None:
        statement = statement.where(run_event.c.attempt == number)
    if kinds is not None:
        statement = statement.where(run_event.c.kind.in_(list(kinds)))
    rows = connection.execute(statement.order_by(run_event.c.seq).limit(limit))
    return [event_of_row(row) for row in rows]


def read_checkpoints(connection: sa.Connection, tenant: str, run_id: str) -> list[Checkpoint]:
    """Return the checkpoints of a run in order of attempt and step."""
    columns = checkpoint.c
    statement = sa.select(checkpoint).where(columns.tenant_id == tenant, columns.run_id == run_id)
    rows = connection.execute(statement.order_by(columns.attempt, columns.step))
    return [checkpoint_of_row(row) for row in rows]


def checkpoint_of_row(row: "sa.Row[Any]") -> Checkpoint:
    """Return the checkpoint of a `checkpoint` row."""
    layout: Any = load(row.world_layout)
    return Checkpoint(row.run_id, row.attempt, row.step, row.manifest_digest, layout, row.created_at)


def find_run(connection: sa.Connection, tenant: str, run_id: str) -> TrainingRun | None:
    """Return a run with its attempts and result, None when there is none."""
    rows = connection.execute(
        sa.select(training_run).where(training_run.c.tenant_id == tenant, training_run.c.run_id == run_id)
    ).all()
    found = _with_attempts(connection, tenant, rows)
    return found[0] if found else None


def read_run(connection: sa.Connection, tenant: str, run_id: str) -> TrainingRun:
    """Return a run with its attempts and result.

    Raises:
        UnknownRun: there is no such run.
    """
    found = find_run(connection, tenant, run_id)
    if found is None:
        raise UnknownRun(run_id)
    return found


def read_runs(
    connection: sa.Connection, tenant: str, pipeline: str | None, partition: str | None, limit: int
) -> list[TrainingRun]:
    """Return runs, the newest first."""
    columns = training_run.c
    statement = sa.select(training_run).where(columns.tenant_id == tenant)
    if pipeline is not None:
        statement = statement.where(columns.pipeline == pipeline)
    if partition is not None:
        statement = statement.where(columns.partition == partition)
    rows = connection.execute(statement.order_by(columns.created_at.desc(), columns.run_id).limit(limit)).all()
    return _with_attempts(connection, tenant, rows)


def read_ids(connection: sa.Connection, tenant: str, prefix: str) -> list[str]:
    """Return the run ids that begin with a text, in order."""
    column = training_run.c.run_id
    mine = (training_run.c.tenant_id == tenant, column.startswith(prefix, autoescape=True))
    return list(connection.execute(sa.select(column).where(*mine).order_by(column)).scalars())


def read_open(connection: sa.Connection, tenant: str) -> list[Attempt]:
    """Return the attempts whose end was not observed, the oldest first."""
    statement = sa.select(run_attempt).where(run_attempt.c.tenant_id == tenant, _is_open())
    rows = connection.execute(statement.order_by(run_attempt.c.created_at, run_attempt.c.run_id))
    return [attempt_of_row(row) for row in rows]


def _asked_again(step: Step, run: TrainingRun, ask: Ask, max_attempts: int) -> Document:
    if run.last.is_open:
        return encode(Submission("adopted", run, run.last))
    if run.status == "succeeded":
        return encode(Submission("up_to_date", run, None))
    _check_again(run, ask, max_attempts)
    return _started(step, run.facts, run.run_id, run.last.attempt + 1, ask)


def _check_again(run: TrainingRun, ask: Ask, max_attempts: int) -> None:
    last = run.last
    # Even with retry: a retry policy repeats the whole launch, that word included.
    if run.status == "cancelled" and ask.asker == "machine":
        raise RunCancelled(run.run_id, last.cancel_reason or last.reason)
    if ask.retry:
        return
    if last.failed_by_code:
        raise RunRefused(run.run_id, last.attempt, last.code, last.reason)
    spent = sum(attempt.counts for attempt in run.attempts)
    if run.status != "cancelled" and spent >= max_attempts:
        raise AttemptsSpent(run.run_id, spent, max_attempts, last.reason)


def _started(step: Step, facts: RunFacts, run_id: str, number: int, ask: Ask) -> Document:
    name = f"run-{run_id}-{number}"
    period = None if facts.budget_id is None else budgets.reserve(step, facts.budget_id, name, ask.reserve_seconds)
    step.insert(
        run_attempt,
        run_id=run_id,
        attempt=number,
        fencing_token=number,
        layout=dump(facts.layout if ask.layout is None else ask.layout),
        launcher=ask.launcher,
        external_name=name,
        state="admitted",
        reason=None,
        created_at=step.now,
        started_at=None,
        heartbeat_at=None,
        ended_at=None,
        epoch=1,
        reserved=0 if period is None else ask.reserve_seconds,
        code=None,
        worker_seconds=None,
        cancel_reason=None,
        budget_id=facts.budget_id,
        budget_period=period,
    )
    _append(step, run_id, number, "attempt.created", {"state": "admitted", "token": number, "launcher": ask.launcher})
    run = read_run(step.connection, step.tenant, run_id)
    return encode(Submission("started", run, run.last))


def _check_inputs(step: Step, facts: RunFacts) -> None:
    for snapshot_id in facts.inputs:
        read_snapshot(step.connection, step.tenant, snapshot_id)
    for dataset, number, content in facts.datasets:
        found = read_version(step.connection, step.tenant, dataset, number)
        if found.content_digest != content:
            why = f"its content is {found.content_digest}, the run pins {content}"
            raise InputNotReleased(dataset, found.partition, number, found.status, why)


def _insert_run(step: Step, facts: RunFacts, run_id: str) -> None:
    plain = encode(facts)
    step.insert(
        training_run,
        **plain
        | {
            "run_id": run_id,
            "identity_digest": facts.identity_digest(step.tenant),
            "snapshot_id": None,
            "code_dirty": int(facts.code_dirty),
            "blobs": dump(blob_documents(facts.blobs)),
            "created_at": step.now,
            "created_by": step.principal.actor,
        }
        | {name: dump(plain[name]) for name in ("inputs", "datasets", "layout")},
    )
    node = run_node(run_id)
    keep_blobs(step, facts.blobs, "training_run", node)
    for snapshot_id in facts.inputs:
        link(step, node, snapshot_node(snapshot_id), "input")


def _insert_result(step: Step, run_id: str, number: int, result: RunResult) -> None:
    step.insert(
        run_result,
        run_id=run_id,
        attempt=number,
        artifacts=dump(result.artifacts),
        metrics=dump(result.metrics),
        best_step=result.best_step,
        blobs=dump(blob_documents(result.blobs)),
        at=step.now,
    )
    keep_blobs(step, result.blobs, "training_run", run_node(run_id))


def _settle(step: Step, attempt: Attempt, observed: float) -> None:
    columns = (run_attempt.c.budget_id, run_attempt.c.budget_period, run_attempt.c.reserved)
    mine = _one(step.tenant, attempt.run_id, attempt.attempt)
    row = step.connection.execute(sa.select(*columns).where(*mine)).one()
    if row.budget_id is not None and row.budget_period is not None:
        budgets.settle(step, row.budget_id, row.budget_period, attempt.external_name, row.reserved, observed)


def _same_end(step: Step, attempt: Attempt, ending: Ending) -> bool:
    stored = (attempt.state, attempt.reason, attempt.code, attempt.worker_seconds, attempt.reason_code, attempt.retry)
    result = read_run(step.connection, step.tenant, attempt.run_id).result if ending.result is not None else None
    told = (ending.state, ending.reason, ending.code, ending.worker_seconds, ending.reason_code, ending.retry)
    return stored == told and result == ending.result


def _fenced(step: Step, run_id: str, number: int, token: int) -> Attempt:
    attempt = _attempt(step.connection, step.tenant, run_id, number)
    if attempt.token != token or not attempt.is_open:
        _refuse_stale(attempt, token)
    return attempt


def _refuse_stale(attempt: Attempt, token: int) -> NoReturn:
    why = f"token {token} is not its token {attempt.token}" if attempt.token != token else f"it is {attempt.state}"
    raise StaleAttempt(attempt.run_id, attempt.attempt, why)


def _to_running(step: Step, run_id: str, number: int) -> None:
    _move(step, run_id, number, state="running", started_at=step.now, waiting=None)
    _append(step, run_id, number, "attempt.running", {"state": "running"})


def _move(step: Step, run_id: str, number: int, **values: object) -> None:
    # The lock on the run excludes rivals; the condition keeps a terminal state terminal whatever happens to the lock.
    moved = step.connection.execute(
        sa.update(run_attempt)
        .where(*_one(step.tenant, run_id, number), _is_open())
        .values(epoch=run_attempt.c.epoch + 1, **values)
        .returning(run_attempt.c.epoch)
    ).first()
    if moved is None:
        raise StaleAttempt(run_id, number, "it ended meanwhile")


def _update(step: Step, run_id: str, number: int, **values: object) -> None:
    statement = sa.update(run_attempt).where(*_one(step.tenant, run_id, number))
    step.connection.execute(statement.values(epoch=run_attempt.c.epoch + 1, **values))


def _append(step: Step, run_id: str, number: int, kind: str, data: Mapping[str, Json]) -> None:
    newest = sa.select(sa.func.coalesce(sa.func.max(run_event.c.seq), 0)).where(*_events(step.tenant, run_id))
    step.insert(
        run_event,
        run_id=run_id,
        seq=step.connection.execute(newest).scalar_one() + 1,
        attempt=number,
        kind=kind,
        payload=dump(data),
        command_key=step.key,
        actor=step.principal.actor,
        at=step.now,
        node=None,
        node_seq=None,
    )


def _attempt(connection: sa.Connection, tenant: str, run_id: str, number: int) -> Attempt:
    row = connection.execute(sa.select(run_attempt).where(*_one(tenant, run_id, number))).first()
    if row is None:
        read_run(connection, tenant, run_id)
        raise UnknownAttempt(run_id, number)
    return attempt_of_row(row)


def _with_attempts(connection: sa.Connection, tenant: str, rows: "Sequence[sa.Row[Any]]") -> list[TrainingRun]:
    attempts: dict[str, list[Attempt]] = defaultdict(list)
    results: dict[str, RunResult] = {}
    for start in range(0, len(rows), _MANY):
        ids = [row.run_id for row in rows[start : start + _MANY]]
        mine = (run_attempt.c.tenant_id == tenant, run_attempt.c.run_id.in_(ids))
        for row in connection.execute(sa.select(run_attempt).where(*mine).order_by(run_attempt.c.attempt)):
            attempts[row.run_id].append(attempt_of_row(row))
        theirs = (run_result.c.tenant_id == tenant, run_result.c.run_id.in_(ids))
        for row in connection.execute(sa.select(run_result).where(*theirs)):
            results[row.run_id] = result_of_row(row)
    return [run_of_row(row, attempts[row.run_id], results.get(row.run_id)) for row in rows]


def _events(tenant: str, run_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (run_event.c.tenant_id == tenant, run_event.c.run_id == run_id)


def _one(tenant: str, run_id: str, number: int) -> tuple[sa.ColumnElement[bool], ...]:
    return (run_attempt.c.tenant_id == tenant, run_attempt.c.run_id == run_id, run_attempt.c.attempt == number)


def _is_open() -> sa.ColumnElement[bool]:
    return run_attempt.c.state.in_(OPEN_STATES)
