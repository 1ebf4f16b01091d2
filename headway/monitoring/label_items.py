"""What a label sent by somebody looks like, and what is refused before it reaches the catalog.

An item names its prediction in exactly one way: `prediction_id` (the answer's), `id` (the caller's own), or `match`
(the request fields that name the event). `value` has the type of the pipeline's target and is never converted: a JSON
number is no text class, and `1.0` is no whole number.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from headway.datasets.zones import iso
from headway.declaration import ColumnType, LabelMatchSpec, PipelineSpec
from headway.errors import HeadwayError
from headway.monitoring.events import match_of
from headway.serving.requests import ValueRefused, is_personal, parse_value, serving_of
from trainer.blobs import Json

Source = Literal["auto", "human"]

ADDRESSES = ("prediction_id", "id", "match")
FIELDS = (*ADDRESSES, "value", "observed_at", "source", "source_id", "actor", "reason")
MAX_TEXT = 1_000

_MATCH = "match."


class LabelRefused(HeadwayError):
    """A label that is not taken; `code` names why."""

    def __init__(self, code: str, message: str, remedy: str) -> None:
        super().__init__(message, remedy)
        self.code = code


class LabelFileRefused(HeadwayError):
    """A file that holds no labels in a form that is read."""


@dataclass(frozen=True)
class LabelItem:
    """One label as it was sent, checked against the declaration; times are microseconds UTC.

    `match` holds the values of the declared match fields. Exactly one of `prediction_id`, `caller_id` and `match` is
    set. `observed_at` is None when the sender does not say when the outcome was known.
    """

    prediction_id: str | None
    caller_id: str | None
    match: Mapping[str, Any] | None
    value: Json
    observed_at: int | None
    source: Source
    source_id: str | None
    actor: str | None
    reason: str | None


def policy_of(spec: PipelineSpec) -> LabelMatchSpec:
    """The declared policy of labels, or its defaults."""
    return LabelMatchSpec() if spec.monitoring is None else spec.monitoring.labels


def target_type(spec: PipelineSpec) -> ColumnType:
    """The declared type of the target, which is that of every label."""
    return spec.sources[spec.label.source].columns[spec.label.target].type


def read_item(spec: PipelineSpec, item: object, now: int) -> LabelItem:
    """Check one item against the declaration.

    Args:
        spec: the pipeline's declaration.
        item: what was sent, as JSON gives it.
        now: the world's time (microseconds UTC); no outcome is known later.

    Raises:
        LabelRefused: the first fault, with the field, the value and what to do.
    """
    if not isinstance(item, Mapping):
        raise LabelRefused("malformed", "a label must be an object", "send {prediction_id: ..., value: ...}")
    given = cast("Mapping[str, object]", item)
    for name in given:
        if name not in FIELDS:
            raise LabelRefused("unknown_field", f"{name!r:.80} is no field of a label", f"give {', '.join(FIELDS)}")
    named = [name for name in ADDRESSES if given.get(name) is not None]
    if len(named) != 1:
        raise LabelRefused(
            "address",
            f"a label names its prediction once, this one by {', '.join(named) or 'nothing'}",
            f"give exactly one of {', '.join(ADDRESSES)}",
        )
    source = _source(given)
    actor, reason = _text(given, "actor"), _text(given, "reason")
    if source == "human" and (actor is None or reason is None):
        raise LabelRefused("human", "a label of source human needs actor and reason", "say who decided it and why")
    return LabelItem(
        prediction_id=_text(given, "prediction_id"),
        caller_id=_text(given, "id"),
        match=None if "match" not in named else _match(spec, given["match"]),
        value=_value(spec, given),
        observed_at=_observed(given, now),
        source=source,
        source_id=_text(given, "source_id"),
        actor=actor,
        reason=reason,
    )


def read_label_file(name: str, data: bytes, spec: PipelineSpec) -> list[object]:
    """Items of a `.csv` file: a header of item fields, match fields as `match.<field>`, one label a line.

    Text becomes the declared type (`1`, `true`, `0.5`); for a text class it stays as it stands, the empty text too. In
    every other column an empty cell says nothing. Faults of a row's values are left for `read_item`.

    Raises:
        LabelFileRefused: not UTF-8, no CSV, or columns that are no fields of a label.
    """
    try:
        rows = list(csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise LabelFileRefused(f"{name} is no CSV in UTF-8: {error}"[:300], "write it again") from error
    if not rows:
        raise LabelFileRefused(f"{name} is empty", f"write a header of {', '.join(FIELDS)} and one label a line")
    header = rows[0]
    allowed = {*FIELDS, *(_MATCH + field for field in match_of(spec))} - {"match"}
    wrong = sorted({c for c in header if c not in allowed} | {c for c in header if header.count(c) > 1})
    if wrong or "value" not in header:
        what = f"columns {wrong!r:.200} that are no fields, or stand twice" if wrong else "no column `value`"
        raise LabelFileRefused(f"{name} has {what}", f"columns are {', '.join(sorted(allowed))}")
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(header):
            raise LabelFileRefused(
                f"{name}:{number} has {len(row)} cells, the header has {len(header)}", "mend the line"
            )
    return [_of_cells(spec, dict(zip(header, row, strict=True))) for row in rows[1:]]


def _of_cells(spec: PipelineSpec, cells: Mapping[str, str]) -> dict[str, object]:
    item: dict[str, object] = {n: c for n, c in cells.items() if c != "" and n != "value" and not n.startswith(_MATCH)}
    item["value"] = _typed(target_type(spec), cells["value"])
    request = {} if spec.serving is None else spec.serving.request
    match = {
        n.removeprefix(_MATCH): _typed(request[n.removeprefix(_MATCH)].type, c)
        for n, c in cells.items()
        if n.startswith(_MATCH) and c != ""
    }
    return item | ({"match": match} if match else {})


_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,18})")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)([.][0-9]+)?([eE][+-]?[0-9]+)?")


def _typed(kind: ColumnType, cell: str) -> object:
    """The cell as JSON would give it; what is no such value stays text, and is refused for being text."""
    if kind == "int64" and _WHOLE.fullmatch(cell):
        return int(cell)
    if kind == "float64" and _NUMBER.fullmatch(cell):
        return float(cell)
    if kind == "bool" and cell in ("true", "false"):
        return cell == "true"
    return cell


def _source(given: Mapping[str, object]) -> Source:
    source = given.get("source", "auto")
    if source not in get_args(Source):
        raise LabelRefused(
            "source", f"source is {source!r:.80}", f"give {' or '.join(get_args(Source))}, or leave it out for auto"
        )
    return cast("Source", source)


def _text(given: Mapping[str, object], field: str) -> str | None:
    value = given.get(field)
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_TEXT:
        raise LabelRefused(field, f"{field} is {value!r:.80}", f"give text of 1 to {MAX_TEXT:,} characters")
    return value


def _value(spec: PipelineSpec, given: Mapping[str, object]) -> Json:
    kind, value = target_type(spec), given.get("value")
    if value is None:
        raise LabelRefused("value", "the value is missing", f"give a {kind}; where there is no outcome send no label")
    personal = spec.label.target in spec.sources[spec.label.source].privacy.personal
    found = _parsed(kind, "value", value, personal=personal)
    if spec.training is not None and kind == "int64" and found not in (0, 1):
        raise LabelRefused("value", f"value is {found}", "the target is a class of two: give 0 or 1")
    return str(found) if kind == "date" else found


def _match(spec: PipelineSpec, given: object) -> dict[str, Any]:
    declared = match_of(spec)
    if not declared:
        raise LabelRefused("match", f"{spec.name} declares no monitoring.labels.match", "send prediction_id or id")
    fields = cast("Mapping[str, object]", given) if isinstance(given, Mapping) else {}
    if set(fields) != set(declared) or None in fields.values():
        raise LabelRefused(
            "match", f"match holds {sorted(fields)!r:.200}", f"give a value for each of {', '.join(declared)}"
        )
    request = serving_of(spec).request
    return {
        name: _parsed(request[name].type, f"match.{name}", fields[name], personal=is_personal(spec, request[name]))
        for name in declared
    }


def _observed(given: Mapping[str, object], now: int) -> int | None:
    value = given.get("observed_at")
    if value is None:
        return None
    moment: int = _parsed("timestamp", "observed_at", value)
    if moment > now:
        raise LabelRefused(
            "future",
            f"observed_at is {iso(moment)}, which is still to come: it is {iso(now)}",
            "send it when it is known",
        )
    return moment


def _parsed(kind: ColumnType, field: str, value: object, *, personal: bool = False) -> Any:  # noqa: ANN401
    try:
        return parse_value(kind, value)
    except ValueRefused as wrong:
        shown = "(withheld: personal)" if personal else f"{value!r:.80}"
        raise LabelRefused(field.partition(".")[0], f"{field} {shown} {wrong.message}", wrong.remedy) from None
