"""What the catalog says that Dagster should show: one fact per asset and partition, and the results of checks.

Only what the catalog holds is told. The step's own numbers (seconds, plots, curves) went with Dagster's storage; they
come back with the next materialization.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg

from assets.keys import (
    dataset_key,
    drift_key,
    labels_key,
    model_version_key,
    predictions_key,
    quality_key,
    snapshot_key,
    training_key,
)
from headway.loading import Pipeline
from headway.services import Services

if TYPE_CHECKING:
    from headway.catalog.facts import DatasetVersion, SnapshotState
    from headway.catalog.monitoring_facts import Report
    from headway.catalog.registry_facts import ModelVersion
    from headway.catalog.run_facts import TrainingRun

NO_PREDICTIONS = "no_predictions"
_MOST_RUNS = 100_000
_UNSETTLED = ("registered", "validating")


@dataclass(frozen=True)
class Fact:
    """What one partition ("" for an asset without partitions) should show.

    `accepted` are the identities that are right besides `identity`. A fact that is not `required` may be missing in
    Dagster on a sound system: a refusal, of which no step may have been told.
    """

    partition: str
    identity: str
    metadata: dict[str, Any]
    data_version: str
    accepted: frozenset[str] = frozenset()
    required: bool = True


@dataclass(frozen=True)
class AssetFacts:
    """The facts of one asset.

    `identified_by` is the metadata entry that holds the identity; `exists` says whether the catalog has a row of an
    identity for a partition, in force or not. `empty` is the status of a partition that needs no row.
    """

    key: dg.AssetKey
    identified_by: str
    facts: dict[str, Fact]
    exists: Callable[[str, str], bool]
    checks: tuple[dg.AssetCheckEvaluation, ...] = ()
    empty: str = ""


def pipeline_facts(services: Services, pipeline: Pipeline) -> list[AssetFacts]:
    """All assets of a pipeline of which the catalog holds the truth, upstream first."""
    spec = pipeline.spec
    found = [_dataset(services, pipeline, source) for source in spec.sources]
    found.append(_snapshots(services, spec.name))
    if spec.training is not None:
        found += [_runs(services, spec.name), _versions(services, pipeline)]
    if spec.monitoring is not None:
        found += _weeks(services, spec.name)
    return found


def _by_partition(facts: Iterator[Fact]) -> dict[str, Fact]:
    return {fact.partition: fact for fact in facts}


def _check(
    key: dg.AssetKey, name: str, passed: bool, text: str, *, blocking: bool = True, **metadata: object
) -> dg.AssetCheckEvaluation:
    severity = dg.AssetCheckSeverity.ERROR if blocking else dg.AssetCheckSeverity.WARN
    return dg.AssetCheckEvaluation(
        asset_key=key,
        check_name=name,
        passed=passed,
        description=text,
        severity=severity,
        blocking=blocking,
        metadata=metadata,  # pyright: ignore[reportArgumentType] - scalars, which Dagster wraps
    )


# --- dataset versions ---------------------------------------------------------------------------------------------


def _dataset(services: Services, pipeline: Pipeline, source: str) -> AssetFacts:
    catalog, principal = services.catalog, services.principal
    dataset, declared = f"{pipeline.name}/{source}", pipeline.spec.sources[source]
    key = dataset_key(pipeline.name, source)
    current = {
        p: v for p, v in catalog.current_many(principal, dataset).items() if v.status not in (*_UNSETTLED, "erased")
    }
    known = {(v.partition, v.content_digest) for v in catalog.versions(principal, dataset)}
    bad = [p for p, v in current.items() if v.status != "released"]
    limit = declared.quality.max_quarantined_partitions if len(current) > 1 else 0.0
    text = f"{len(bad)} of {len(current)} partitions not released {', '.join(filter(None, bad[:10]))}".strip()
    rows = sum(v.rows for v in current.values())
    checks = (
        _check(key, "quality", len(bad) <= limit * len(current), text, rows=rows, partitions=len(current)),
        _check(key, "schema_contract", True, "every version of the catalog has the declared columns"),
        _check(key, "privacy", True, f"{declared.privacy.disposition}: treated before storing"),
    )
    return AssetFacts(
        key,
        "content_digest",
        _by_partition(_dataset_fact(p, v) for p, v in current.items()),
        lambda partition, identity: (partition, identity) in known,
        checks if current else (),
    )


def _dataset_fact(partition: str, version: "DatasetVersion") -> Fact:
    from headway.datasets.zones import iso

    evidence = version.evidence
    metadata: dict[str, Any] = {
        "status": version.status,
        "reason": version.status_reason,
        "version": version.version,
        "dagster/partition_row_count" if partition else "dagster/row_count": version.rows,
        "rows_quarantined": 0 if evidence is None else evidence.quarantined_rows,
        "content_digest": version.content_digest,
        "suite_digest": "" if evidence is None else evidence.suite_digest,
    }
    if version.event_time_min is not None and version.event_time_max is not None:
        metadata |= {"event_time/first": iso(version.event_time_min), "event_time/last": iso(version.event_time_max)}
    return Fact(partition, version.content_digest, metadata, version.content_digest)


# --- snapshots ----------------------------------------------------------------------------------------------------


def _snapshots(services: Services, name: str) -> AssetFacts:
    from assets.feature_snapshot import CHECKS

    catalog, principal = services.catalog, services.principal
    key = snapshot_key(name)
    states = catalog.current_snapshots(principal, name)
    published = sum(s.status == "published" for s in states.values())
    checks = tuple(_snapshot_check(key, check, states, published) for check in CHECKS)
    return AssetFacts(
        key,
        "snapshot_id",
        _by_partition(_snapshot_fact(p, s) for p, s in states.items()),
        lambda partition, identity: identity != "" and identity in catalog.snapshot_ids(principal, identity),
        checks if published else (),
    )


def _snapshot_fact(partition: str, state: "SnapshotState") -> Fact:
    metadata: dict[str, Any] = {"status": state.status, "reason": ": ".join([state.reason, ", ".join(state.blocking)])}
    snapshot = state.snapshot
    if snapshot is None:
        refused = {**metadata, "dagster/partition_row_count": 0}
        return Fact(partition, "", refused, "refused", required=False)
    metadata |= {
        "reason": state.reason,
        "dagster/partition_row_count": snapshot.facts.rows,
        **{f"excluded/{reason}": count for reason, count in snapshot.facts.excluded.items()},
        "snapshot_id": snapshot.snapshot_id,
        "content_digest": snapshot.content_digest,
        "proof_digest": snapshot.facts.proof_digest,
        "feature_set_version": snapshot.feature_set_version,
        "inputs": len(snapshot.inputs),
    }
    return Fact(partition, snapshot.snapshot_id, metadata, snapshot.content_digest)


def _snapshot_check(
    key: dg.AssetKey, name: str, states: "dict[str, SnapshotState]", published: int
) -> dg.AssetCheckEvaluation:
    """Nothing is published unless every check held; a refusal that a check caused begins with its name."""
    broken = [p for p, s in states.items() if s.status == "refused" and s.reason.startswith(name)]
    text = f"failed in {', '.join(broken[:10])}" if broken else f"held in {published} partitions"
    return _check(key, name, not broken, text, published=published, refused=len(states) - published)


# --- training runs and model versions -----------------------------------------------------------------------------


def _runs(services: Services, name: str) -> AssetFacts:
    runs = [
        r
        for r in services.catalog.runs(services.principal, name, limit=_MOST_RUNS)
        if r.status == "succeeded" and r.result is not None
    ]
    of_month: dict[str, list[TrainingRun]] = {}
    for run in runs:
        of_month.setdefault(run.facts.partition, []).append(run)
    key = training_key(name)
    newest = {p: max(found, key=lambda r: (r.last.ended_at or 0, r.run_id)) for p, found in of_month.items()}
    facts = _by_partition(
        _run_fact(p, run, frozenset(r.run_id for r in of_month[p])) for p, run in sorted(newest.items())
    )
    checks = _run_checks(services, key, max(newest.values(), key=lambda r: r.last.ended_at or 0)) if newest else ()
    return AssetFacts(
        key,
        "run_id",
        facts,
        lambda partition, identity: partition in facts and _accepts(facts[partition], identity),
        checks,
    )


def _accepts(fact: Fact, identity: str) -> bool:
    return identity == fact.identity or identity in fact.accepted


def _run_fact(partition: str, run: "TrainingRun", accepted: frozenset[str]) -> Fact:
    assert run.result is not None
    metadata: dict[str, Any] = {
        "status": run.status,
        "run_id": run.run_id,
        "attempts": len(run.attempts),
        "snapshots": len(run.facts.inputs),
        "worker_seconds": run.worker_seconds,
        "code_digest": run.facts.code_digest,
        "environment_digest": run.facts.environment_digest,
        "config_digest": run.facts.config_digest,
        "seed": run.facts.seed,
        **{f"artifact/{name}": digest for name, digest in run.result.artifacts.items()},
        **{f"metric/{n}": v for n, v in run.result.metrics.items() if isinstance(v, int | float)},
    }
    artifacts = run.result.artifacts
    return Fact(partition, run.run_id, metadata, artifacts.get("network") or next(iter(artifacts.values())), accepted)


def _run_checks(services: Services, key: dg.AssetKey, run: "TrainingRun") -> tuple[dg.AssetCheckEvaluation, ...]:
    """The checks of the run that ended last: its files are read again."""
    from headway.training.describe import non_finite
    from headway.training.results import verify_stored

    assert run.result is not None
    damaged, broken = verify_stored(services, run), non_finite(run.result.metrics)
    said = damaged or "the run succeeded, and every file of its artifacts is what its manifest says"
    return (
        _check(key, "finished", not damaged, said, run_id=run.run_id),
        _check(key, "finite_metrics", not broken, ", ".join(broken), metrics=len(run.result.metrics)),
    )


def _versions(services: Services, pipeline: Pipeline) -> AssetFacts:
    from headway.registry.dossier import newest_results

    catalog, principal = services.catalog, services.principal
    of_month: dict[str, list[ModelVersion]] = {}
    for version in catalog.model_versions(principal, pipeline.name):
        of_month.setdefault(catalog.run(principal, version.run_id).facts.partition, []).append(version)
    key = model_version_key(pipeline.name)
    facts = {p: _version_fact(services, pipeline, p, found) for p, found in sorted(of_month.items())}
    checks: tuple[dg.AssetCheckEvaluation, ...] = ()
    if of_month:
        last = max((v for found in of_month.values() for v in found), key=lambda v: v.version)
        results = newest_results(services, last)
        checks = tuple(_gate(key, gate, results.get(gate), last.kind) for gate in _gates(pipeline))
    exists = lambda partition, identity: partition in facts and _accepts(facts[partition], identity)  # noqa: E731
    return AssetFacts(key, "manifest_digest", facts, exists, checks)


def _gates(pipeline: Pipeline) -> list[str]:
    promotion = pipeline.spec.promotion
    return [] if promotion is None else [gate.gate for gate in promotion.gates]


def _version_fact(services: Services, pipeline: Pipeline, partition: str, found: "Sequence[ModelVersion]") -> Fact:
    from headway.registry.dossier import newest_results

    last = max(found, key=lambda v: v.version)
    results = newest_results(services, last)
    refused = [gate for gate, result in results.items() if result.verdict != "pass"]
    metadata: dict[str, Any] = {
        "version": last.version,
        "kind": last.kind,
        "passed": not refused and bool(results),
        "status": "retired" if last.retired else "judged",
        "manifest_digest": last.manifest_digest,
        "run_id": last.run_id,
        "refused": ", ".join(refused) or "none",
    }
    accepted = frozenset(v.manifest_digest for v in found)
    return Fact(partition, last.manifest_digest, metadata, last.manifest_digest, accepted)


def _gate(key: dg.AssetKey, gate: str, result: Any, kind: str) -> dg.AssetCheckEvaluation:  # noqa: ANN401
    if result is None:
        return _check(key, gate, True, f"does not apply to a version of kind {kind}")
    told = f"{result.verdict}: {result.reason}"
    return _check(
        key, gate, result.verdict == "pass", told, statement_digest=result.statement_digest, attempt=result.attempt
    )


# --- weeks --------------------------------------------------------------------------------------------------------


def _weeks(services: Services, name: str) -> list[AssetFacts]:
    """The four weekly assets; the report about most answers speaks for its week, as on the page."""
    reports = services.catalog.reports(services.principal, name)
    stages = {"predictions": predictions_key, "labels": labels_key, "quality": quality_key, "drift": drift_key}
    found: list[AssetFacts] = []
    for kind, key_of in stages.items():
        of_week: dict[str, list[Report]] = {}
        for report in reports:
            if report.kind == kind:
                of_week.setdefault(report.window, []).append(report)
        facts = {week: _week_fact(week, mine) for week, mine in sorted(of_week.items())}
        checks = tuple(_week_checks(services, key_of(name), kind, of_week)) if of_week else ()
        found.append(AssetFacts(key_of(name), "report_id", facts, _is_report(services), checks, NO_PREDICTIONS))
    return found


def _is_report(services: Services) -> Callable[[str, str], bool]:
    from headway.catalog.errors import UnknownReport

    def exists(partition: str, identity: str) -> bool:
        try:
            return services.catalog.report(services.principal, identity).window == partition
        except UnknownReport:
            return False

    return exists


def _week_fact(week: str, reports: "Sequence[Report]") -> Fact:
    from trainer.blobs import digest_json

    report = max(reports, key=lambda r: (r.metrics.get("answers") or r.metrics.get("rows") or 0, r.model_version or 0))
    digests = [r.document_digest for r in reports]
    metadata: dict[str, Any] = {
        "status": report.verdict,
        "reason": report.reason,
        "endpoint": report.endpoint_id,
        "model_version": report.model_version or 0,
        "report_id": report.report_id,
        **{name: value for name, value in report.metrics.items() if value is not None},
    }
    data_version = digests[0] if len(digests) == 1 else digest_json(digests)
    return Fact(week, report.report_id, metadata, data_version, frozenset(r.report_id for r in reports))


def _week_checks(
    services: Services, key: dg.AssetKey, kind: str, of_week: "dict[str, list[Report]]"
) -> Iterator[dg.AssetCheckEvaluation]:
    if kind == "predictions":
        from headway.monitoring.answers import shipping_balance

        balance = shipping_balance(services)
        said = f"{balance.records:,} records shipped and recorded once"
        yield _check(key, "completeness", not balance.problems, "; ".join(balance.problems[:5]) or said)
    elif kind == "labels":
        complete = sum(r.verdict == "complete" for reports in of_week.values() for r in reports)
        # Which of the others are wanting and which are young is a matter of the day; the next step says it.
        said = f"{complete} of {len(of_week)} weeks complete when they were reported"
        yield _check(key, "completeness", True, said, blocking=False)
    elif kind == "drift":
        for name in ("data_incident", "drift"):
            raised = [f"{w}@{r.model_version}" for w, reports in of_week.items() for r in reports if r.verdict == name]
            said = ", ".join(raised[:10]) or f"none in {len(of_week)} weeks"
            yield _check(key, name, not raised, said, blocking=False, raised=len(raised))
