"""Turns rows of the label source back into what happened: somebody asked, and later the outcome was reported.

Which rows are asked, and how long a report takes, are functions of the row's identity: a replay asks for the same
events whoever runs it, and goes on where an earlier one stopped.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from headway.datasets.partitions import PartitionScheme
from headway.datasets.rows import dataset_name, load_rows
from headway.declaration import PipelineSpec
from headway.errors import HeadwayError
from headway.loading import Pipeline
from headway.services import Services
from headway.serving.requests import serving_of
from trainer.blobs import Json

_US = 1_000_000
_HOUR = 3600 * _US


class NotReplayable(HeadwayError):
    """The declaration does not say how a row of the label source was asked for."""


@dataclass(frozen=True)
class ReportDelay:
    """How long after an outcome is known it is reported: a log-normal delay, cut at `longest`. Hours."""

    median: float = 2.0
    spread: float = 1.0
    longest: float = 36.0

    def of(self, identity: bytes) -> int:
        """The delay of one event in microseconds: the quantile that its identity draws."""
        share = (int.from_bytes(hashlib.sha256(b"delay" + identity).digest()[:8], "big") + 0.5) / 2**64
        hours = min(self.longest, self.median * math.exp(self.spread * _normal_quantile(share)))
        return round(hours * _HOUR)


@dataclass(frozen=True)
class Outcome:
    """What became of an event: its value, when it was known and when the report arrives (microseconds UTC)."""

    value: Json
    known_at: int
    reported_at: int


@dataclass(frozen=True)
class Asked:
    """One request as it was made: when (microseconds UTC), under which id, with what; and its outcome, if it had one.

    An event that the label excludes (a cancelled flight) was asked for as well, and never gets an outcome.
    """

    at: int
    caller_id: str
    request: dict[str, Json]
    outcome: Outcome | None


def events_of(
    services: Services, pipeline: Pipeline, partition: str, most: int, delay: ReportDelay | None = None
) -> list[Asked]:
    """The sampled events of one partition of the label source, in the order in which they were asked.

    Args:
        services: catalog and store.
        pipeline: declares `serving`, and what each field of a request is in the label source.
        partition: a partition of the label source; one that is not released has no events.
        most: events to take, by the digest of their identity.
        delay: how long reports take.

    Raises:
        NotServed: the pipeline declares no `serving`.
        NotReplayable: a required field of the request is nothing that the label source holds.
    """
    spec = pipeline.spec
    columns = request_columns(spec)
    version = services.catalog.current(services.principal, dataset_name(spec.name, spec.label.source), partition)
    if version is None or version.status != "released":
        return []
    label, identity = spec.label, spec.sources[spec.label.source].row_id
    needed = {*columns.values(), *identity, label.observation_time, label.target, label.known_at}
    table = load_rows(services, version, sorted(needed | set(label.exclude.values())))
    drawn = sorted((_identity(row, identity), n) for n, row in enumerate(table.select(list(identity)).to_pylist()))
    drawn.sort(key=lambda item: hashlib.sha256(item[0]).digest())
    rows = table.take([n for _, n in drawn[:most]]).to_pylist()
    found = [
        _asked(spec, columns, row, key, delay or ReportDelay()) for row, (key, _) in zip(rows, drawn, strict=False)
    ]
    return sorted((e for e in found if e is not None), key=lambda e: (e.at, e.caller_id))


def partitions_between(spec: PipelineSpec, start: int, end: int) -> Sequence[str]:
    """Partitions of the label source whose events may be asked in [start, end)."""
    declared = spec.sources[spec.label.source].partition
    if declared is None:
        raise NotReplayable(f"the label source {spec.label.source!r} has no partitions", "declare one")
    scheme = PartitionScheme.from_spec(declared)
    return scheme.keys_between(start - 24 * _HOUR, end + 48 * _HOUR)


def request_columns(spec: PipelineSpec) -> dict[str, str]:
    """Request field -> column of the label source that held it.

    Raises:
        NotReplayable: a required field has none.
    """
    source = spec.sources[spec.label.source]
    match = {} if spec.monitoring is None else spec.monitoring.labels.match
    found: dict[str, str] = {}
    for name, field in serving_of(spec).request.items():
        column = field.column or match.get(name, "") or (name if name in source.columns else "")
        if column:
            found[name] = column
        elif field.required:
            raise NotReplayable(
                f"the request field {name!r} is no column of {spec.label.source}",
                f"declare serving.request.{name}.column, or monitoring.labels.match.{name}",
            )
    return found


def _asked(
    spec: PipelineSpec, columns: dict[str, str], row: dict[str, Any], identity: bytes, delay: ReportDelay
) -> Asked | None:
    observed = row[spec.label.observation_time]
    if observed is None:
        return None
    at = _us(observed)
    outcome: Outcome | None = None
    value, known = row[spec.label.target], row[spec.label.known_at]
    excluded = any(row[c] for c in spec.label.exclude.values())
    if value is not None and known is not None and not excluded:
        known_at = max(_us(known), at)
        outcome = Outcome(value, known_at, known_at + delay.of(identity))
    request = {name: _json(row[column]) for name, column in columns.items() if row[column] is not None}
    return Asked(at, identity.decode(), request, outcome)


def _identity(row: dict[str, Any], columns: Sequence[str]) -> bytes:
    return "|".join(str(_json(row[c])) for c in columns).encode()


def _json(value: Any) -> Json:  # noqa: ANN401 - a cell of any column
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    return value


def _us(moment: datetime) -> int:
    return round(moment.timestamp() * _US)


def _normal_quantile(share: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(share)


def stops_between(start: int, end: int) -> Iterator[int]:
    """Full hours after `start`, and then `end` (microseconds UTC)."""
    hour = (start // _HOUR + 1) * _HOUR
    while hour < end:
        yield hour
        hour += _HOUR
    if end > start:
        yield end
