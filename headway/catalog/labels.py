"""Labels: what became known about answers. Attached once to the answer that they address, or waiting in the inbox.

An address is resolved among the endpoint's predictions: to the one that has it. Two with the same caller's id, or about
the same event, make it ambiguous; a label that is attached stays where it is when a second one comes later.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import sqlalchemy as sa

from headway.artifacts.digests import canonical_json
from headway.catalog.commands import Document, Step, chunks, dump
from headway.catalog.encoding import encode
from headway.catalog.endpoints import read as read_endpoint
from headway.catalog.monitoring_documents import label_facts_of_row
from headway.catalog.monitoring_facts import Label, LabelFacts, LabelOutcome, current_of
from headway.catalog.registry_facts import PredictionFacts
from headway.catalog.tables import label, label_inbox, prediction

AddressKind: TypeAlias = Literal["prediction_id", "caller_id", "event_key"]
Waiting: TypeAlias = Literal["no_prediction", "ambiguous"]

KINDS: tuple[AddressKind, ...] = ("prediction_id", "caller_id", "event_key")


def add(step: Step, endpoint_id: str, labels: Sequence[LabelFacts]) -> Document:
    """Keep each label once: attached, or in the inbox while no one answer has its address."""
    read_endpoint(step.connection, step.tenant, endpoint_id)
    stored = read_stored(step.connection, step.tenant, [item.label_id for item in labels])
    candidates = _resolve_all(step, endpoint_id, labels)
    outcomes: list[LabelOutcome] = []
    attached: list[dict[str, object]] = []
    waiting: list[dict[str, object]] = []
    for facts in labels:
        known = stored.get(facts.label_id)
        if known is not None:
            outcomes.append(_seen_before(known, facts))
            continue
        kind, address = address_of(facts)
        found = candidates[kind].get(address, ())
        if kind == "caller_id" and len(found) > 1:
            outcomes.append(LabelOutcome(facts.label_id, "refused", "ambiguous", None, found))
            continue
        if len(found) == 1:
            attached.append(_row(step, facts) | {"prediction_id": found[0], "command_key": step.key})
            outcomes.append(LabelOutcome(facts.label_id, "accepted", "", found[0], ()))
        else:
            why = _why(found)
            waiting.append(_row(step, facts) | {"waiting_for": why, "state": "waiting", "epoch": 1})
            outcomes.append(LabelOutcome(facts.label_id, "waiting", why, None, found))
        stored[facts.label_id] = Label(facts, outcomes[-1].prediction_id, False, outcomes[-1].reason)
    step.insert_many(label, attached)
    step.insert_many(label_inbox, waiting)
    return {"outcomes": [encode(item) for item in _with_standing(step, outcomes)]}


def attach_waiting(step: Step, endpoint_id: str, new: Iterable[PredictionFacts]) -> None:
    """Attach the labels that waited for predictions which are recorded now, or say that their address is ambiguous."""
    inbox = label_inbox.c
    mine = (inbox.tenant_id == step.tenant, inbox.endpoint_id == endpoint_id, inbox.state == "waiting")
    if step.connection.execute(sa.select(inbox.label_id).where(*mine).limit(1)).first() is None:
        return
    for kind in KINDS:
        addresses = sorted({value for item in new if (value := getattr(item, kind)) is not None})
        rows = [
            row
            for chunk in chunks(addresses)
            for row in step.connection.execute(
                sa.select(label_inbox).where(*mine, inbox.address_kind == kind, inbox.address.in_(chunk))
            )
        ]
        found = resolve(step.connection, step.tenant, endpoint_id, kind, sorted({row.address for row in rows}))
        _settle(step, rows, found)


def resolve(
    connection: sa.Connection, tenant: str, endpoint_id: str, kind: AddressKind, addresses: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return which of the endpoint's predictions have each address, by address, in order of id."""
    columns = prediction.c
    found: dict[str, list[str]] = defaultdict(list)
    for chunk in chunks(addresses):
        mine = (columns.tenant_id == tenant, columns.endpoint_id == endpoint_id, columns[kind].in_(chunk))
        statement = sa.select(columns[kind].label("address"), columns.prediction_id).where(*mine)
        for row in connection.execute(statement.order_by(columns.prediction_id)):
            found[row.address].append(row.prediction_id)
    return {address: tuple(ids) for address, ids in found.items()}


def address_of(facts: LabelFacts) -> tuple[AddressKind, str]:
    """Return how a label addresses its answer, and the address."""
    return next((kind, value) for kind in KINDS if (value := getattr(facts, kind)) is not None)


def content_of(facts: LabelFacts) -> bytes:
    """Return what a label says, without when it came; as JSON, since to Python the values true and 1 are equal."""
    return canonical_json({name: value for name, value in encode(facts).items() if name != "received_at"})


def read_attached(connection: sa.Connection, tenant: str, prediction_ids: Sequence[str]) -> dict[str, list[Label]]:
    """Return the labels of predictions by id, each list with its current one first, then by falling order."""
    rows: list[Any] = []
    for chunk in chunks(prediction_ids):
        mine = (label.c.tenant_id == tenant, label.c.prediction_id.in_(chunk))
        rows += connection.execute(sa.select(label).where(*mine))
    return _grouped(rows)


