"""Why a prediction came out: from the answer to the version, its gates, its run, its data; and the raw rows behind it.

Everything that the prediction rests on is read again and compared with what was recorded then: the bytes of every blob,
the content digest of every dataset version within reach, the digest of every raw row, the features recomputed from
them, the answer that the model gives to those features, and the signatures of gates and promotion. What does not hold
is a problem that names the dataset version and the row, or the statement, or both values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from headway.artifacts.errors import StoreError
from headway.artifacts.manifest import InvalidManifest, read_manifest
from headway.catalog import FeatureSnapshot
from headway.catalog.registry_facts import EndpointEvent, GateResult, ModelVersion, Prediction
from headway.catalog.run_facts import TrainingRun
from headway.datasets.digest import row_digests
from headway.datasets.schema import arrow_schema
from headway.declaration import PipelineSpec
from headway.errors import HeadwayError
from headway.features.assemble import companions
from headway.features.clocks import clock_of
from headway.features.contract import code_digest, contract_digest
from headway.features.inputs import PinnedInputs, PinnedVersion
from headway.features.plan import Cells, FeaturePlan, compile_plan
from headway.features.snapshot import SnapshotBuilder
from headway.loading import Pipeline
from headway.registry.audit import check_promotion, check_rollback, check_verdicts
from headway.registry.dossier import newest_results, promotion_event
from headway.registry.keys import Trust
from headway.services import Services
from headway.serving.detail import GROUP, Detail, DetailGroup, PinnedRows, read_detail
from headway.serving.features import without_outcome
from headway.serving.predict import FeaturesDiffer, Score
from headway.serving.rawrows import Selection, select_rows
from headway.serving.reread import Problem, ReadVersion, Walk, identity_of, read_inputs
from headway.serving.scoring import score_rows
from headway.words import no_single

ROWS_SHOWN = 20


class UnclearPrediction(HeadwayError):
    """A text with which no prediction's id begins, or more than one."""


class UnknownFeature(HeadwayError):
    """A name that is no feature of the pipeline."""


@dataclass(frozen=True)
class RawRow:
    """A raw row: its source, dataset version and identity, its digest, and its two times (microseconds UTC)."""

    dataset: str
    version: int
    partition: str
    identity: Mapping[str, str]
    digest: str
    event_time: int
    available_time: int


@dataclass(frozen=True)
class FeatureOrigin:
    """One feature of the prediction: its value, what it says about itself, and the rows that made it.

    `rows` holds the first ones, `count` how many there are, `digest` the sha256 over the ascending digests of all.
    A derived feature has none of its own: `inputs` names what it was derived from.
    """

    feature: str
    kind: str
    value: Any
    event_time: int | None
    reason: str
    inputs: tuple[str, ...]
    rows: tuple[RawRow, ...]
    count: int
    digest: str | None


@dataclass(frozen=True)
class Explanation:
    """The whole chain of one prediction. `problems` is empty when everything is as it was recorded.

    `inputs` are the dataset versions that the prediction's own features were computed from; `snapshots` those that the
    version was trained on.
    """

    prediction: Prediction
    request: Mapping[str, Any]
    event: EndpointEvent | None
    version: ModelVersion
    gates: tuple[GateResult, ...]
    run: TrainingRun
    snapshots: tuple[FeatureSnapshot, ...]
    inputs: tuple[PinnedRows, ...]
    skipped: Mapping[str, tuple[str, ...]]
    absent: Mapping[str, tuple[str, ...]]
    features: tuple[FeatureOrigin, ...]
    rows_checked: int
    problems: tuple[Problem, ...]


