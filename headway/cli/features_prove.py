"""`headway features prove`: the leakage proof of published snapshots, run again."""

from __future__ import annotations

import json

import click

from headway.home import Settings


@click.command("prove")
@click.option("--pipeline", "-p", "reference", required=True, help="Name under pipelines/, or a folder's path.")
@click.option("--partition", "partitions", multiple=True, help="Only these; none: every published snapshot.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def command(settings: Settings, reference: str, partitions: tuple[str, ...], as_json: bool) -> None:
    """Recompute published snapshots from their pinned inputs and prove that nothing leaked.

    Exits 1 when a snapshot leaks, differs, or a partition asked for has none.
    """
    from headway.features.verify import verify_snapshot
    from headway.loading import load_pipeline
    from headway.services import open_services

    pipeline = load_pipeline(reference)
    rows: list[dict[str, object]] = []
    with open_services(settings) as services:
        states = services.catalog.current_snapshots(services.principal, pipeline.name)
        for partition in partitions or sorted(p for p, s in states.items() if s.snapshot is not None):
            state = states.get(partition)
            if state is None or state.snapshot is None:
                why = "never built" if state is None else state.reason
                rows.append({"partition": partition, "problems": [f"no published snapshot: {why}"], "proof": None})
            else:
                found = verify_snapshot(services, pipeline, state.snapshot)
                rows.append({"partition": partition, "problems": list(found.problems), "proof": found.proof.to_json()})
                if not as_json:
                    click.echo(f"{partition}  {found.proof.sentence()}")
    broken = [r for r in rows if r["problems"]]
    if as_json:
        click.echo(json.dumps({"pipeline": pipeline.name, "partitions": rows}, indent=2))
    else:
        for row in broken:
            click.echo(f"{row['partition']}  {row['problems']}")
        click.echo(f"{len(rows)} snapshots proved, {len(broken)} with problems")
    if broken or not rows:
        raise SystemExit(1)
