"""The label desk: what became known about answers, from whoever sends it, one item at a time; and the batch source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pyarrow as pa

from headway.catalog import Principal
from headway.catalog.errors import InvalidFact
from headway.catalog.monitoring_facts import Label, LabelFacts, LabelOutcome
from headway.catalog.registry_facts import Prediction
from headway.datasets.partitions import PartitionScheme
from headway.datasets.rows import dataset_name, load_rows
from headway.datasets.text import ARROW_TYPES
from headway.datasets.zones import iso
from headway.declaration import PipelineSpec, duration_us
from headway.errors import HeadwayError
from headway.features.clocks import clock_of, instants
from headway.features.labels import label_rows
from headway.features.reach import bounds
from headway.loading import Pipeline
from headway.monitoring.events import event_keys, match_of
from headway.monitoring.label_items import LabelItem, LabelRefused, policy_of, read_item
from headway.services import Services
from headway.serving.features import as_kept
from headway.serving.requests import serving_of
from trainer.blobs import Json, digest_json

_PAGE = 10_000

_SAYS = {
    "no_prediction": "unknown: no such prediction is recorded (an answer of just now is still in its server's log, not "
    "shipped yet); the label waits in the inbox and is attached when the prediction comes",
    "conflict": "this label came before with other content; send a correction under another source_id",
    "ambiguous": "several predictions have this id: send it with one of the candidates' prediction_id",
}


class NothingToLabel(HeadwayError):
    """An endpoint that there is not, or that never answered anything."""


@dataclass(frozen=True)
class BatchLabels:
    """What the label source said about the answers of a time.

    Of `predictions`, `labelled` have an outcome known by now, `added` of them newly or corrected, the others
    `unchanged`. `refused` were not taken. `quarantined` and `absent` name partitions that were not read.
    """

    predictions: int
    labelled: int
    added: int
    unchanged: int
    refused: int
    quarantined: tuple[str, ...]
    absent: tuple[str, ...]


class LabelDesk:
    """Takes labels of any endpoint of this catalog; each item gets its own answer, and one bad item stops no other."""

    def __init__(self, services: Services, pipelines: Callable[[str], Pipeline]) -> None:
        """Keep the services, and how a pipeline is found by its name (`load_pipeline`, or a dictionary's getter)."""
        self._services = services
        self._pipelines = pipelines

    def accept(self, principal: Principal, endpoint_id: str, items: Sequence[object]) -> list[dict[str, Json]]:
        """Add labels; sending them again changes nothing.

        Args:
            principal: the tenant, which sees its own predictions only, and the actor of labels that name none.
            endpoint_id: whose answers are labelled.
            items: as `headway.monitoring.label_items` describes them. Where `observed_at` is left out, the outcome
                counts as known when the label first came.

        Returns:
            Per item, in order: `status` (accepted, superseded, waiting, duplicate, refused), `reason` (a code),
            `message`, `label_id`, `prediction_id` and `candidates`. A label of a prediction that is not known waits.

        Raises:
            NothingToLabel: there is no such endpoint, or nothing was ever promoted to it.
        """
        spec = self.pipeline(principal, endpoint_id).spec
        now = self._services.world()
        answers: list[dict[str, Json]] = [{} for _ in items]
        read: dict[int, LabelItem] = {}
        for place, item in enumerate(items):
            try:
                read[place] = read_item(spec, item, now)
            except LabelRefused as refusal:
                answers[place] = _refused(refusal)
        facts: dict[int, LabelFacts] = {}
        keys = _match_keys(spec, read)
        for place, item in read.items():
            try:
                facts[place] = _facts(spec, principal, endpoint_id, item, keys.get(place), now)
            except LabelRefused as refusal:
                answers[place] = _refused(refusal)
        facts = self._first_seen(principal, read, facts)
        old = self._too_old(principal, spec, facts, now)
        answers = [old.get(place) or answer for place, answer in enumerate(answers)]
        good = {place: label for place, label in facts.items() if place not in old}
        if good:
            outcomes = self._services.catalog.add_labels(principal, None, tuple(good.values()))
            for place, outcome in zip(good, outcomes, strict=True):
                answers[place] = _told(outcome)
        return answers

    def pipeline(self, principal: Principal, endpoint_id: str) -> Pipeline:
        """The pipeline whose model an endpoint serves. Raises `NothingToLabel`."""
        catalog = self._services.catalog
        endpoint = catalog.endpoint(principal, endpoint_id)
        if endpoint is None or endpoint.stable is None:
            known = [e.endpoint_id for e in catalog.endpoints(principal) if e.stable is not None]
            raise NothingToLabel(
                f"endpoint {endpoint_id!r:.80} has answered nothing", f"endpoints that serve are {known!r:.200}"
            )
        version = catalog.model_version(principal, endpoint.model_id, endpoint.stable)
        return self._pipelines(version.facts.pipeline)

    def _first_seen(
        self, principal: Principal, read: dict[int, LabelItem], facts: dict[int, LabelFacts]
    ) -> dict[int, LabelFacts]:
        """The facts, where a label that says no time and came before keeps the time at which it came first."""
        undated = {place: label for place, label in facts.items() if read[place].observed_at is None}
        if not undated:
            return facts
        stored = self._services.catalog.labels_by_id(principal, [label.label_id for label in undated.values()])
        seen = {label_id: label.observed_at for label_id, label in stored.items()}
        first: dict[str, int] = {}
        for label in undated.values():
            first.setdefault(label.label_id, seen.get(label.label_id, label.observed_at))
        return facts | {p: replace(label, observed_at=first[label.label_id]) for p, label in undated.items()}

    def _addressed(self, principal: Principal, labels: Iterable[LabelFacts]) -> list[Prediction]:
        """The predictions that labels may mean; several for a caller's id that was used twice."""
        catalog = self._services.catalog
        labels = list(labels)
        ids = {label.prediction_id for label in labels if label.prediction_id is not None}
        found = dict(catalog.predictions_by_id(principal, sorted(ids)))
        for endpoint in {x.endpoint_id for x in labels}:
            for kind in ("caller_id", "event_key"):
                addresses = {getattr(x, kind) for x in labels if x.endpoint_id == endpoint} - {None}
                for p in catalog.predictions_addressed(principal, endpoint, kind, sorted(addresses)):
                    found[p.prediction_id] = p
        return list(found.values())

    def _too_old(
        self, principal: Principal, spec: PipelineSpec, facts: dict[int, LabelFacts], now: int
    ) -> dict[int, dict[str, Json]]:
        """Refusals of labels whose prediction, or whose outcome already, lies beyond the declared horizon."""
        horizon = policy_of(spec).horizon
        limit = now - duration_us(horizon)
        asked: dict[tuple[str, str], list[int]] = {}
        owners: dict[str, str] = {}
        for prediction in self._addressed(principal, facts.values()):
            owners[prediction.prediction_id] = prediction.endpoint_id
            for name in ("prediction_id", "caller_id", "event_key"):
                told = getattr(prediction, name)
                if told is not None:
                    moment = prediction.at if prediction.asked_at is None else prediction.asked_at
                    asked.setdefault((name, told), []).append(moment)
        found: dict[int, dict[str, Json]] = {}
        for place, label in facts.items():
            moments = asked.get(_address(label), [label.observed_at])
            if max(moments) <= limit:
                refusal = LabelRefused(
                    "too_old", f"it is about {iso(max(moments))}, {horizon} ago or more", "such labels are not taken"
                )
                found[place] = _refused(refusal)
            elif owners.get(label.prediction_id or "", label.endpoint_id) != label.endpoint_id:
                owner = owners[label.prediction_id or ""]
                refusal = LabelRefused("endpoint", f"this prediction is of endpoint {owner}", "send it there")
                found[place] = _refused(refusal)
        return found


def batch_labels(services: Services, pipeline: Pipeline, endpoint_id: str, start: int, end: int) -> BatchLabels:
    """Give the answers asked in [start, end) the outcomes that the label source holds and that are known by now.

    Every answer about an event gets the event's label, with source `backfill`; running it again changes nothing, and a
    changed outcome in a newer dataset version becomes a correction. Where a system or a person said the same already,
    nothing is added. Partitions that are quarantined or have no version
    are left out and named.
    """
    spec, now = pipeline.spec, services.world()
    asked = [p for p in predictions_between(services, endpoint_id, start, end) if p.event_key is not None]
    outcomes, quarantined, absent = _outcomes(services, spec, asked, now)
    said, filled = _said(services, endpoint_id, start, end) if asked else ({}, {})
    labels: list[LabelFacts] = []
    unchanged = 0
    for prediction in asked:
        known = outcomes.get(prediction.event_key or "")
        if known is None:
            continue
        last = filled.get(prediction.prediction_id)
        if known[0] in (said.get(prediction.prediction_id), None if last is None else last.value):
            unchanged += 1
            continue
        # A correction that names the same time stands after what it corrects, by the least that can be told apart.
        moment = known[1] if last is None else max(known[1], last.observed_at + 1)
        labels.append(_fill(services, endpoint_id, prediction, known[0], moment, now))
    refused = 0
    for first in range(0, len(labels), _PAGE):
        told = services.catalog.add_labels(services.principal, None, tuple(labels[first : first + _PAGE]))
        refused += sum(outcome.status == "refused" for outcome in told)
    return BatchLabels(
        predictions=len(asked),
        labelled=len(labels) - refused + unchanged,
        added=len(labels) - refused,
        unchanged=unchanged,
        refused=refused,
        quarantined=quarantined,
        absent=absent,
    )


def corrections(services: Services, endpoint_id: str, start: int, end: int) -> int:
    """How many labels of the answers asked in [start, end) stand back behind another one that says something else."""
    labels = services.catalog.labels_between(services.principal, endpoint_id, start, end)
    current = {prediction_id: label.value for prediction_id, label in labels if label.current}
    return sum(label.value != current[prediction_id] for prediction_id, label in labels)


def predictions_between(services: Services, endpoint_id: str, start: int, end: int) -> Iterable[Prediction]:
    """Every answer of an endpoint asked in [start, end), world time, read page by page."""
    after = ""
    while page := services.catalog.predictions(services.principal, endpoint_id, start, end, after=after, limit=_PAGE):
        yield from page
        after = page[-1].prediction_id


def _match_keys(spec: PipelineSpec, read: dict[int, LabelItem]) -> dict[int, str]:
    """Event keys of the items that name an event, personal values treated as in stored requests."""
    places = [place for place, item in read.items() if item.match is not None]
    if not places:
        return {}
    given = [read[place].match or {} for place in places]
    columns = {
        name: pa.array([match.get(name) for match in given], ARROW_TYPES[field.type])
        for name, field in serving_of(spec).request.items()
    }
    keys = event_keys(spec, as_kept(spec, pa.table(columns)))
    return {place: key for place, key in zip(places, keys, strict=True) if key is not None}


def _facts(
    spec: PipelineSpec, principal: Principal, endpoint_id: str, item: LabelItem, event_key: str | None, now: int
) -> LabelFacts:
    """The facts of an item. Raises `LabelRefused` when the catalog could not hold them."""
    if item.match is not None and event_key is None:
        raise LabelRefused(
            "match", f"{spec.name} drops a personal field of {', '.join(match_of(spec))}", "send prediction_id or id"
        )
    address: list[Json] = [item.prediction_id, item.caller_id, event_key]
    content: Json = [address, item.value, item.observed_at]
    identity = item.source_id if item.source_id is not None else content
    try:
        return LabelFacts(
            label_id=digest_json(["label", endpoint_id, item.source, identity]),
            endpoint_id=endpoint_id,
            prediction_id=item.prediction_id,
            caller_id=item.caller_id,
            event_key=event_key,
            value=item.value,
            source=item.source,
            observed_at=now if item.observed_at is None else item.observed_at,
            received_at=now,
            actor=item.actor or principal.actor,
            reason=item.reason,
        )
    except InvalidFact as fault:
        raise LabelRefused("malformed", fault.message, fault.remedy) from fault


def _address(label: LabelFacts) -> tuple[str, str]:
    if label.prediction_id is not None:
        return "prediction_id", label.prediction_id
    return ("caller_id", label.caller_id) if label.caller_id is not None else ("event_key", label.event_key or "")


def _refused(refusal: LabelRefused) -> dict[str, Json]:
    return {
        "status": "refused",
        "reason": refusal.code,
        "message": str(refusal),
        "label_id": None,
        "prediction_id": None,
        "candidates": [],
    }


def _told(outcome: LabelOutcome) -> dict[str, Json]:
    return {
        "status": outcome.status,
        "reason": outcome.reason,
        "message": _SAYS.get(outcome.reason, ""),
        "label_id": outcome.label_id,
        "prediction_id": outcome.prediction_id,
        "candidates": cast("list[Json]", list(outcome.candidates)),
    }


def _said(services: Services, endpoint_id: str, start: int, end: int) -> tuple[dict[str, Json], dict[str, Label]]:
    """By prediction: what somebody else says that is in force, and the newest label filled in from the source."""
    said: dict[str, Json] = {}
    filled: dict[str, Label] = {}
    for prediction_id, label in services.catalog.labels_between(services.principal, endpoint_id, start, end):
        if label.source != "backfill":
            said |= {prediction_id: label.value} if label.current else {}
        elif prediction_id not in filled or filled[prediction_id].facts.order < label.facts.order:
            filled[prediction_id] = label
    return said, filled


def _fill(
    services: Services, endpoint_id: str, prediction: Prediction, value: Json, moment: int, now: int
) -> LabelFacts:
    content: Json = [[prediction.prediction_id, None, None], value, moment]
    return LabelFacts(
        label_id=digest_json(["label", endpoint_id, "backfill", content]),
        endpoint_id=endpoint_id,
        prediction_id=prediction.prediction_id,
        caller_id=None,
        event_key=None,
        value=value,
        source="backfill",
        observed_at=moment,
        received_at=now,
        actor=services.principal.actor,
        reason=None,
    )


def _outcomes(
    services: Services, spec: PipelineSpec, asked: Sequence[Prediction], now: int
) -> tuple[dict[str, tuple[Json, int]], tuple[str, ...], tuple[str, ...]]:
    """Event key -> target and when it became known, of events known by `now`; and partitions left out."""
    if not asked:
        return {}, (), ()
    keys, own = _partitions(spec, asked)
    dataset = dataset_name(spec.name, spec.label.source)
    versions = services.catalog.current_many(services.principal, dataset, keys)
    absent = tuple(key for key in own if key not in versions)
    quarantined = tuple(key for key, v in versions.items() if v.status != "released")
    wanted = {p.event_key for p in asked}
    found: dict[str, tuple[Json, int]] = {}
    for key, version in versions.items():
        if key in quarantined:
            continue
        for event, value, known in _known_labels(spec, load_rows(services, version), now):
            if event in wanted and (event not in found or found[event][1] < known):
                found[event] = (value, known)
    return found, quarantined, absent


def _partitions(spec: PipelineSpec, asked: Sequence[Prediction]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Partitions of the label source that may hold the events of predictions, and those in which they were observed."""
    source = spec.sources[spec.label.source]
    assert source.partition is not None
    moments = [m for p in asked if (m := p.observed_at if p.observed_at is not None else p.asked_at) is not None]
    margin = sum(bounds(source)) + duration_us(serving_of(spec).before)
    scheme = PartitionScheme.from_spec(source.partition)
    first, last = min(moments), max(moments)
    return scheme.keys_between(first - margin, last + margin), scheme.keys_between(first, last)


def _known_labels(spec: PipelineSpec, rows: pa.Table, now: int) -> Iterable[tuple[str, Json, int]]:
    """Event key, target and time of every label row of a partition that is known by `now`."""
    label = spec.label
    times = clock_of(spec.sources[label.source]).times(rows)
    rows = rows.filter(pa.array(~times.admitted | (times.known <= now)))
    match = match_of(spec)
    carry = tuple(dict.fromkeys([*label.carry, *match.values()]))
    found = label_rows(spec.model_copy(update={"label_rows": label.model_copy(update={"carry": carry})}), rows)
    known, _ = instants(found.outcome.column(label.known_at), label.known_at)
    seen = np.flatnonzero(known <= now)
    requests = pa.table({field: found.inputs.column(column) for field, column in match.items()})
    events = event_keys(spec, requests.take(pa.array(seen)))
    values: list[Any] = found.outcome.column(label.target).take(pa.array(seen)).to_pylist()
    for event, value, moment in zip(events, values, known[seen], strict=True):
        if event is not None:
            yield event, value, int(moment)