def find_prediction(services: Services, reference: str, ship: Callable[[], object] | None = None) -> Prediction:
    """The one prediction whose id begins with a text.

    Args:
        services: catalog, store and principal.
        reference: an id, or its first characters.
        ship: records what servers have logged; called when the catalog knows no such prediction, which may be a moment
            old.

    Raises:
        UnclearPrediction: there is none, or more than one.
    """
    found = services.catalog.prediction_ids(services.principal, reference)
    if not found and ship is not None:
        ship()
        found = services.catalog.prediction_ids(services.principal, reference)
    if len(found) != 1:
        remedy = "give the whole id, as `headway predict` printed it or the server answered it"
        raise UnclearPrediction(no_single("prediction", found, reference), remedy)
    return services.catalog.prediction(services.principal, found[0])


def explain(
    services: Services,
    pipeline: Pipeline,
    trust: Trust,
    prediction_id: str,
    feature: str | None = None,
    shown: int = ROWS_SHOWN,
    score: Score = score_rows,
) -> Explanation:
    """Walk from a prediction to the raw rows of its features, reading everything again.

    Args:
        services: catalog, store and principal.
        pipeline: the tree's declaration and functions.
        trust: the public keys with which the statements of gates and promotion must verify.
        prediction_id: a prediction's id, or its first characters.
        feature: only this one's rows; None: all.
        shown: raw rows listed per feature; all are counted and digested.
        score: gives the version's probability of each row of feature values.

    Raises:
        UnclearPrediction: no or several predictions.
        FeaturesDiffer: the tree's features are not those that made the prediction.
        UnknownFeature: `feature` is none of the pipeline's.
    """
    walk = Walk(services, pipeline)
    prediction = find_prediction(services, prediction_id)
    if feature is not None and feature not in pipeline.spec.feature_names():
        raise UnknownFeature(
            f"{pipeline.name} has no feature {feature!r}", f"features are {', '.join(pipeline.spec.feature_names())}"
        )
    catalog, principal = services.catalog, services.principal
    version = catalog.model_version(principal, prediction.model_id, prediction.model_version)
    run = catalog.run(principal, version.run_id)
    event = _event(walk, prediction)
    _check_moves(walk, trust, prediction, version, event)
    _check_artifact(walk, version, run)
    detail = _detail(walk, prediction, version)
    group, index = _group_of(detail, prediction)
    reads = read_inputs(walk, group)
    again: _Recomputed | None = None
    origins: tuple[FeatureOrigin, ...] = ()
    if detail is not None and group is not None and reads is not None:
        again = _recompute(walk, prediction, detail, group, index, reads)
        origins = tuple(_origins(walk.pipeline.spec, again, index, reads, feature, shown))
    if detail is not None:
        row = detail.values.slice(prediction.row, 1) if again is None else again.row
        _check_output(walk, prediction, version, detail, row, score)
    return Explanation(
        prediction=prediction,
        request=_request(detail, prediction),
        event=event,
        version=version,
        gates=_gates(walk, trust, version),
        run=run,
        snapshots=_snapshots(walk, run),
        inputs=() if group is None else group.inputs,
        skipped={} if group is None else group.skipped,
        absent={} if group is None else group.absent,
        features=origins,
        rows_checked=sum(len(r.digests) for r in reads or ()),
        problems=tuple(walk.problems),
    )


def _event(walk: Walk, prediction: Prediction) -> EndpointEvent | None:
    """The move of the endpoint that put the version in force."""
    events = walk.services.catalog.endpoint_events(walk.services.principal, prediction.endpoint_id)
    found = next((e for e in events if e.epoch == prediction.endpoint_epoch), None)
    place = f"endpoint {prediction.endpoint_id} epoch {prediction.endpoint_epoch}"
    if found is None:
        walk.report(place, "there is no such event")
    elif prediction.arm == "stable" and found.row.stable != prediction.model_version:
        walk.report(place, f"served version {found.row.stable}, the prediction says {prediction.model_version}")
    return found


