"""Answers requests: features, scores, and a record of all of it before anybody sees an answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter, time_ns
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.catalog.registry_facts import Endpoint, ModelVersion, PredictionBatch, PredictionFacts
from headway.datasets.digest import row_digests
from headway.errors import HeadwayError
from headway.features.contract import code_digest, contract_digest
from headway.loading import Pipeline
from headway.registry.keys import Trust
from headway.registry.promote import verify_served
from headway.services import Services
from headway.serving.detail import RowDigests, put_detail, verified_inputs
from headway.serving.features import ComputedRequests, Freshness, compute_features
from headway.serving.scoring import model_inputs, score_rows
from trainer.blobs import Json

if TYPE_CHECKING:
    from collections.abc import Sequence

OK, DEGRADED = "ok", "degraded"
# From best to worst: a row is as good as its worst view.
_STATUSES = ("fresh", "stale", "missing")

Score = Callable[[Services, ModelVersion, pa.Table], NDArray[np.float64]]


class NothingServed(HeadwayError):
    """There is no endpoint to ask, or it serves no version."""


class FeaturesDiffer(HeadwayError):
    """The tree's features are not those that the version was trained on."""


@dataclass(frozen=True)
class Target:
    """The version that answers, and the endpoint that it answers for; without one nothing is recorded."""

    version: ModelVersion
    endpoint: Endpoint | None


@dataclass(frozen=True)
class Answer:
    """One prediction. `views` says per feature view when its newest value is from, how old it is and how good.

    `observed` is the instant as of which features were computed (microseconds UTC). `prediction_id` is None for a dry
    look, which is not recorded. `degraded` lists every view whose source was behind or not read as a whole, as
    `<view>:<why>`; a view that is missing for want of rows is not degraded, because training had such rows as well.
    """

    prediction_id: str | None
    model_id: str
    model_version: int
    artifact_digest: str
    endpoint_id: str | None
    endpoint_epoch: int | None
    observed: int
    probability: float
    views: Mapping[str, Freshness]
    degraded: tuple[str, ...]

    @property
    def feature_status(self) -> str:
        """The worst status of its views."""
        return max((f.status for f in self.views.values()), key=_STATUSES.index)

    @property
    def feature_as_of(self) -> int | None:
        """The newest event time that its features know."""
        return max((f.time for f in self.views.values() if f.time is not None), default=None)

    @property
    def status(self) -> str:
        """`ok`, or `degraded` when a view is incomplete."""
        return DEGRADED if self.degraded else OK


def endpoint_target(services: Services, trust: Trust, endpoint_id: str) -> Target:
    """The stable version of an endpoint, which a signed promotion put there.

    Raises:
        NothingServed: there is no such endpoint, or nothing was promoted to it.
        NotPromoted: no promotion to this endpoint and epoch verifies with these public keys.
        StoreError: the store lacks the promotion's statement.
    """
    endpoint = services.catalog.endpoint(services.principal, endpoint_id)
    if endpoint is None or endpoint.stable is None:
        known = [e.endpoint_id for e in services.catalog.endpoints(services.principal)]
        what = f"there is no endpoint {endpoint_id!r}" if endpoint is None else f"{endpoint_id} serves no version"
        raise NothingServed(what, f"promote a version first; endpoints are {known}")
    verify_served(services, trust, endpoint)
    version = services.catalog.model_version(services.principal, endpoint.model_id, endpoint.stable)
    return Target(version, endpoint)


def version_target(services: Services, model_id: str, version: int) -> Target:
    """A registered version, promoted or not, for a dry look. Raises the catalog's error for an unknown one."""
    return Target(services.catalog.model_version(services.principal, model_id, version), None)


def find_endpoint(services: Services, pipeline: str | None) -> str:
    """The one endpoint there is, of a pipeline when it is named.

    Raises:
        NothingServed: there is none, or several.
    """
    found: list[str] = []
    for endpoint in services.catalog.endpoints(services.principal):
        if endpoint.stable is None:
            continue
        version = services.catalog.model_version(services.principal, endpoint.model_id, endpoint.stable)
        if pipeline in (None, version.facts.pipeline):
            found.append(endpoint.endpoint_id)
    if len(found) != 1:
        of = f" of pipeline {pipeline}" if pipeline else ""
        what = f"{len(found)} endpoints{of} serve a version: {found}" if found else f"no endpoint{of} serves a version"
        raise NothingServed(what, "say which with --endpoint" if found else "promote a version first")
    return found[0]


