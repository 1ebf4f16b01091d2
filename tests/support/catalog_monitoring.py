"""Small, valid answers, labels, reports and retrain requests, and a child process that records one and is killed."""

from typing import Any

from support.catalog_child import die_at
from support.catalog_facts import ALICE, Ticker, blob, digest
from support.registry_facts import (
    BUDGET,
    ENDPOINT,
    MODEL,
    PIPELINE,
    UNIT,
    judge,
    prepare_inputs,
    run_facts,
    statement,
    succeed,
    version_facts,
)
from support.registry_facts import POLICY as GATE_POLICY

from headway.catalog import Principal, open_catalog
from headway.catalog.catalog import Catalog
from headway.catalog.monitoring_facts import (
    DecisionFacts,
    LabelFacts,
    Report,
    ReportFacts,
    RetrainFacts,
    SegmentProgress,
    Shipment,
)
from headway.catalog.registry_facts import PredictionBatch, PredictionFacts, PromotionEvidence

DAY = 86_400_000_000
# The world's month of every request; the catalog's own clock is in another one.
PERIOD = "2013-09"
NOW = 1_378_000_000_000_000
LIMIT = 1_000
COMMANDS = ("ship", "label", "open", "close")


def serve(catalog: Catalog, who: Principal = ALICE) -> None:
    """Promote version 1 of the model to the endpoint, at epoch 1."""
    run = succeed(catalog, run_facts(prepare_inputs(catalog, who)), who)
    version = catalog.register_model_version(who, None, version_facts(run))
    policy = catalog.set_gate_policy(who, None, MODEL, GATE_POLICY)
    for gate in policy.gates(version.kind):
        judge(catalog, version, gate, who=who)
    promote(catalog, ENDPOINT, who)


def promote(catalog: Catalog, endpoint_id: str, who: Principal = ALICE) -> None:
    """Promote version 1, which passed its gates, to another endpoint, at its epoch 1."""
    said = {result.gate: result.statement_digest for result in catalog.gate_results(who, MODEL, 1)}
    promotion = statement(catalog.model_version(who, MODEL, 1).manifest_digest, endpoint_id, "promoter")
    catalog.add_attestation(who, None, promotion)
    evidence = PromotionEvidence(1, said, promotion.statement_digest, 5)
    catalog.promote_immediate(who, None, endpoint_id, MODEL, 1, expected_epoch=None, evidence=evidence)


def answer(name: str, **changes: Any) -> PredictionFacts:  # noqa: ANN401
    """An online answer with ids of its own, asked at NOW."""
    values: dict[str, Any] = {
        "prediction_id": name,
        "feature_as_of": NOW - 5,
        "feature_status": "fresh",
        "feature_row_digest": digest("features", name),
        "request_digest": digest("request", name),
        "output": {"probability": 0.25, "degraded": []},
        "arm": "stable",
        "status": "ok",
        "latency_us": 900,
        "detail_digest": blob("detail").digest,
        "row": 0,
        "asked_at": NOW,
        "observed_at": NOW - 1,
        "caller_id": f"caller-{name}",
        "event_key": f"event-{name}",
        "score": 0.25,
        "segments": {"origin": "JFK", "carrier": None},
        "source": "online",
    }
    return PredictionFacts(**values | changes)


def batch(*records: PredictionFacts, **changes: Any) -> PredictionBatch:  # noqa: ANN401
    """Answers of version 1 at epoch 1."""
    values: dict[str, Any] = {
        "endpoint_id": ENDPOINT,
        "endpoint_epoch": 1,
        "model_version": 1,
        "records": records,
        "blobs": (blob("detail"),),
    }
    return PredictionBatch(**values | changes)


def shipment(*records: PredictionFacts, start: int = 0, end: int = 100, **changes: Any) -> Shipment:  # noqa: ANN401
    """Answers of one range of a log segment."""
    values: dict[str, Any] = {
        "server": "main",
        "segment": "000001",
        "from_offset": start,
        "to_offset": end,
        "records": len(records),
        "torn": 0,
        "dropped": 0,
    }
    return Shipment(SegmentProgress(**values | changes), (batch(*records),) if records else ())


