"""`headway retrain`: requests to train again, what was decided and why, a person's word."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from headway.home import Settings
from headway.words import counted

if TYPE_CHECKING:
    from headway.catalog.monitoring_facts import RetrainDecision, RetrainRequest
    from headway.services import Services

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_REQUEST = click.argument("reference", metavar="REQUEST")
_DECISIONS = 20


@click.group("retrain")
def command() -> None:
    """Look at retraining requests and decisions, approve or reject them.

    REQUEST is a request's id, or its first characters. The sensor `retrain_on_drift` opens requests and moves them.
    """


@command.command("list")
@click.option("--pipeline", "-p", help="Only of this pipeline.")
@_JSON
@click.pass_obj
def list_requests(settings: Settings, pipeline: str | None, as_json: bool) -> None:
    """List requests, newest first, then what was decided last, also what was decided not to do."""
    from headway.services import open_services

    with open_services(settings) as services:
        requests = services.catalog.retrain_requests(services.principal, pipeline)
        decisions = _decisions(services, pipeline)
    if as_json:
        shown = {"requests": [_row(r) for r in requests], "decisions": [_decided(d) for d in decisions]}
        click.echo(json.dumps(shown, indent=2))
        return
    for request in requests:
        row = _row(request)
        click.echo(
            f"{row['request_id']}  {row['pipeline']}  {row['cause']:<7}  as_of {row['as_of'] or '-':<10}  "
            f"{row['state']}  {row['made_at']}\n  {row['reason']}"
        )
    click.echo(counted(len(requests), "request"))
    if decisions:
        click.echo("\nDecided:")
    for decision in decisions:
        click.echo(f"{_instant(decision.made_at)}  {decision.pipeline}  {decision.decision}: {decision.reason}")


@command.command("show")
@_REQUEST
@_JSON
@click.pass_obj
def show(settings: Settings, reference: str, as_json: bool) -> None:
    """Show a request: its cause, evidence, cost, every move and who made it."""
    from headway.monitoring.retrain import find_request
    from headway.services import open_services

    with open_services(settings) as services:
        request = find_request(services, reference)
        events = services.catalog.retrain_events(services.principal, request.request_id)
        reports = [services.catalog.report(services.principal, r) for r in request.facts.evidence]
    facts = request.facts
    document: dict[str, Any] = {
        **_row(request),
        "opened_because": facts.reason,
        "model_version": facts.model_version,
        "fingerprint": facts.fingerprint,
        "cause_digest": facts.cause_digest,
        "budget": facts.budget_id,
        "period": facts.period,
        "reserved_seconds": facts.cost_seconds,
        "run_id": request.run_id,
        "dagster_run_id": request.dagster_run_id,
        "evidence": [
            {"report_id": r.report_id, "kind": r.kind, "week": r.window, "verdict": r.verdict, "reason": r.reason}
            for r in sorted(reports, key=lambda r: (r.window, r.kind))
        ],
        "moves": [
            {"at": _instant(e.at), "actor": e.actor, "state": e.request.state, "reason": e.request.reason}
            for e in events
        ],
    }
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    for name, value in document.items():
        for index, line in enumerate(value if isinstance(value, list) else [value]):
            click.echo(f"{name if index == 0 else '':<18}  {_words(line)}")


@command.command("approve")
@_REQUEST
@click.option("--reason", required=True, help="Why; it is kept with the request.")
@click.pass_obj
def approve_request(settings: Settings, reference: str, reason: str) -> None:
    """Let a request go on that waits for a person."""
    from headway.monitoring.retrain import approve, find_request
    from headway.services import open_services

    with open_services(settings) as services:
        request = approve(services, find_request(services, reference), reason)
    click.echo(f"{request.request_id} {request.state}: the sensor goes on with it")


@command.command("reject")
@_REQUEST
@click.option("--reason", required=True, help="Why; it is kept with the request.")
@click.pass_obj
def reject_request(settings: Settings, reference: str, reason: str) -> None:
    """End a request that does not run; its budget comes back."""
    from headway.monitoring.retrain import find_request, reject
    from headway.services import open_services

    with open_services(settings) as services:
        request = reject(services, find_request(services, reference), reason)
    click.echo(f"{request.request_id} {request.state}")


@command.command("why")
@click.option("--pipeline", "-p", default="flight_delay", show_default=True, help="A pipeline's name or folder.")
@_JSON
@click.pass_obj
def why(settings: Settings, pipeline: str, as_json: bool) -> None:
    """Show what would be decided now, with the answer of every rule. Nothing is opened, moved or started."""
    from headway.loading import load_pipeline
    from headway.monitoring.retrain import present_decision
    from headway.monitoring.retraining import rules_document
    from headway.services import open_services

    with open_services(settings) as services:
        decision = present_decision(services, load_pipeline(pipeline))
    if as_json:
        document = {
            "decision": decision.action,
            "reason": decision.reason,
            "sentence": decision.sentence,
            "fingerprint": decision.fingerprint,
            "cause_digest": decision.cause_digest,
            "rules": rules_document(decision),
        }
        click.echo(json.dumps(document, indent=2))
        return
    for rule in decision.rules:
        click.echo(f"{'ok' if rule.passed else 'no':<4}{rule.code:<30}{rule.sentence}")
    click.echo(f"\n{decision.action}: {decision.sentence}")


def _decisions(services: Services, pipeline: str | None) -> list[RetrainDecision]:
    """The newest decisions, the newest first: of a pipeline, or of every pipeline that something serves of."""
    catalog, principal = services.catalog, services.principal
    names = [pipeline] if pipeline else sorted({m.pipeline for m in catalog.models(principal)})
    found = [d for name in names for d in catalog.decisions(principal, name, _DECISIONS)]
    return sorted(found, key=lambda d: (d.made_at, d.seq), reverse=True)[:_DECISIONS]


def _row(request: RetrainRequest) -> dict[str, Any]:
    facts = request.facts
    return {
        "request_id": request.request_id,
        "pipeline": request.pipeline,
        "cause": facts.cause,
        "state": request.state,
        "reason": request.reason,
        "as_of": request.as_of,
        "due_at": None if facts.due_at is None else _instant(facts.due_at),
        "made_at": _instant(facts.made_at),
        "expected_gain": facts.expected_gain,
        "cost_seconds": request.cost_seconds,
        "candidate_version": request.candidate_version,
    }


def _decided(decision: RetrainDecision) -> dict[str, Any]:
    return {
        "pipeline": decision.pipeline,
        "decision": decision.decision,
        "reason": decision.reason,
        "fingerprint": decision.fingerprint,
        "made_at": _instant(decision.made_at),
    }


def _words(value: object) -> str:
    if isinstance(value, dict):
        return "  ".join(str(v) for v in value.values() if v is not None)
    return "-" if value is None else str(value)


def _instant(moment: int) -> str:
    from headway.catalog.clock import utc_text

    return utc_text(moment)