def predict(
    services: Services, pipeline: Pipeline, requests: pa.Table, target: Target, score: Score = score_rows
) -> list[Answer]:
    """Answer requests in their order. With an endpoint, all of it is recorded in one command before it is returned.

    Args:
        services: catalog, store and principal.
        pipeline: the tree's declaration and functions, which must be those of the version.
        requests: what `read_requests` gave.
        target: who answers.
        score: gives one probability per row of feature values.

    Raises:
        FeaturesDiffer: the version was trained on features that this tree does not compute.
        InputAltered: the rows of a dataset version are not those that its content digest names.
        HeadwayError: as `compute_features`, `score_rows` and `Catalog.record_predictions`.
    """
    started = perf_counter()
    feature_facts = _require_same_features(services, pipeline, target.version)
    computed = compute_features(services, pipeline, requests)
    model_inputs(target.version.contract, computed.values)
    digests = verified_inputs(services, computed)
    scores = score(services, target.version, computed.values)
    ids = new_ids(len(computed)) if target.endpoint is not None else [None] * len(computed)
    answers = [_answer(target, computed, row, float(scores[row]), ids[row]) for row in range(len(computed))]
    if target.endpoint is not None:
        _record(services, target, target.endpoint, computed, digests, answers, feature_facts, started)
    return answers


def new_ids(count: int) -> list[str]:
    """Fresh UUIDs of version 7 in ascending order (RFC 9562, 5.7 and 6.2: milliseconds, then a random counter)."""
    milliseconds = time_ns() // 1_000_000
    counter = secrets.randbits(73)
    found: list[str] = []
    for _ in range(count):
        counter += 1 + secrets.randbits(32)
        high, low = counter >> 62, counter & (2**62 - 1)
        bits = (milliseconds & (2**48 - 1)) << 80 | 7 << 76 | (high & 0xFFF) << 64 | 2 << 62 | low
        text = f"{bits:032x}"
        found.append(f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}")
    return found


def _require_same_features(services: Services, pipeline: Pipeline, version: ModelVersion) -> dict[str, Json]:
    facts = version.facts
    if facts.pipeline != pipeline.name:
        raise FeaturesDiffer(
            f"{facts.model_id}@{version.version} belongs to pipeline {facts.pipeline}, not {pipeline.name}",
            "name the model's own pipeline",
        )
    trained = services.catalog.feature_set(services.principal, facts.feature_set, facts.feature_set_version)
    here = {"contract": contract_digest(pipeline), "code": code_digest(pipeline)}
    for what, digest in (("contract", trained.contract_digest), ("code", trained.code_digest)):
        if here[what] != digest:
            raise FeaturesDiffer(
                f"{facts.model_id}@{version.version} was trained on features with {what} {digest}, this tree computes "
                f"{here[what]}",
                f"check out the tree of feature set version {facts.feature_set_version}, or train a new version",
            )
    return {
        "feature_set": facts.feature_set,
        "feature_set_version": facts.feature_set_version,
        "contract_digest": here["contract"],
        "code_digest": here["code"],
    }


def _answer(
    target: Target, computed: ComputedRequests, row: int, probability: float, prediction_id: str | None
) -> Answer:
    views = {view: found[row] for view, found in computed.freshness.items()}
    return Answer(
        prediction_id=prediction_id,
        model_id=target.version.model_id,
        model_version=target.version.version,
        artifact_digest=target.version.manifest_digest,
        endpoint_id=None if target.endpoint is None else target.endpoint.endpoint_id,
        endpoint_epoch=None if target.endpoint is None else target.endpoint.epoch,
        observed=int(computed.observed[row]),
        probability=probability,
        views=views,
        degraded=tuple(f"{v}:{f.incomplete}" for v, f in views.items() if f.incomplete),
    )


def _record(
    services: Services,
    target: Target,
    endpoint: Endpoint,
    computed: ComputedRequests,
    digests: RowDigests,
    answers: Sequence[Answer],
    feature_facts: dict[str, Json],
    started: float,
) -> None:
    facts: dict[str, Json] = {
        **feature_facts,
        "pipeline": target.version.facts.pipeline,
        "model_id": target.version.model_id,
        "model_version": target.version.version,
        "artifact_digest": target.version.manifest_digest,
        "endpoint_id": endpoint.endpoint_id,
        "endpoint_epoch": endpoint.epoch,
    }
    outputs: list[dict[str, Json]] = [
        {"probability": answer.probability, "degraded": list(answer.degraded)} for answer in answers
    ]
    detail, blobs = put_detail(services, computed, digests, facts, outputs)
    features, asked = row_digests(computed.values), row_digests(computed.requests)
    latency = int((perf_counter() - started) * 1_000_000)
    records = tuple(
        PredictionFacts(
            prediction_id=str(answer.prediction_id),
            feature_as_of=answer.feature_as_of,
            feature_status=answer.feature_status,
            feature_row_digest=f"sha256:{features[row].hex()}",
            request_digest=f"sha256:{asked[row].hex()}",
            output=outputs[row],
            arm="stable",
            status=answer.status,
            latency_us=latency,
            detail_digest=detail,
            row=row,
        )
        for row, answer in enumerate(answers)
    )
    batch = PredictionBatch(endpoint.endpoint_id, endpoint.epoch, target.version.version, records, blobs)
    services.catalog.record_predictions(services.principal, None, batch)