def read_stored(connection: sa.Connection, tenant: str, label_ids: Sequence[str]) -> dict[str, Label]:
    """Return the labels that there are among those asked for, attached or waiting, by id; none is told current."""
    found: dict[str, Label] = {}
    for chunk in chunks(label_ids):
        inbox = (label_inbox.c.tenant_id == tenant, label_inbox.c.label_id.in_(chunk))
        for row in connection.execute(sa.select(label_inbox).where(*inbox)):
            found[row.label_id] = Label(label_facts_of_row(row), None, False, row.waiting_for)
        attached = (label.c.tenant_id == tenant, label.c.label_id.in_(chunk))
        for row in connection.execute(sa.select(label).where(*attached)):
            found[row.label_id] = Label(label_facts_of_row(row), row.prediction_id, False, "")
    return found


def read_between(
    connection: sa.Connection, tenant: str, endpoint_id: str, start: int, end: int
) -> list[tuple[str, Label]]:
    """Return the labels of predictions asked in [start, end), by prediction, the current one of each first."""
    asked = prediction.c
    same = sa.and_(asked.tenant_id == label.c.tenant_id, asked.prediction_id == label.c.prediction_id)
    mine = (asked.tenant_id == tenant, asked.endpoint_id == endpoint_id, asked.asked_at >= start, asked.asked_at < end)
    rows = connection.execute(sa.select(label).select_from(label).join(prediction, same).where(*mine))
    grouped = _grouped(rows)
    return [(prediction_id, item) for prediction_id in sorted(grouped) for item in grouped[prediction_id]]


def read_inbox(connection: sa.Connection, tenant: str, endpoint_id: str) -> list[Label]:
    """Return the labels of an endpoint that wait, in order of arrival and id."""
    columns = label_inbox.c
    mine = (columns.tenant_id == tenant, columns.endpoint_id == endpoint_id, columns.state == "waiting")
    statement = sa.select(label_inbox).where(*mine).order_by(columns.received_at, columns.label_id)
    return [Label(label_facts_of_row(row), None, False, row.waiting_for) for row in connection.execute(statement)]


def _grouped(rows: Iterable[Any]) -> dict[str, list[Label]]:
    facts: dict[str, list[LabelFacts]] = defaultdict(list)
    for row in rows:
        facts[row.prediction_id].append(label_facts_of_row(row))
    return {prediction_id: _ranked(prediction_id, own) for prediction_id, own in facts.items()}


def _ranked(prediction_id: str, own: list[LabelFacts]) -> list[Label]:
    current = current_of(own)
    ranked = sorted(own, key=lambda facts: facts.order, reverse=True)
    return [Label(facts, prediction_id, facts is current, "") for facts in ranked]


def _resolve_all(
    step: Step, endpoint_id: str, labels: Sequence[LabelFacts]
) -> Mapping[AddressKind, Mapping[str, tuple[str, ...]]]:
    asked: dict[AddressKind, set[str]] = {kind: set() for kind in KINDS}
    for facts in labels:
        kind, address = address_of(facts)
        asked[kind].add(address)
    return {
        kind: resolve(step.connection, step.tenant, endpoint_id, kind, sorted(addresses))
        for kind, addresses in asked.items()
    }


def _seen_before(known: Label, given: LabelFacts) -> LabelOutcome:
    if content_of(known.facts) != content_of(given):
        return LabelOutcome(given.label_id, "refused", "conflict", known.prediction_id, ())
    reason = "waiting" if known.prediction_id is None else "accepted"
    return LabelOutcome(given.label_id, "duplicate", reason, known.prediction_id, ())


def _with_standing(step: Step, outcomes: list[LabelOutcome]) -> list[LabelOutcome]:
    touched = sorted({item.prediction_id for item in outcomes if item.prediction_id is not None})
    attached = read_attached(step.connection, step.tenant, touched)
    current = {labels[0].label_id for labels in attached.values()}
    return [_standing(item, item.label_id in current) for item in outcomes]


def _standing(outcome: LabelOutcome, is_current: bool) -> LabelOutcome:
    if is_current or outcome.prediction_id is None or outcome.status == "refused":
        return outcome
    if outcome.status == "duplicate":
        return LabelOutcome(outcome.label_id, "duplicate", "superseded", outcome.prediction_id, ())
    return LabelOutcome(outcome.label_id, "superseded", "another label is current", outcome.prediction_id, ())


def _settle(step: Step, rows: list[Any], found: Mapping[str, tuple[str, ...]]) -> None:
    attached = [row for row in rows if len(found[row.address]) == 1]
    facts = [
        _row(step, label_facts_of_row(row))
        | {"prediction_id": found[row.address][0], "command_key": step.key, "at": row.at}
        for row in attached
    ]
    step.insert_many(label, facts)
    _move(step, attached, state="attached")
    ambiguous = [row for row in rows if len(found[row.address]) > 1 and row.waiting_for != "ambiguous"]
    _move(step, ambiguous, waiting_for="ambiguous")


def _move(step: Step, rows: list[Any], **values: str) -> None:
    inbox = label_inbox.c
    for chunk in chunks([row.label_id for row in rows]):
        mine = (inbox.tenant_id == step.tenant, inbox.label_id.in_(chunk), inbox.state == "waiting")
        step.connection.execute(sa.update(label_inbox).where(*mine).values(epoch=inbox.epoch + 1, **values))


def _why(found: tuple[str, ...]) -> Waiting:
    return "ambiguous" if found else "no_prediction"


def _row(step: Step, facts: LabelFacts) -> dict[str, object]:
    kind, address = address_of(facts)
    return {
        "label_id": facts.label_id,
        "endpoint_id": facts.endpoint_id,
        "address_kind": kind,
        "address": address,
        "value": dump(facts.value),
        "source": facts.source,
        "actor": facts.actor,
        "observed_at": facts.observed_at,
        "received_at": facts.received_at,
        "reason": facts.reason,
        "at": step.now,
    }
