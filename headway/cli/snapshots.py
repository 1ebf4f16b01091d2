"""`headway snapshots`: build, list, show and verify feature snapshots."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from headway.catalog.clock import utc_text
from headway.errors import HeadwayError
from headway.home import Settings
from headway.words import no_single

if TYPE_CHECKING:
    from headway.catalog import FeatureSnapshot
    from headway.services import Services

_PIPELINE = click.option(
    "--pipeline", "-p", "reference", required=True, help="Name under pipelines/, or path of a folder."
)
_SNAPSHOT = click.argument("snapshot_id", metavar="ID")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


class UnclearSnapshot(HeadwayError):
    """A text with which no snapshot's id begins, or more than one."""


@click.group("snapshots")
def command() -> None:
    """Build, look at and verify feature snapshots."""


@command.command("build")
@_PIPELINE
@click.option(
    "--partition", "partitions", multiple=True, help="May be given several times; none for a pipeline with text."
)
@_JSON
@click.pass_obj
def build(settings: Settings, reference: str, partitions: tuple[str, ...], as_json: bool) -> None:
    """Build, prove and publish the snapshots of PARTITIONS, as the Dagster asset does.

    Exits 1 when one is refused or fails.
    """
    from headway.features.snapshot import SnapshotBuilder, build_range
    from headway.loading import load_pipeline
    from headway.services import open_services
    from headway.text.snapshot import TextSnapshotBuilder

    pipeline = load_pipeline(reference)
    if (pipeline.spec.text is None) != bool(partitions):
        raise click.UsageError(
            "give at least one --partition" if pipeline.spec.text is None else f"{pipeline.name} has no partitions"
        )
    with open_services(settings) as services:
        if pipeline.spec.text is None:
            outcomes = build_range(SnapshotBuilder(services, pipeline), partitions)
        else:
            outcomes = [TextSnapshotBuilder(services, pipeline).build()]
    if as_json:
        rows = [
            {
                "partition": o.partition,
                "status": o.status,
                "reason": o.reason,
                "snapshot_id": o.snapshot.snapshot_id if o.snapshot else None,
                "content_digest": o.snapshot.content_digest if o.snapshot else None,
                "rows": o.rows,
                "excluded": dict(o.excluded),
            }
            for o in outcomes
        ]
        click.echo(json.dumps({"snapshots": rows}, indent=2))
    else:
        for o in outcomes:
            snapshot_id = o.snapshot.snapshot_id if o.snapshot else "-"
            click.echo(f"{o.partition}  {o.status:<10}  {o.rows:>7} rows  {snapshot_id}  {o.reason}")
    if any(o.status in ("refused", "failed") for o in outcomes):
        raise SystemExit(1)


@command.command("list")
@_PIPELINE
@_JSON
@click.pass_obj
def list_(settings: Settings, reference: str, as_json: bool) -> None:
    """Show the state of every partition that was ever built or refused."""
    from headway.loading import load_pipeline
    from headway.services import open_services

    with open_services(settings) as services:
        states = services.catalog.current_snapshots(services.principal, load_pipeline(reference).name)
    rows = [
        {
            "partition": partition,
            "status": state.status,
            "reason": state.reason,
            "blocking": list(state.blocking),
            "snapshot_id": state.snapshot.snapshot_id if state.snapshot else None,
            "rows": state.snapshot.rows if state.snapshot else None,
        }
        for partition, state in sorted(states.items())
    ]
    if as_json:
        click.echo(json.dumps({"snapshots": rows}, indent=2))
        return
    for row in rows:
        note = row["reason"] if row["status"] == "refused" else row["snapshot_id"]
        click.echo(f"{row['partition']}  {row['status']:<10}  {row['rows'] or 0:>7} rows  {note}")
    click.echo(f"{len(rows)} partitions")


