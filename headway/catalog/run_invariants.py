"""The rules that runs, attempts, run events and budgets keep, each as a check that says what breaks it."""

from collections import defaultdict
from typing import Any, cast

import sqlalchemy as sa

from headway.catalog import tables
from headway.catalog.budgets import read as read_budget
from headway.catalog.budgets import read_entries
from headway.catalog.commands import load
from headway.catalog.facts import run_node, snapshot_node
from headway.catalog.monitoring_invariants import open_reservations
from headway.catalog.run_facts import FINAL_STATES, OPEN_STATES, Attempt, BudgetEntry, RunEvent, TrainingRun
from headway.catalog.runs import read_open, read_runs

_EVERY = 1 << 62
# What an attempt's own events may lead to; "" is before the first.
_STEPS: dict[str, frozenset[str]] = {
    "": frozenset({"queued", "admitted"}),
    "queued": frozenset({"admitted", "failed", "cancelled", "lost"}),
    "admitted": frozenset({"running", "failed", "cancelled", "lost"}),
    "running": frozenset(FINAL_STATES),
}


def every_run(connection: sa.Connection, tenant: str) -> list[TrainingRun]:
    """Return every run of the tenant."""
    return read_runs(connection, tenant, None, None, _EVERY)


def numbered_events(connection: sa.Connection, tenant: str) -> list[str]:
    """Say where events of a run, or of one node's stream, are not numbered 1..n."""
    columns = tables.run_event.c
    mine = sa.select(columns.run_id).where(columns.tenant_id == tenant)
    streams = (columns.run_id, columns.attempt, columns.node)
    whole = mine.add_columns(*_numbers(columns.seq)).group_by(columns.run_id)
    of_node = mine.with_only_columns(*streams, *_numbers(columns.node_seq)).group_by(*streams)
    broken: list[str] = []
    for statement in (whole, of_node.where(columns.node.is_not(None))):
        for row in connection.execute(statement):
            *subject, count, first, last = tuple(row)
            if (first, last) != (1, count):
                broken.append(f"run {' '.join(map(str, subject))}: {count} events are numbered {first}..{last}")
    return broken


def _numbers(column: "sa.Column[Any]") -> tuple[Any, ...]:
    return sa.func.count(), sa.func.min(column), sa.func.max(column)


def attempt_states(connection: sa.Connection, tenant: str, runs: list[TrainingRun]) -> list[str]:
    """Say which attempts are not the fold of their events, changed after their end, or overlap another."""
    own: dict[str, list[RunEvent]] = defaultdict(list)
    columns = tables.run_event.c
    statement = sa.select(tables.run_event).where(columns.tenant_id == tenant, columns.node.is_(None))
    for row in connection.execute(statement.order_by(columns.run_id, columns.seq)):
        data = cast("Any", load(row.payload))
        own[row.run_id].append(RunEvent(row.seq, row.attempt, None, None, row.kind, data, row.at))
    return [problem for run in runs for problem in _run_problems(run, own[run.run_id], tenant)]


def _run_problems(run: TrainingRun, events: list[RunEvent], tenant: str) -> list[str]:
    node = run_node(run.run_id)
    broken: list[str] = []
    if (run.identity_digest, run.run_id) != (run.facts.identity_digest(tenant), run.facts.run_id(tenant)):
        broken.append(f"{node}: its facts have identity {run.facts.identity_digest(tenant)}")
    numbers = [attempt.attempt for attempt in run.attempts]
    if numbers != list(range(1, len(numbers) + 1)):
        broken.append(f"{node}: attempts are numbered {numbers}")
    tokens = [attempt.token for attempt in run.attempts]
    if tokens != sorted(set(tokens)):
        broken.append(f"{node}: tokens {tokens} do not grow")
    ended_before = True
    for attempt in run.attempts:
        mine = [event for event in events if event.attempt == attempt.attempt]
        broken += [f"{node} attempt {attempt.attempt}: {problem}" for problem in _fold_problems(attempt, mine)]
        if not ended_before:
            broken.append(f"{node} attempt {attempt.attempt}: it began before the one before it ended in failure")
        ended_before = attempt.state in FINAL_STATES and attempt.state != "succeeded"
    succeeded = [attempt for attempt in run.attempts if attempt.state == "succeeded"]
    if len(succeeded) > 1 or bool(succeeded) != (run.result is not None):
        broken.append(f"{node}: {len(succeeded)} attempts succeeded, and it has {'a' if run.result else 'no'} result")
    if run.result is not None and not run.result.artifacts:
        broken.append(f"{node}: it succeeded without an artifact")
    return broken


