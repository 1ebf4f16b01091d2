"""`headway drift`: runs declared cases, and shows what reports said of an endpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headway.errors import HeadwayError
from headway.home import Settings

if TYPE_CHECKING:
    from headway.catalog.monitoring_facts import Report


class NoReports(HeadwayError):
    """Nothing was reported of an endpoint yet."""


@click.group()
def command() -> None:
    """Judge declared windows, and look at the reports of an endpoint."""


@command.command("cases")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document with every judgement.")
@click.pass_context
def cases(ctx: click.Context, file: Path, as_json: bool) -> None:
    """Judge every case in FILE and compare with what the file expects.

    Exits 1 when a verdict is another one than expected.
    """
    from headway.monitoring.cases import run_cases

    answers = run_cases(file)
    different = [a for a in answers if a["agree"] is False]
    if as_json:
        click.echo(json.dumps({"cases": answers}, indent=2))
    else:
        for answer in answers:
            click.echo(_line(answer))
        click.echo(f"{len(answers)} cases judged, {len(different)} not as expected")
    ctx.exit(1 if different else 0)


def _line(answer: dict[str, Any]) -> str:
    judged = answer["judgement"]
    mark = {True: "ok", False: "DIFFERS", None: "-"}[answer["agree"]]
    why = f": {judged['reason']}" if judged["reason"] else ""
    wanted = f" (expected {json.dumps(answer['expected'])})" if answer["agree"] is False else ""
    return f"{mark:8}{answer['name']}: {answer['verdict']}{why}{wanted}"


@command.command("show")
@click.argument("endpoint")
@click.option("--version", "model_version", type=click.IntRange(min=1), help="Reports of this model version only.")
@click.option("--week", help="One week (its Monday), with every feature.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def show(settings: Settings, endpoint: str, model_version: int | None, week: str | None, as_json: bool) -> None:
    """Show the drift reports in force of ENDPOINT, week by week, and each incident once, however long it lasted.

    Exits 2 when there are none.
    """
    from headway.services import open_services

    with open_services(settings) as services:
        found = services.catalog.reports(services.principal, endpoint, "drift", model_version)
        found = [r for r in found if week in (None, r.window)]
        if not found:
            raise NoReports(
                f"there are no drift reports of endpoint {endpoint!r}" + (f" in week {week}" if week else ""),
                "materialize drift_report for the weeks that it answered in",
            )
        documents = [json.loads(services.store.get_bytes(r.document_digest)) for r in found]
    if as_json:
        shown = [{"report_id": r.report_id, **d} for r, d in zip(found, documents, strict=True)]
        click.echo(json.dumps({"reports": shown}, indent=2))
        return
    for report, document in zip(found, documents, strict=True):
        why = f": {report.reason}" if report.reason else ""
        state = document.get("persistence", {}).get("state", "-")
        chance = f" ({document['expected_by_chance']})" if report.verdict == "drift" else ""
        click.echo(
            f"{report.window}  version {report.model_version}  {report.verdict}{why}; persistence {state}{chance}"
        )
        if week is not None:
            for line in _feature_lines(document):
                click.echo(line)
    if week is None:
        for line in _incident_lines(found, documents):
            click.echo(line)


def _incident_lines(reports: Sequence[Report], documents: Sequence[dict[str, Any]]) -> list[str]:
    """One line per incident of each version, however many weeks it lasted."""
    from headway.monitoring.incidents import Incident, episodes

    weeks: dict[int | None, list[tuple[str, list[Incident]]]] = {}
    for report, document in zip(reports, documents, strict=True):
        told = [Incident(i["kind"], i["feature"], i["detail"]) for i in document["incidents"]]
        weeks.setdefault(report.model_version, []).append((report.window, told))
    return [
        f"incident {e.kind} {e.feature}, version {version}, {e.first}"
        + (f" to {e.last}: {e.detail}" if e.windows > 1 else f": {e.detail}")
        for version, windows in weeks.items()
        for e in episodes(windows)
    ]


def _feature_lines(document: dict[str, Any]) -> list[str]:
    lines = [
        f"  incident {i['kind']} {i['feature']}: {i['detail']} {' '.join(i['days'])}" for i in document["incidents"]
    ]
    for feature in document["features"]:
        where = f" [{feature['segment']}]" if feature["segment"] else ""
        numbers = "".join(
            f"  {name} {feature[name]:.4g}" for name in ("psi", "distance", "p", "q") if feature[name] is not None
        )
        lines.append(
            f"  {feature['verdict']:13} {feature['name']}{where}  n {feature['n']}{numbers}  {feature['reason']}"
        )
    return lines
