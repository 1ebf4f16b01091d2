"""A version's card: its metrics beside the baselines, what each gate said, what it cost and where it comes from."""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from headway.artifacts.digests import Json
from headway.catalog.clock import utc_text
from headway.catalog.registry_facts import GateResult, ModelVersion
from headway.registry import text_card
from headway.registry.dossier import newest_results
from headway.registry.judge import evaluation_report
from headway.services import Services

METRICS = ("auc", "log_loss", "calibration_error")
_BASIS = ("rows", "mature", "positives", "days", "bootstrap")
_FIRST = ("candidate", "champion")


def card(services: Services, version: ModelVersion) -> dict[str, Json]:
    """Return the card as JSON. `standing` is by recorded verdicts; `headway models verify` checks their signatures."""
    run = services.catalog.run(services.principal, version.run_id)
    report = evaluation_report(services, version)
    results = newest_results(services, version)
    return {
        "model": version.model_id,
        "version": version.version,
        "kind": version.kind,
        "as_of": version.facts.as_of,
        "manifest_digest": version.manifest_digest,
        "registered_at": utc_text(version.created_at),
        "standing": standing(services, version),
        "endpoints": cast("Json", serving(services, version)),
        "evaluation": None if report is None else {n: report[n] for n in _basis(report)},
        "looks": max((int(str(r.metrics.get("looks", 0))) for r in results.values()), default=0),
        "left_out": _left_out(results),
        "metrics": cast("Json", card_rows(services, version)),
        "segments": None if report is None else report.get("segments"),
        "gates": [_gate(result) for result in _in_order(services, version, results)],
        "cost": {
            "worker_seconds": round(run.worker_seconds, 1),
            "attempts": len(run.attempts),
            "nodes": run.facts.nodes,
        },
        "lineage": {
            "run_id": run.run_id,
            "snapshots": len(run.facts.inputs),
            "dataset_versions": len(run.facts.datasets),
            "feature_set": f"{version.facts.feature_set}@{version.facts.feature_set_version}",
            "code_digest": run.facts.code_digest,
            "code_dirty": run.facts.code_dirty,
            "environment_digest": run.facts.environment_digest,
            "config_digest": run.facts.config_digest,
            "seed": run.facts.seed,
        },
    }


def card_rows(services: Services, version: ModelVersion) -> list[dict[str, Json]]:
    """Return one row per model of the evaluation: each metric with its interval, and the candidate's gain over it."""
    report = evaluation_report(services, version)
    if report is None:
        return []
    metrics = cast("Mapping[str, Mapping[str, Json]]", report["metrics"])
    gains = cast("Mapping[str, Json]", report["gains"])
    names = [n for n in _FIRST if n in metrics] + sorted(n for n in metrics if n not in _FIRST)
    return [
        {
            "model": name,
            **{k: v for metric in _metric_names(report) for k, v in _spread(metric, metrics[name].get(metric)).items()},
            **_spread("gain", gains.get(name)),
        }
        for name in names
    ]


def card_lines(services: Services, version: ModelVersion) -> list[str]:
    """Return the card for people."""
    return list(_lines(card(services, version), evaluation_report(services, version)))


def standing(services: Services, version: ModelVersion) -> str:
    """Return where a version stands by its newest recorded verdicts: eligible, refused, not judged or retired."""
    if version.retired:
        return "retired"
    policy = services.catalog.gate_policy(services.principal, version.model_id)
    results = newest_results(services, version)
    wanted = () if policy is None else policy.gates(version.kind)
    judged = [results[gate] for gate in wanted if gate in results]
    if policy is None or not judged:
        return "not judged"
    bad = [gate for gate in wanted if gate not in results or results[gate].verdict != "pass"]
    return f"refused by {', '.join(bad)}" if bad else "eligible"


def serving(services: Services, version: ModelVersion) -> list[dict[str, Json]]:
    """Return the endpoints that name a version, and as what."""
    return [
        {"endpoint": endpoint.endpoint_id, "as": arm, "epoch": endpoint.epoch}
        for endpoint in services.catalog.endpoints(services.principal)
        if endpoint.model_id == version.model_id
        for arm, number in (("stable", endpoint.stable), ("previous", endpoint.previous))
        if number == version.version
    ]


def _in_order(services: Services, version: ModelVersion, results: Mapping[str, GateResult]) -> list[GateResult]:
    policy = services.catalog.gate_policy(services.principal, version.model_id)
    names = [] if policy is None else list(policy.gates(version.kind))
    return [results[name] for name in (*names, *sorted(set(results) - set(names))) if name in results]