def _check_moves(
    walk: Walk, trust: Trust, prediction: Prediction, version: ModelVersion, served: EndpointEvent | None
) -> None:
    """The signatures of the version's promotion, of each verdict below it, and of a rollback that returned to it."""
    name = f"{version.model_id}@{version.version}"
    event = promotion_event(walk.services, prediction.endpoint_id, version.version, prediction.endpoint_epoch)
    if event is None:
        walk.report(f"endpoint {prediction.endpoint_id}", f"{name} was never promoted to it")
        return
    findings = check_promotion(walk.services, trust, event)
    if served is not None and served.operation == "rollback" and served.row.stable == version.version:
        findings += check_rollback(walk.services, trust, served)
    for finding in findings:
        if finding.problem:
            walk.report(f"{finding.subject} of {name}", finding.problem)


def _gates(walk: Walk, trust: Trust, version: ModelVersion) -> tuple[GateResult, ...]:
    """The newest result of every gate; its statement must say the same."""
    newest = tuple(newest_results(walk.services, version).values())
    name = f"{version.model_id}@{version.version}"
    for result in newest:
        if result.artifact_digest != version.manifest_digest:
            message = f"judged artifact {result.artifact_digest}, not {version.manifest_digest}"
            walk.report(f"gate {result.gate} of {name}", message)
    for finding in check_verdicts(walk.services, trust, version):
        if finding.problem:
            walk.report(f"{finding.subject} of {name}", finding.problem)
    return newest


def _check_artifact(walk: Walk, version: ModelVersion, run: TrainingRun) -> None:
    place = f"{version.model_id}@{version.version}"
    artifacts = {} if run.result is None else run.result.artifacts
    if version.manifest_digest not in artifacts.values():
        walk.report(place, f"run {run.run_id} has no artifact {version.manifest_digest}")
    try:
        entries = read_manifest(walk.services.store, version.manifest_digest).entries
    except (StoreError, InvalidManifest) as error:
        walk.report(f"artifact of {place}", str(error))
        return
    for entry in entries:
        _check_blob(walk, f"artifact of {place}, {entry.name}", entry.sha256)


def _check_blob(walk: Walk, place: str, digest: str) -> None:
    try:
        with walk.services.store.open(digest):
            pass
    except StoreError as error:
        walk.report(place, str(error))


def _snapshots(walk: Walk, run: TrainingRun) -> tuple[FeatureSnapshot, ...]:
    """The snapshots that the version was trained on; every dataset version below them is looked up."""
    services = walk.services
    snapshots = tuple(services.catalog.snapshot(services.principal, i) for i in run.facts.inputs)
    pinned = {(i.dataset, i.version, i.content_digest) for s in snapshots for i in s.inputs}
    for dataset, version, content in run.facts.datasets:
        if (dataset, version, content) not in pinned:
            walk.report(f"{dataset} version {version}", f"run {run.run_id} pins it, and none of its snapshots does")
        found = walk.version(dataset, version)
        if found is not None and found.content_digest != content:
            message = f"run {run.run_id} pinned content {content}, the catalog says {found.content_digest}"
            walk.report(f"{dataset} version {version}", message)
    return snapshots


def _detail(walk: Walk, prediction: Prediction, version: ModelVersion) -> Detail | None:
    """The prediction's document. Raises `FeaturesDiffer` when this tree computes other features."""
    place = f"document of prediction {prediction.prediction_id}"
    try:
        detail = read_detail(walk.services, prediction.detail_digest)
    except (StoreError, InvalidManifest) as error:
        walk.report(place, str(error))
        return None
    here = {"contract_digest": contract_digest(walk.pipeline), "code_digest": code_digest(walk.pipeline)}
    for what, digest in here.items():
        if detail.facts[what] != digest:
            raise FeaturesDiffer(
                f"the prediction was computed with feature {what} {detail.facts[what]}, this tree has {digest}",
                f"check out the tree of feature set version {detail.facts['feature_set_version']}",
            )
    if detail.facts["artifact_digest"] != version.manifest_digest:
        walk.report(place, f"names artifact {detail.facts['artifact_digest']}, not {version.manifest_digest}")
    asked = row_digests(detail.requests.drop_columns([GROUP]).slice(prediction.row, 1))
    if [f"sha256:{d.hex()}" for d in asked] != [prediction.request_digest]:
        walk.report(f"{place}, row {prediction.row + 1}", "the request is not the recorded one")
    kept = row_digests(detail.values.slice(prediction.row, 1))
    if [f"sha256:{d.hex()}" for d in kept] != [prediction.feature_row_digest]:
        walk.report(f"{place}, row {prediction.row + 1}", "the feature values are not the recorded ones")
    return detail


