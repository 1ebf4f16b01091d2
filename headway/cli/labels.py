"""`headway labels`: what became known about answers, by whom, and what still waits for its prediction."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headway.errors import HeadwayError
from headway.home import Settings
from headway.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headway.catalog.monitoring_facts import Label
    from headway.declaration import PipelineSpec
    from headway.loading import Pipeline
    from headway.services import Services

_LISTED = 20
_MAX_BYTES = 64 * 1024 * 1024


class LabelsUnreadable(HeadwayError):
    """A file of labels that is not there, too large, or in no known form."""


@click.group("labels")
def command() -> None:
    """Add labels and corrections, and look at them."""


@command.command("add")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--endpoint", "-e", help="Whose answers; none: the only endpoint there is.")
@click.option("--pipeline", "-p", "reference", help="Name under pipelines/, or a folder; none: the model's own.")
@click.option("--actor", help="A person's correction: who decided; it outranks what systems send.")
@click.option("--reason", help="A person's correction: why.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def add(
    settings: Settings,
    file: Path,
    endpoint: str | None,
    reference: str | None,
    actor: str | None,
    reason: str | None,
    as_json: bool,
) -> None:
    """Add the labels of FILE (.json, .csv, or - for JSON from standard input). Adding them again changes nothing.

    A label names its prediction by prediction_id, by id (the caller's own), or by match (the fields that name the
    event; match.<field> columns in CSV), and holds value, and optionally observed_at, source_id, actor and reason. The
    JSON form is a list of objects, or {"labels": [...]}.

    With --actor and --reason they are corrections by a person: kept beside what was there, and in force from now on.

    Exits 1 when a label was refused; the others are added all the same.
    """
    from headway.monitoring.labels import LabelDesk
    from headway.services import open_services

    if (actor is None) != (reason is None):
        raise click.UsageError("a person's correction needs --actor and --reason, both")
    name, data = _content(file)
    with open_services(settings) as services:
        found = _endpoint(services, endpoint, reference)
        desk = LabelDesk(services, _lookup(reference))
        items = _items(name, data, desk.pipeline(services.principal, found).spec)
        if actor is not None:
            by = {"source": "human", "actor": actor, "reason": reason}
            items = [{**by, **item} if isinstance(item, dict) else item for item in items]
        answers = desk.accept(services.principal, found, items)
    if as_json:
        click.echo(json.dumps({"endpoint": found, "labels": answers}, indent=2))
    else:
        _show_answers(found, answers)
    if any(answer["status"] == "refused" for answer in answers):
        sys.exit(1)


@command.command("list")
@click.option("--endpoint", "-e", help="Whose answers; none: the only endpoint there is.")
@click.option("--from", "first", metavar="TIME", help="Answers asked from then on; none: the last seven days.")
@click.option("--to", "last", metavar="TIME", help="Answers asked before then; none: now.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def list_(settings: Settings, endpoint: str | None, first: str | None, last: str | None, as_json: bool) -> None:
    """List the labels in force of answers asked in a time; times are ISO 8601, a day, or a time with its zone."""
    from headway.datasets.zones import DAY_US, iso
    from headway.replay.moments import moment_of
    from headway.services import open_services

    with open_services(settings) as services:
        found = _endpoint(services, endpoint, None)
        end = services.world() if last is None else moment_of(last)
        start = end - 7 * DAY_US if first is None else moment_of(first)
        labels = [
            label
            for _, label in services.catalog.labels_between(services.principal, found, start, end)
            if label.current
        ]
        asked = services.catalog.prediction_count(services.principal, found, start, end)
    labels.sort(key=lambda label: (label.observed_at, label.label_id))
    if as_json:
        document = {"endpoint": found, "from": iso(start), "to": iso(end), "predictions": asked}
        click.echo(json.dumps(document | {"labels": [_document(label) for label in labels]}, indent=2))
        return
    _show_labels(labels)
    click.echo(f"{found}: {counted(asked, 'answer')} asked {iso(start)} to {iso(end)}, {len(labels):,} labelled")


@command.command("show")
@click.argument("prediction_id", metavar="PREDICTION")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def show(settings: Settings, prediction_id: str, as_json: bool) -> None:
    """Show every label of a prediction (its id or first characters), oldest first; the one in force is marked."""
    from headway.services import open_services
    from headway.serving.explain import find_prediction

    with open_services(settings) as services:
        prediction = find_prediction(services, prediction_id)
        labels = services.catalog.labels(services.principal, prediction.prediction_id)
    labels.sort(key=lambda label: label.facts.order)
    if as_json:
        document = {"prediction_id": prediction.prediction_id, "output": prediction.output}
        click.echo(json.dumps(document | {"labels": [_document(label) for label in labels]}, indent=2))
        return
    click.echo(
        f"{prediction.prediction_id} said {json.dumps(prediction.output)} "
        f"({prediction.model_id}@{prediction.model_version})"
    )
    _show_labels(labels)
    if not labels:
        click.echo("no label yet")


@command.command("inbox")
@click.option("--endpoint", "-e", help="Whose; none: the only endpoint there is.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def inbox(settings: Settings, endpoint: str | None, as_json: bool) -> None:
    """List the labels that wait for their prediction, oldest first; they are attached when it comes."""
    from headway.services import open_services

    with open_services(settings) as services:
        found = _endpoint(services, endpoint, None)
        labels = services.catalog.label_inbox(services.principal, found)
    labels.sort(key=lambda label: (label.received_at, label.label_id))
    if as_json:
        click.echo(json.dumps({"endpoint": found, "labels": [_document(label) for label in labels]}, indent=2))
        return
    _show_labels(labels)
    reasons = Counter(label.reason for label in labels)
    told = ", ".join(f"{number:,} {reason}" for reason, number in sorted(reasons.items()))
    click.echo(f"{found}: {counted(len(labels), 'label')} waiting" + (f" ({told})" if told else ""))


def _endpoint(services: Services, endpoint: str | None, reference: str | None) -> str:
    from headway.loading import load_pipeline
    from headway.serving.predict import find_endpoint

    return endpoint or find_endpoint(services, None if reference is None else load_pipeline(reference).name)


def _lookup(reference: str | None) -> Callable[[str], Pipeline]:
    from headway.loading import load_pipeline

    return load_pipeline if reference is None else lambda _: load_pipeline(reference)


def _content(file: Path) -> tuple[str, bytes]:
    if str(file) == "-":
        return "standard input", sys.stdin.buffer.read(_MAX_BYTES + 1)
    try:
        size = file.stat().st_size
        if size > _MAX_BYTES:
            raise LabelsUnreadable(f"{file} has {size:,} bytes, the limit is {_MAX_BYTES:,}", "split it")
        return file.name, file.read_bytes()
    except OSError as error:
        raise LabelsUnreadable(f"{file} cannot be read: {error.strerror}", "give the path of a file") from error


def _items(name: str, data: bytes, spec: PipelineSpec) -> list[object]:
    from headway.monitoring.label_items import read_label_file
    from headway.registry.strict_json import JsonRefused, parse_json

    if name.endswith(".csv"):
        return read_label_file(name, data, spec)
    try:
        document: Any = parse_json(data)
    except JsonRefused as error:
        raise LabelsUnreadable(f"{name}: {error}", "write a list of labels as JSON, or a .csv file") from error
    if isinstance(document, dict) and list(document) == ["labels"]:
        document = document["labels"]
    if not isinstance(document, list):
        raise LabelsUnreadable(f"{name} holds no list of labels", 'write [{...}], or {"labels": [{...}]}')
    return document


def _document(label: Label) -> dict[str, Any]:
    from headway.datasets.zones import iso

    facts = label.facts
    addresses = {"prediction_id": facts.prediction_id, "id": facts.caller_id, "match": facts.event_key}
    (by, address) = next((name, value) for name, value in addresses.items() if value is not None)
    return {
        "label_id": label.label_id,
        "prediction_id": label.prediction_id,
        "by": by,
        "address": address,
        "value": label.value,
        "source": label.source,
        "observed_at": iso(label.observed_at),
        "received_at": iso(label.received_at),
        "actor": facts.actor,
        "reason": facts.reason,
        "current": label.current,
        "waits_for": label.reason if label.prediction_id is None else None,
    }


def _show_labels(labels: Iterable[Label]) -> None:
    rows = [_document(label) for label in labels]
    for row in rows[:_LISTED]:
        about = row["prediction_id"] or row["address"]
        said = f" by {row['actor']}: {row['reason']}" if row["source"] == "human" else ""
        mark = "*" if row["current"] else " "
        click.echo(f"{mark} {about:.40}  {json.dumps(row['value'])}  {row['source']}  {row['observed_at']}{said}")
    if len(rows) > _LISTED:
        click.echo(f"  and {len(rows) - _LISTED:,} more (--json shows all)")


def _show_answers(endpoint: str, answers: list[dict[str, Any]]) -> None:
    shown = 0
    for number, answer in enumerate(answers, 1):
        if answer["status"] in ("refused", "waiting") and shown < _LISTED:
            shown += 1
            candidates = f" [{', '.join(answer['candidates'])}]" if answer["candidates"] else ""
            click.echo(f"label {number}: {answer['status']}: {answer['message'] or answer['reason']}{candidates}")
    counts = Counter(answer["status"] for answer in answers)
    told = ", ".join(f"{number:,} {status}" for status, number in sorted(counts.items()))
    click.echo(f"{endpoint}: {counted(len(answers), 'label')}" + (f": {told}" if told else ""))
