"""Answers and explanations as JSON; times are ISO 8601 in UTC."""

from __future__ import annotations

from typing import Any, cast

from headway.catalog.registry_facts import EndpointEvent
from headway.catalog.run_facts import TrainingRun
from headway.datasets.zones import iso
from headway.serving.explain import Explanation, FeatureOrigin
from headway.serving.predict import Answer


def answer_document(answer: Answer) -> dict[str, Any]:
    """One answer."""
    return {
        "prediction_id": answer.prediction_id,
        "recorded": answer.prediction_id is not None,
        "model": answer.model_id,
        "model_version": answer.model_version,
        "artifact_digest": answer.artifact_digest,
        "endpoint": answer.endpoint_id,
        "endpoint_epoch": answer.endpoint_epoch,
        "probability": answer.probability,
        "observed_at": iso(answer.observed),
        "feature_status": answer.feature_status,
        "degraded": list(answer.degraded),
        "features": {
            view: {
                "time": None if f.time is None else iso(f.time),
                "age_seconds": f.age,
                "status": f.status,
                "reason": f.reason,
                "incomplete": f.incomplete,
            }
            for view, f in answer.views.items()
        },
    }


def explanation_document(found: Explanation) -> dict[str, Any]:
    """One explanation."""
    prediction, run = found.prediction, found.run
    return {
        "prediction": {
            "prediction_id": prediction.prediction_id,
            "at": iso(prediction.at),
            "endpoint": prediction.endpoint_id,
            "endpoint_epoch": prediction.endpoint_epoch,
            "arm": prediction.arm,
            "output": prediction.output,
            "status": prediction.status,
            "feature_status": prediction.feature_status,
            "feature_row_digest": prediction.feature_row_digest,
            "request_digest": prediction.request_digest,
            "detail_digest": prediction.detail_digest,
            "request": {n: _plain(v) for n, v in found.request.items()},
        },
        "endpoint_event": None if found.event is None else _event_document(found.event),
        "model_version": {
            "model": found.version.model_id,
            "version": found.version.version,
            "kind": found.version.kind,
            "artifact_digest": found.version.manifest_digest,
            "contract_hash": found.version.facts.contract_hash,
            "feature_set_version": found.version.facts.feature_set_version,
        },
        "gates": [
            {"gate": g.gate, "verdict": g.verdict, "reason": g.reason, "statement_digest": g.statement_digest}
            for g in found.gates
        ],
        "training_run": _run_document(run),
        "snapshots": [
            {"partition": s.partition, "snapshot_id": s.snapshot_id, "content_digest": s.content_digest}
            for s in found.snapshots
        ],
        "training_datasets": [{"dataset": d, "version": v, "content_digest": c} for d, v, c in run.facts.datasets],
        "inputs": [
            {"dataset": i.dataset, "version": i.version, "content_digest": i.content_digest} for i in found.inputs
        ],
        "skipped": {s: list(p) for s, p in found.skipped.items()},
        "absent": {s: list(p) for s, p in found.absent.items()},
        "features": [_origin_document(f) for f in found.features],
        "rows_checked": found.rows_checked,
        "verified": not found.problems,
        "problems": [{"place": p.place, "message": p.message} for p in found.problems],
    }


def _event_document(event: EndpointEvent) -> dict[str, Any]:
    return {
        "endpoint": event.endpoint_id,
        "epoch": event.epoch,
        "operation": event.operation,
        "actor": event.actor,
        "at": iso(event.at),
        "stable": event.row.stable,
        "promotion_statement": None if event.evidence is None else event.evidence.promotion_statement,
    }


def _run_document(run: TrainingRun) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "identity_digest": run.identity_digest,
        "as_of": run.facts.partition,
        "code_digest": run.facts.code_digest,
        "code_dirty": run.facts.code_dirty,
        "environment_digest": run.facts.environment_digest,
        "config_digest": run.facts.config_digest,
        "seed": run.facts.seed,
        "attempts": [{"attempt": a.attempt, "state": a.state, "reason": a.reason} for a in run.attempts],
        "worker_seconds": run.worker_seconds,
    }


def _origin_document(origin: FeatureOrigin) -> dict[str, Any]:
    return {
        "feature": origin.feature,
        "kind": origin.kind,
        "value": _plain(origin.value),
        "event_time": None if origin.event_time is None else iso(origin.event_time),
        "reason": origin.reason,
        "inputs": list(origin.inputs),
        "row_count": origin.count,
        "rows_digest": origin.digest,
        "rows": [
            {
                "dataset": r.dataset,
                "version": r.version,
                "partition": r.partition,
                "identity": dict(r.identity),
                "row_digest": r.digest,
                "event_time": iso(r.event_time),
                "available_time": iso(r.available_time),
            }
            for r in origin.rows
        ],
    }


def _plain(value: Any) -> Any:  # noqa: ANN401
    """Times and dates as text; everything else as it is."""
    return value.isoformat().replace("+00:00", "Z") if hasattr(value, "isoformat") else cast("Any", value)