def _fold_problems(attempt: Attempt, events: list[RunEvent]) -> list[str]:
    broken: list[str] = []
    state = ""
    waiting: str | None = None
    for event in events:
        if event.kind == "cancel.requested":
            continue
        if event.kind == "attempt.waiting":
            waiting = f"{event.data.get('code')}: {event.data.get('message')}"
            continue
        waiting = None
        to = str(event.data.get("state"))
        if to not in _STEPS.get(state, ()):
            broken.append(f"event {event.seq} goes {state or 'nowhere'} -> {to}")
        state = to
        if event.kind == "attempt.finished":
            names = ("reason", "code", "worker_seconds", "reason_code", "retry")
            told = tuple(event.data.get(name) for name in names)
            if told != tuple(getattr(attempt, name) for name in names):
                broken.append(f"its end was {told}, its row says otherwise")
    if attempt.waiting != waiting:
        broken.append(f"its row waits for {attempt.waiting}, its events for {waiting}")
    if attempt.state != state:
        broken.append(f"its row says {attempt.state}, its events say {state or 'nothing'}")
    if (attempt.cancel_reason is not None) != any(event.kind == "cancel.requested" for event in events):
        broken.append("its row and its events disagree about a request to stop")
    return broken


def budget_sums(connection: sa.Connection, tenant: str) -> list[str]:
    """Say which budgets gave away more than their limit, or moved twice for one owner.

    What an attempt used beyond its reservation is committed all the same, and is not held against the limit here.
    """
    broken: list[str] = []
    for budget_id, period, entries in _budgets(connection, tenant):
        state = read_budget(connection, tenant, budget_id, period)
        assert state is not None
        overrun = 0
        for owner, own in _by_owner(entries).items():
            kinds = sorted(entry.kind for entry in own)
            amount = {entry.kind: entry.amount for entry in own}
            if kinds not in (["reserve"], ["commit", "release", "reserve"]):
                broken.append(f"budget {budget_id} of {period}: {owner} has {', '.join(kinds)}")
            elif "release" in amount and amount["release"] != amount["reserve"]:
                broken.append(f"budget {budget_id} of {period}: {owner} gave back {amount['release']}")
            overrun += max(0, amount.get("commit", 0) - amount.get("reserve", 0))
        if state.reserved + state.committed - overrun > state.limit:
            sums = f"reserved {state.reserved} and spent {state.committed} of {state.limit}"
            broken.append(f"budget {budget_id} of {period}: {sums}")
    return broken


def reservations(connection: sa.Connection, tenant: str) -> list[str]:
    """Say which reservations outlive their owner, and which open attempts and requests hold none that they should."""
    held: dict[str, int] = {}
    for _, _, entries in _budgets(connection, tenant):
        for owner, own in _by_owner(entries).items():
            if not any(entry.kind == "release" for entry in own):
                held[owner] = sum(entry.amount for entry in own if entry.kind == "reserve")
    columns = tables.run_attempt.c
    charged = (columns.tenant_id == tenant, columns.budget_period.is_not(None), columns.state.in_(OPEN_STATES))
    rows = connection.execute(sa.select(columns.external_name, columns.reserved).where(*charged))
    requests = open_reservations(connection, tenant)
    wanted = {row.external_name: row.reserved for row in rows} | requests
    open_names = {attempt.external_name for attempt in read_open(connection, tenant)} | requests.keys()
    broken = [f"{name} holds {amount} and is over" for name, amount in sorted(held.items()) if name not in open_names]
    return broken + [
        f"{name} should hold {amount} and holds {held.get(name, 'nothing')}"
        for name, amount in sorted(wanted.items())
        if held.get(name) != amount
    ]


def wanted_edges(runs: list[TrainingRun]) -> set[tuple[str, str, str]]:
    """Return the lineage edges that runs must have."""
    return {(run.node, snapshot_node(snapshot_id), "input") for run in runs for snapshot_id in run.facts.inputs}


def wanted_blobs(runs: list[TrainingRun]) -> list[tuple[str, str, str]]:
    """Return (what needs it, kind of owner, digest) of every blob of runs and results; the owner is what needs it."""
    return [
        (run.node, "training_run", blob.digest)
        for run in runs
        for blob in (*run.facts.blobs, *(run.result.blobs if run.result is not None else ()))
    ]


def _budgets(connection: sa.Connection, tenant: str) -> list[tuple[str, str, list[BudgetEntry]]]:
    columns = tables.budget.c
    rows = connection.execute(sa.select(columns.budget_id, columns.period).where(columns.tenant_id == tenant)).all()
    return [(row.budget_id, row.period, read_entries(connection, tenant, row.budget_id, row.period)) for row in rows]


def _by_owner(entries: list[BudgetEntry]) -> dict[str, list[BudgetEntry]]:
    found: dict[str, list[BudgetEntry]] = defaultdict(list)
    for entry in entries:
        found[entry.owner_id].append(entry)
    return found