def _left_out(results: Mapping[str, GateResult]) -> Json:
    newest = max(results.values(), key=lambda result: result.at, default=None)
    return [] if newest is None else newest.metrics.get("left_out", [])


def _gate(result: GateResult) -> dict[str, Json]:
    return {
        "gate": result.gate,
        "verdict": result.verdict,
        "reason": result.reason,
        "policy_version": result.policy_version,
        "statement_digest": result.statement_digest,
        "attempt": result.attempt,
        "at": utc_text(result.at),
    }


def _spread(name: str, found: Json) -> dict[str, Json]:
    values = found if isinstance(found, Mapping) else {}
    return {name: values.get("value"), f"{name}_lower": values.get("lower"), f"{name}_upper": values.get("upper")}


def _basis(report: Mapping[str, Json]) -> tuple[str, ...]:
    return text_card.BASIS if text_card.is_text(report) else _BASIS


def _metric_names(report: Mapping[str, Json]) -> tuple[str, ...]:
    return text_card.METRICS if text_card.is_text(report) else METRICS


def _lines(document: Mapping[str, Json], report: Mapping[str, Json] | None) -> Iterator[str]:
    as_of = f", as_of {document['as_of']}" if document["as_of"] else ""
    yield f"{document['model']}@{document['version']}  {document['kind']}{as_of}"
    yield f"  artifact   {document['manifest_digest']}"
    yield f"  standing   {document['standing']}"
    for place in _maps(document["endpoints"]):
        yield f"  serves     {place['endpoint']} as {place['as']} (epoch {place['epoch']})"
    evaluation = document["evaluation"]
    if report is not None and text_card.is_text(report):
        yield from text_card.evaluation_lines(report, _maps(document["metrics"]), document["looks"])
    elif isinstance(evaluation, Mapping):
        yield (
            f"  evaluated  on {evaluation['mature']:,} mature rows of {evaluation['rows']:,} over {evaluation['days']} "
            f"days; evaluation number {document['looks']} of these months"
        )
        for item in _maps(document["left_out"]):
            yield f"  left out   {item['partition']}: {item['reason']}"
        yield from _table("model", _maps(document["metrics"]))
        for column, values in _map(document["segments"]).items():
            yield from _table(f"candidate by {column}", [_segment_row(v, _map(s)) for v, s in _map(values).items()])
    gates = _maps(document["gates"])
    if gates:
        yield "  gates"
    for gate in gates:
        yield f"    {gate['verdict']:<9}  {gate['gate']}: {gate['reason']}"
    cost, lineage = _map(document["cost"]), _map(document["lineage"])
    spent = f"{cost['worker_seconds']} worker-seconds"
    yield f"  cost       {spent}, {cost['attempts']} attempt(s), {cost['nodes']} node(s)"
    dirty = " (with uncommitted changes)" if lineage["code_dirty"] else ""
    yield (
        f"  made from  run {lineage['run_id']}: {lineage['snapshots']} snapshots over {lineage['dataset_versions']} "
        f"dataset versions, feature set {lineage['feature_set']}, seed {lineage['seed']}"
    )
    yield f"  code       {lineage['code_digest']}{dirty}"


def _segment_row(value: str, segment: Mapping[str, Json]) -> dict[str, Json]:
    """A segment's row of the card: the candidate's metrics there, and its gain over the historical rate."""
    mine = _map(_map(segment.get("metrics")).get("candidate"))
    row: dict[str, Json] = {"model": f"{value} ({segment['rows']:,} rows)"}
    row |= {k: v for metric in METRICS for k, v in _spread(metric, mine.get(metric)).items()}
    return row | _spread("gain", _map(segment.get("gains")).get("historical_rate"))


def _table(title: str, rows: Sequence[Mapping[str, Json]]) -> Iterator[str]:
    gain = "candidate's AUC gain" if title == "model" else "AUC gain over the historical rate"
    yield f"    {title:<20}  {'AUC':<25}  {'log loss':<25}  {'calibration error':<25}  {gain}"
    for row in rows:
        cells = [_cell(row, metric) for metric in (*METRICS, "gain")]
        yield f"    {row['model']:<20}  {cells[0]:<25}  {cells[1]:<25}  {cells[2]:<25}  {cells[3]}".rstrip()


def _cell(row: Mapping[str, Json], name: str) -> str:
    value, lower, upper = (row[f"{name}{end}"] for end in ("", "_lower", "_upper"))
    if value is None:
        return "" if name == "gain" else "undefined"
    ends = ["?" if end is None else f"{end:.4f}" for end in (lower, upper)]
    return f"{value:.4f} [{ends[0]}, {ends[1]}]"


def _maps(value: Json) -> list[Mapping[str, Json]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _map(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else {}