def label(name: str, prediction: str | None = "p1", **changes: Any) -> LabelFacts:  # noqa: ANN401
    """A label that the system sent a day later."""
    values: dict[str, Any] = {
        "label_id": name,
        "endpoint_id": ENDPOINT,
        "prediction_id": prediction,
        "caller_id": None,
        "event_key": None,
        "value": True,
        "source": "auto",
        "observed_at": NOW + DAY,
        "received_at": NOW + DAY + 5,
        "actor": "feed",
        "reason": None,
    }
    return LabelFacts(**values | changes)


def report_facts(window: str = "2013-09-02", name: object = 1, **changes: Any) -> ReportFacts:  # noqa: ANN401
    """A drift report about a week of version 1."""
    document = blob("report", window, name)
    values: dict[str, Any] = {
        "kind": "drift",
        "endpoint_id": ENDPOINT,
        "model_version": 1,
        "window": window,
        "start": NOW,
        "end": NOW + 7 * DAY,
        "verdict": "drift",
        "reason": "dep_delay moved",
        "document_digest": document.digest,
        "metrics": {"auc": 0.7, "n": 812, "lift": None},
        "made_at": NOW + 8 * DAY,
        "blobs": (document, blob("plot", window, name)),
    }
    return ReportFacts(**values | changes)


def retrain_facts(evidence: Report | None, cause: object = 1, **changes: Any) -> RetrainFacts:  # noqa: ANN401
    """A request that is ready and costs 300 seconds."""
    values: dict[str, Any] = {
        "pipeline": PIPELINE,
        "endpoint_id": ENDPOINT,
        "model_version": 1,
        "fingerprint": "drift:dep_delay",
        "cause_digest": digest("cause", cause),
        "cause": "drift",
        "evidence": () if evidence is None else (evidence.report_id,),
        "reason": "persistent drift",
        "expected_gain": 0.01,
        "cost_seconds": 300,
        "budget_id": BUDGET,
        "period": PERIOD,
        "as_of": None,
        "due_at": NOW + 30 * DAY,
        "state": "ready",
        "made_at": NOW,
    }
    return RetrainFacts(**values | changes)


def decision(what: str = "wait", **changes: Any) -> DecisionFacts:  # noqa: ANN401
    """A decision about the pipeline."""
    values: dict[str, Any] = {
        "pipeline": PIPELINE,
        "endpoint_id": ENDPOINT,
        "decision": what,
        "reason": "cooldown",
        "fingerprint": "f1",
        "made_at": NOW,
    }
    return DecisionFacts(**values | changes)


def prepare(catalog: Catalog, command: str) -> None:
    """Make what the command needs, where a version is served."""
    catalog.set_budget(ALICE, None, BUDGET, PERIOD, UNIT, LIMIT)
    catalog.record_report(ALICE, None, report_facts())
    if command in ("ship", "close"):
        # A label waits for the answer that is shipped.
        catalog.add_labels(ALICE, None, (label("l1"),))
    if command == "label":
        catalog.record_shipment(ALICE, None, shipment(answer("p1")))
    if command == "close":
        opened = run(catalog, "open", None)
        move = {"expected_epoch": 1, "state": "running", "as_of": "2013-10-01", "reason": "its time came"}
        catalog.move_retrain(ALICE, None, opened.request_id, **move)


def run(catalog: Catalog, command: str, key: str | None) -> Any:  # noqa: ANN401
    """Run the command, or run it again."""
    match command:
        case "ship":
            return catalog.record_shipment(ALICE, key, shipment(answer("p1"), answer("p2")))
        case "label":
            return catalog.add_labels(ALICE, key, (label("l1"), label("l2", "unknown")))
        case "open":
            [evidence] = catalog.reports(ALICE, ENDPOINT)
            return catalog.open_retrain_request(ALICE, key, retrain_facts(evidence))
        case "close":
            [opened] = catalog.retrain_requests(ALICE)
            end: dict[str, Any] = {"state": "promoted", "reason": "it passed", "cost_seconds": 120.5}
            return catalog.move_retrain(ALICE, key, opened.request_id, expected_epoch=2, **end)
        case _:
            raise ValueError(command)


def main(url: str, command: str, point: str, key: str | None) -> None:
    """Run the command in this process, with the probe in the catalog."""
    run(open_catalog(url, Ticker(), die_at(point)), command, key)