def _group_of(detail: Detail | None, prediction: Prediction) -> tuple[DetailGroup | None, int]:
    """The prediction's group, and the position of its row among the group's rows."""
    if detail is None:
        return None, 0
    number = detail.requests.column(GROUP).to_pylist()[prediction.row]
    return detail.groups[number], detail.group_rows(number).index(prediction.row)


def _request(detail: Detail | None, prediction: Prediction) -> dict[str, Any]:
    if detail is None:
        return {}
    row = detail.requests.slice(prediction.row, 1).to_pylist()[0]
    return {name: value for name, value in row.items() if name != GROUP}


def _check_output(
    walk: Walk, prediction: Prediction, version: ModelVersion, detail: Detail, row: pa.Table, score: Score
) -> None:
    """What the catalog says was answered, what the document recorded, and what the model answers now, to the bit."""
    place = f"prediction {prediction.prediction_id}, output"
    recorded = detail.outputs[prediction.row]
    if recorded != prediction.output:
        walk.report(place, f"the catalog says {prediction.output}, recorded was {recorded}")
    said = recorded.get("probability") if isinstance(recorded, Mapping) else None
    try:
        now = float(score(walk.services, version, row)[0])
    except HeadwayError as error:
        walk.report(place, f"it cannot be scored again: {error.message}")
        return
    if now != said:
        walk.report(place, f"{version.model_id}@{version.version} answers {now!r}, recorded was {said!r}")


@dataclass(frozen=True)
class _Recomputed:
    """A prediction's group, computed again: `row` is the prediction's own, `tables` the rows of each source."""

    plan: FeaturePlan
    row: pa.Table
    labels: pa.Table
    cells: Mapping[str, Cells]
    tables: Mapping[str, pa.Table]


def _recompute(
    walk: Walk, prediction: Prediction, detail: Detail, group: DetailGroup, index: int, reads: list[ReadVersion]
) -> _Recomputed:
    """Compute the prediction's group from what was read again, and compare."""
    spec = walk.pipeline.spec
    released: dict[str, list[PinnedVersion]] = {s: [] for s in _sources_of(spec)}
    for read in reads:
        released.setdefault(read.pinned.source, []).append(PinnedVersion(read.version, read.pinned.quarantine_digest))
    inputs = PinnedInputs(
        {s: tuple(v) for s, v in released.items()}, dict(group.skipped), dict(group.absent), dict(group.seen)
    )
    # By identity: groups of single rows may be equal.
    number = next(i for i, g in enumerate(detail.groups) if g is group)
    rows = detail.values.take(pa.array(detail.group_rows(number)))
    labels = without_outcome(spec, rows.select(list(spec.label_inputs())))
    plan = compile_plan(walk.pipeline)
    computed = SnapshotBuilder(walk.services, walk.pipeline, plan).compute(labels, inputs)
    again = computed.table.slice(index, 1)
    if [f"sha256:{d.hex()}" for d in row_digests(again)] != [prediction.feature_row_digest]:
        _report_features(walk, prediction, again, detail.values.slice(prediction.row, 1))
    tables = {s: _table_of(spec, s, reads) for s in released}
    return _Recomputed(plan, again, labels.inputs, computed.cells, tables)


def _origins(
    spec: PipelineSpec, again: _Recomputed, index: int, reads: list[ReadVersion], only: str | None, shown: int
) -> Iterator[FeatureOrigin]:
    """The rows of each feature."""
    chosen = select_rows(spec, again.plan, again.labels, index, again.tables, again.cells)
    for name in spec.feature_names():
        if only in (None, name):
            yield _origin(spec, again.plan, name, again.row, chosen.get(name), again.tables, reads, shown)


