"""The rules that shipped answers, labels, reports and retraining keep, each as a check that says what breaks it."""

from collections import defaultdict
from itertools import pairwise
from typing import Any

import sqlalchemy as sa

from headway.catalog import labels, tables
from headway.catalog.commands import load
from headway.catalog.documents import blobs_of
from headway.catalog.monitoring_documents import label_facts_of_row, retrain_request_of
from headway.catalog.monitoring_facts import CLOSED_STATES, FIRST_STATES, RETRAIN_MOVES, RetrainRequest
from headway.catalog.reports import OWNER
from headway.catalog.retraining import owner_of, read_all


def shipped_answers(connection: sa.Connection, tenant: str) -> list[str]:
    """Say which log segments have gaps or overlaps, or another number of answers than was shipped of them."""
    columns, answers = tables.inference_segment.c, tables.prediction.c
    counts: dict[tuple[str, str], int] = defaultdict(int)
    mine = (answers.tenant_id == tenant, answers.log_server.is_not(None))
    where = (answers.log_server, answers.log_segment)
    for row in connection.execute(sa.select(*where, sa.func.count().label("n")).where(*mine).group_by(*where)):
        counts[row.log_server, row.log_segment] = row.n
    shipped: dict[tuple[str, str], int] = defaultdict(int)
    reached: dict[tuple[str, str], int] = defaultdict(int)
    broken: list[str] = []
    order = (columns.server, columns.segment, columns.from_offset)
    for row in connection.execute(
        sa.select(tables.inference_segment).where(columns.tenant_id == tenant).order_by(*order)
    ):
        key = (row.server, row.segment)
        if row.from_offset != reached[key]:
            broken.append(f"segment {'/'.join(key)}: a range begins at {row.from_offset}, {reached[key]} was reached")
        reached[key] = row.to_offset
        shipped[key] += row.records
    return broken + [
        f"segment {'/'.join(key)}: {shipped[key]} answers were shipped, {counts[key]} are recorded"
        for key in sorted(shipped.keys() | counts)
        if shipped[key] != counts[key]
    ]


def attached_labels(connection: sa.Connection, tenant: str) -> list[str]:
    """Say which labels are attached to an answer that they do not address."""
    columns = tables.label.c
    answer = tables.prediction.c
    same = sa.and_(answer.tenant_id == columns.tenant_id, answer.prediction_id == columns.prediction_id)
    statement = (
        sa.select(tables.label, *(answer[name].label(f"of_{name}") for name in ("endpoint_id", *labels.KINDS)))
        .select_from(tables.label)
        .outerjoin(tables.prediction, same)
        .where(columns.tenant_id == tenant)
    )
    return [
        f"label {row.label_id}: {row.address_kind} {row.address!r} of endpoint {row.endpoint_id!r} is attached to "
        f"prediction {row.prediction_id}, which has another"
        for row in connection.execute(statement)
        if (row.endpoint_id, row.address) != (row.of_endpoint_id, getattr(row, f"of_{row.address_kind}"))
    ]


def label_inbox(connection: sa.Connection, tenant: str) -> list[str]:
    """Say which labels are in the inbox and attached at once, left it without being attached, or wait needlessly."""
    inbox, attached = tables.label_inbox, tables.label
    mine = (inbox.c.tenant_id == tenant,)
    facts = {
        row.label_id: label_facts_of_row(row)
        for row in connection.execute(
            sa.select(attached).where(attached.c.tenant_id == tenant, attached.c.label_id.in_(_ids(inbox, tenant)))
        )
    }
    broken: list[str] = []
    waiting: dict[tuple[str, labels.AddressKind], list[Any]] = defaultdict(list)
    for row in connection.execute(sa.select(inbox).where(*mine)):
        there = facts.get(row.label_id)
        if row.state == "waiting":
            waiting[row.endpoint_id, row.address_kind].append(row)
        if (row.state == "attached") != (there is not None):
            broken.append(f"label {row.label_id}: {row.state} in the inbox, {'' if there else 'not '}attached")
        elif there is not None and labels.content_of(there) != labels.content_of(label_facts_of_row(row)):
            broken.append(f"label {row.label_id}: attached with other content than it waited with")
    for (endpoint_id, kind), rows in waiting.items():
        found = labels.resolve(connection, tenant, endpoint_id, kind, sorted({row.address for row in rows}))
        broken += [
            f"label {row.label_id}: it waits, and prediction {found[row.address][0]} is there"
            for row in rows
            if len(found.get(row.address, ())) == 1
        ]
    return broken