@command.command("show")
@_SNAPSHOT
@click.option("--rows", default=0, show_default=True, help="Print that many rows of values as well.")
@_JSON
@click.pass_obj
def show(settings: Settings, snapshot_id: str, rows: int, as_json: bool) -> None:
    """Show what a snapshot rests on: feature set, inputs, watermarks, digests, proof.

    ID is a snapshot's id or its first characters, with or without sha256:.
    """
    from headway.features.reading import read_values
    from headway.services import open_services

    with open_services(settings) as services:
        snapshot = _find(services, snapshot_id)
        values = read_values(services, snapshot).slice(0, rows) if rows else None
    document: dict[str, Any] = {
        "snapshot_id": snapshot.snapshot_id,
        "pipeline": snapshot.pipeline,
        "partition": snapshot.partition,
        "feature_set_version": snapshot.feature_set_version,
        "rows": snapshot.rows,
        "observed_from": _instant(snapshot.facts.as_of_min),
        "observed_to": _instant(snapshot.facts.as_of_max),
        "content_digest": snapshot.content_digest,
        "proof_digest": snapshot.facts.proof_digest,
        "excluded": dict(snapshot.facts.excluded),
        "watermarks": {s: _instant(w) for s, w in snapshot.facts.source_watermarks.items()},
        "inputs": [f"{i.dataset} version {i.version}" for i in snapshot.inputs],
        "skipped_inputs": snapshot.facts.metadata.get("skipped_inputs"),
    }
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    for name, value in document.items():
        lines = value if isinstance(value, list) else [value]
        for index, line in enumerate(lines):
            click.echo(f"{name if index == 0 else '':<20}  {line}")
    if values is not None:
        click.echo(values.to_pandas().to_string())


@command.command("verify")
@_SNAPSHOT
@click.option("--pipeline", "-p", "reference", help="Its folder; none: the snapshot's name under pipelines/.")
@_JSON
@click.pass_obj
def verify(settings: Settings, snapshot_id: str, reference: str | None, as_json: bool) -> None:
    """Recompute a snapshot from its pinned inputs, compare every digest, prove it again. Exits 1 when it differs.

    ID is a snapshot's id or its first characters, with or without sha256:.
    """
    from headway.features.verify import verify_snapshot
    from headway.loading import load_pipeline
    from headway.services import open_services
    from headway.text.snapshot import verify_text

    with open_services(settings) as services:
        snapshot = _find(services, snapshot_id)
        pipeline = load_pipeline(reference or snapshot.pipeline)
        again = verify_snapshot if pipeline.spec.text is None else verify_text
        found = again(services, pipeline, snapshot)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "snapshot_id": snapshot.snapshot_id,
                    "verified": not found.problems,
                    "problems": list(found.problems),
                    "recorded": snapshot.content_digest,
                    "stored": found.stored_digest,
                    "recomputed": found.recomputed_digest,
                    "proof": found.proof.to_json(),
                },
                indent=2,
            )
        )
    else:
        click.echo(f"recorded    {snapshot.content_digest}")
        click.echo(f"stored      {found.stored_digest}")
        click.echo(f"recomputed  {found.recomputed_digest}")
        click.echo(f"proof       {found.proof.sentence()}")
        for problem in found.problems:
            click.echo(f"PROBLEM     {problem}")
        click.echo("verified" if not found.problems else f"NOT verified: {len(found.problems)} problems")
    if found.problems:
        raise SystemExit(1)


def _find(services: Services, reference: str) -> FeatureSnapshot:
    """The one snapshot whose id begins with a text.

    Raises:
        UnclearSnapshot: there is none, or more than one.
    """
    digits = reference.removeprefix("sha256:")
    found = services.catalog.snapshot_ids(services.principal, f"sha256:{digits}")
    if len(found) != 1:
        more = "give more characters; " if found else ""
        remedy = f"{more}`headway snapshots list --pipeline P` shows the ids"
        raise UnclearSnapshot(no_single("snapshot", found, reference), remedy)
    return services.catalog.snapshot(services.principal, found[0])


def _instant(moment: int | None) -> str | None:
    return None if moment is None else utc_text(moment)