def _sources_of(spec: PipelineSpec) -> list[str]:
    used = [v.source for v in spec.features.views.values()] + [c.source for c in spec.features.custom.values()]
    return list(dict.fromkeys(used))


def _table_of(spec: PipelineSpec, source: str, reads: Sequence[ReadVersion]) -> pa.Table:
    """Rows of a source in the order in which the plan got them."""
    tables = [r.table.take(pa.array(r.kept)) for r in reads if r.pinned.source == source and len(r.kept)]
    if not tables:
        return arrow_schema(spec.sources[source]).empty_table()
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def _report_features(walk: Walk, prediction: Prediction, again: pa.Table, recorded: pa.Table) -> None:
    differing = [n for n in again.column_names if row_digests(again.select([n])) != row_digests(recorded.select([n]))]
    for name in differing or ["row"]:
        walk.report(
            f"prediction {prediction.prediction_id}, feature {name}",
            "recomputed from the recorded dataset versions it has another value than recorded",
        )


def _origin(
    spec: PipelineSpec,
    plan: FeaturePlan,
    name: str,
    values: pa.Table,
    chosen: Selection | None,
    tables: Mapping[str, pa.Table],
    reads: Sequence[ReadVersion],
    shown: int,
) -> FeatureOrigin:
    beside = companions(spec)[name]
    event = values.column(f"{beside}__event_time").cast(pa.int64())[0].as_py()
    rows: tuple[RawRow, ...] = ()
    digest: str | None = None
    if chosen is not None:
        digests = [d for r in reads if r.pinned.source == chosen.source for d in (r.digests[i] for i in r.kept)]
        whole = b"".join(sorted(digests[i] for i in chosen.rows))
        digest = f"sha256:{hashlib.sha256(whole).hexdigest()}"
        rows = tuple(_raw_rows(spec, plan, name, chosen, tables[chosen.source], digests, reads, shown))
    derived = spec.features.derived.get(name)
    return FeatureOrigin(
        feature=name,
        kind=_kind_of(spec, name),
        value=values.column(name)[0].as_py(),
        event_time=event,
        reason=values.column(f"{beside}__reason")[0].as_py(),
        inputs=() if derived is None else derived.inputs,
        rows=rows,
        count=0 if chosen is None else len(chosen.rows),
        digest=digest,
    )


def _kind_of(spec: PipelineSpec, name: str) -> str:
    if name in spec.features.derived:
        return "derived"
    if name in spec.features.custom:
        return "custom"
    view, _, feature = name.partition("__")
    return "window" if feature in spec.features.views[view].window_features() else "latest"


def _raw_rows(
    spec: PipelineSpec,
    plan: FeaturePlan,
    name: str,
    chosen: Selection,
    table: pa.Table,
    digests: Sequence[bytes],
    reads: Sequence[ReadVersion],
    shown: int,
) -> Iterator[RawRow]:
    """The newest rows first: they weigh most with people."""
    view = name.partition("__")[0]
    declared = spec.features.views.get(view) if name not in spec.features.custom else None
    times = clock_of(spec.sources[chosen.source], declared).times(table)
    owners = [r for r in reads if r.pinned.source == chosen.source]
    owner = np.repeat(np.arange(len(owners)), [len(r.kept) for r in owners])
    newest = sorted(chosen.rows.tolist(), key=lambda i: (-int(times.event[i]), i))
    for position in newest[:shown]:
        read = owners[int(owner[position])]
        yield RawRow(
            dataset=read.pinned.dataset,
            version=read.pinned.version,
            partition=read.version.partition,
            identity=identity_of(spec, chosen.source, table, position),
            digest=f"sha256:{digests[position].hex()}",
            event_time=int(times.event[position]),
            available_time=int(times.available[position]),
        )