def numbers(connection: sa.Connection, tenant: str) -> list[str]:
    """Say which reports of a kind, version and week, or decisions about a pipeline, are not numbered 1..n."""
    report, decision = tables.report.c, tables.retrain_decision.c
    broken: list[str] = []
    for what, own, names, number in (
        (
            "reports",
            report.tenant_id,
            (report.endpoint_id, report.kind, report.version, report.time_window),
            report.seq,
        ),
        ("decisions about pipeline", decision.tenant_id, (decision.pipeline,), decision.seq),
    ):
        counts = (sa.func.count(), sa.func.min(number), sa.func.max(number))
        for row in connection.execute(sa.select(*names, *counts).where(own == tenant).group_by(*names)):
            *subject, count, first, last = tuple(row)
            if (first, last) != (1, count):
                broken.append(f"{what} {' '.join(map(str, subject))}: {count} are numbered {first}..{last}")
    return broken


def retrain_requests(connection: sa.Connection, tenant: str) -> list[str]:
    """Say which requests are not the fold of their moves, and which pipelines have two open ones."""
    columns = tables.retrain_event.c
    moves: dict[str, list[RetrainRequest]] = defaultdict(list)
    statement = sa.select(columns.request_id, columns.row).where(columns.tenant_id == tenant)
    for row in connection.execute(statement.order_by(columns.request_id, columns.epoch)):
        moves[row.request_id].append(retrain_request_of(load(row.row)))
    broken: list[str] = []
    opened: dict[str, int] = defaultdict(int)
    for request in read_all(connection, tenant, None):
        opened[request.pipeline] += request.is_open
        name = f"retrain request {request.request_id}"
        broken += [f"{name}: {problem}" for problem in _fold_problems(request, moves[request.request_id], tenant)]
    return broken + [f"pipeline {name!r}: {n} retrain requests are open" for name, n in opened.items() if n > 1]


def open_reservations(connection: sa.Connection, tenant: str) -> dict[str, int]:
    """Return what open requests must hold, by the owner of their budget entries."""
    requests = read_all(connection, tenant, None)
    return {owner_of(item.request_id): item.facts.cost_seconds for item in requests if item.is_open}


def wanted_blobs(connection: sa.Connection, tenant: str) -> list[tuple[str, str, str]]:
    """Return (owner, kind of owner, digest) of every blob of reports."""
    columns = tables.report.c
    rows = connection.execute(sa.select(columns.report_id, columns.blobs).where(columns.tenant_id == tenant))
    return [(row.report_id, OWNER, blob.digest) for row in rows for blob in blobs_of(load(row.blobs))]


def _ids(inbox: sa.Table, tenant: str) -> "sa.Select[tuple[str]]":
    return sa.select(inbox.c.label_id).where(inbox.c.tenant_id == tenant)


def _fold_problems(request: RetrainRequest, moves: list[RetrainRequest], tenant: str) -> list[str]:
    broken: list[str] = []
    if request.facts.request_id(tenant) != request.request_id:
        broken.append(f"its cause is that of {request.facts.request_id(tenant)}")
    if not moves or [move.epoch for move in moves] != list(range(1, len(moves) + 1)):
        return [*broken, f"its moves have epochs {[move.epoch for move in moves]}"]
    if moves[0].state not in FIRST_STATES:
        broken.append(f"it was opened as {moves[0].state}")
    for before, after in pairwise(moves):
        if after.state not in RETRAIN_MOVES.get(before.state, frozenset()):
            broken.append(f"move {after.epoch} goes {before.state} -> {after.state}")
    if moves[-1] != request:
        broken.append(f"its row says {request.state}, its last move {moves[-1].state}, or other facts")
    if (request.state in CLOSED_STATES) != (request.closed_at is not None):
        broken.append(f"it is {request.state}, closed at {request.closed_at}")
    return broken
