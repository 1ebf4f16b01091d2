"""`headway status`: how every pipeline stands, the clock and the settings in force."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from headway.home import Settings

if TYPE_CHECKING:
    from headway.declaration import PipelineSpec
    from headway.services import Services


@click.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--settings", "only_settings", is_flag=True, help="Only the settings; the catalog is not opened.")
@click.pass_obj
def command(settings: Settings, as_json: bool, only_settings: bool) -> None:
    """Show how every pipeline stands, the clock, and every setting with the value in force and where it comes from.

    Passwords are blanked.
    """
    from headway.world import clock_in_force

    clock = clock_in_force(settings.clock_file)
    pipelines = [] if only_settings else _pipelines(settings)
    if as_json:
        rows = [{"variable": row.variable, "value": row.value, "origin": row.origin} for row in settings.effective]
        document = {"clock": clock, "settings": rows, "unknown": list(settings.unknown), "pipelines": pipelines}
        click.echo(json.dumps(document, indent=2))
        return
    for row in pipelines:
        click.echo(row["pipeline"])
        for name, value in row.items():
            if name != "pipeline":
                click.echo(f"  {name:<14}  {_words(value)}")
    if pipelines:
        click.echo()
    click.echo(f"{clock}\n")
    width = max(len(row.variable) for row in settings.effective)
    for row in settings.effective:
        click.echo(f"{row.variable:<{width}}  {row.origin:<11}  {row.value}")


def _pipelines(settings: Settings) -> list[dict[str, Any]]:
    from headway.loading import DEFS_FILE, PIPELINES_ROOT, load_pipeline
    from headway.services import open_services

    names = sorted(file.parent.name for file in PIPELINES_ROOT.glob(f"*/{DEFS_FILE}"))
    with open_services(settings) as services:
        return [_state(services, load_pipeline(name).spec) for name in names]


def _state(services: Services, spec: PipelineSpec) -> dict[str, Any]:
    catalog, principal = services.catalog, services.principal
    state: dict[str, Any] = {"pipeline": spec.name}
    state["datasets"] = {
        source: dict(Counter(v.status for v in catalog.current_many(principal, f"{spec.name}/{source}").values()))
        for source in spec.sources
    }
    state["snapshots"] = dict(Counter(s.status for s in catalog.current_snapshots(principal, spec.name).values()))
    if spec.training is None:
        return state
    state["runs"] = dict(Counter(run.status for run in catalog.runs(principal, spec.name)))
    versions = [v for v in catalog.model_versions(principal) if v.facts.pipeline == spec.name]
    state["model_versions"] = len(versions)
    state["endpoints"] = {
        e.endpoint_id: {"stable": e.stable, "previous": e.previous, "epoch": e.epoch}
        for e in catalog.endpoints(principal)
        if e.model_id in {v.model_id for v in versions}
    }
    state["budget"] = _budget(services, spec.name)
    return state


def _budget(services: Services, budget_id: str) -> dict[str, Any]:
    from headway.catalog.budgets import period_of

    period = period_of(services.catalog.clock())
    found = services.catalog.budget(services.principal, budget_id, period)
    return {} if found is None else {"period": period, **vars(found)}


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items()) or "none"
    return str(value)
