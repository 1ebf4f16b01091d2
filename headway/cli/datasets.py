"""`headway datasets`: what a file means, what is in the catalog, and why something is kept back."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headway.errors import HeadwayError
from headway.home import Settings

if TYPE_CHECKING:
    import pyarrow as pa

    from headway.catalog import DatasetVersion
    from headway.datasets.ingest import IngestOutcome
    from headway.datasets.reading import Delivery
    from headway.datasets.refusal import RejectedRow
    from headway.services import Services

F = TypeVar("F", bound=Callable[..., None])

_FILE = click.Path(exists=True, path_type=Path)
_SHOWN = 20
_PIPE_WIDTH = 200


class UnknownReference(HeadwayError):
    """A text that names no dataset version."""


def _source_options(function: F) -> F:
    source = click.option("--source", "-s", required=True, help="A source that the pipeline declares.")
    return _pipeline_option(source(_json_option(function)))


_pipeline_option = click.option("--pipeline", "-p", required=True, help="Name under pipelines/, or path of a folder.")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group("datasets")
def command() -> None:
    """Look at sources, canonical rows and dataset versions."""


@command.command("canonical")
@_source_options
@click.argument("files", nargs=-1, required=True, type=_FILE, metavar="FILE...")
@click.option("--limit", type=click.IntRange(min=0), default=_SHOWN, show_default=True, help="Rows to print; 0: all.")
@click.pass_context
def canonical(
    ctx: click.Context, pipeline: str, source: str, as_json: bool, files: tuple[Path, ...], limit: int
) -> None:
    """Show the canonical rows of FILE, the rows that are rejected and why, and schema drift.

    Exits 1 when rows are rejected.
    """
    delivery = _read(pipeline, source, files)
    rows = _rows(delivery.table if limit == 0 else delivery.table.slice(0, limit))
    if as_json:
        _print_json(
            {
                "rows_read": delivery.rows_read,
                "rows_total": delivery.table.num_rows,
                "rows": rows,
                "rejected": [_rejected(r) for r in delivery.rejected],
                "drift": [{"file": d.file, "column": d.column, "what": d.what} for d in delivery.drift],
                "schema": {f.name: str(f.type) for f in delivery.table.schema},
            }
        )
    else:
        _print_table(f"{source}: {len(rows)} of {delivery.table.num_rows} canonical rows", rows)
        for drift in delivery.drift:
            click.echo(f"drift: {drift.file}: {drift.column!r} {drift.what}")
        _print_rejected(delivery.rejected)
    ctx.exit(1 if delivery.rejected else 0)


@command.command("digest")
@_source_options
@click.argument("files", nargs=-1, required=True, type=_FILE, metavar="FILE...")
def digest(pipeline: str, source: str, as_json: bool, files: tuple[Path, ...]) -> None:
    """Print the content digest of FILE: what names a dataset version, whatever the order or encoding of its rows.

    A partitioned source has one version per partition; theirs are listed after the digest of the whole.
    """
    from headway.datasets.ingest import partition_digests
    from headway.datasets.schema import schema_hash

    delivery = _read(pipeline, source, files)
    whole, parts = partition_digests(delivery)
    if as_json:
        rows = delivery.table.num_rows
        _print_json(
            {"content_digest": whole, "schema_hash": schema_hash(delivery.spec), "rows": rows, "partitions": parts}
        )
        return
    click.echo(whole)
    for key, found in parts.items():
        click.echo(f"  {key}  {found}")


@command.command("ingest")
@_source_options
@click.argument("files", nargs=-1, type=_FILE, metavar="[FILE...]")
@click.option("--partition", "partitions", multiple=True, help="Only this partition; may be given several times.")
@click.pass_context
def ingest_command(
    ctx: click.Context,
    pipeline: str,
    source: str,
    as_json: bool,
    files: tuple[Path, ...],
    partitions: tuple[str, ...],
) -> None:
    """Ingest the declared files of a source, or FILE, into validated dataset versions.

    Exits 1 when a partition is quarantined, retired or failed.
    """
    from headway.datasets.ingest import UnexpectedEmpty, ingest
    from headway.loading import load_pipeline

    loaded = load_pipeline(pipeline)
    with _services(ctx) as services:
        services.catalog.ensure_tenant(services.principal)
        outcomes = ingest(services, loaded, source, partitions or None, files=files or None)
    if as_json:
        _print_json([_outcome(o) for o in outcomes])
    else:
        _print_outcomes(outcomes)
        if not partitions and any(isinstance(o.error, UnexpectedEmpty) for o in outcomes):
            click.echo(
                "hint: the calendar has partitions without rows in the delivery; ingest only some with --partition, or "
                "declare those in which nothing is published under `expected_empty`"
            )
    ctx.exit(1 if any(o.standing != "released" for o in outcomes) else 0)


@command.command("list")
@_pipeline_option
@click.option("--source", "-s", help="List this source's partitions instead of a line per source.")
@_json_option
@click.pass_context
def list_command(ctx: click.Context, pipeline: str, source: str | None, as_json: bool) -> None:
    """List the current dataset versions of a pipeline."""
    from headway.datasets.reading import source_spec
    from headway.datasets.rows import dataset_name
    from headway.loading import load_pipeline

    loaded = load_pipeline(pipeline)
    if source is not None:
        source_spec(loaded, source)
    names = [source] if source is not None else sorted(loaded.spec.sources)
    with _services(ctx) as services:
        current = {
            name: list(services.catalog.current_many(services.principal, dataset_name(loaded.name, name)).values())
            for name in names
        }
    lines = [_summary(name, versions) for name, versions in current.items()]
    if source is not None:
        lines = [_line(version) for version in sorted(current[source], key=lambda v: v.partition)]
    if as_json:
        _print_json(lines)
    else:
        _print_table(loaded.name if source is None else f"{loaded.name}/{source}", lines)


@command.command("show")
@click.argument("reference", metavar="PIPELINE/SOURCE[/PARTITION|@VERSION]")
@_json_option
@click.pass_context
def show(ctx: click.Context, reference: str, as_json: bool) -> None:
    """Show one dataset version: status, evidence, reasons, and the rows that are kept back with their identities."""
    from headway.datasets.rows import quarantine

    with _services(ctx) as services:
        version = _find(services, reference)
        report = None
        if version.evidence is not None:
            report = json.loads(services.store.get_bytes(version.evidence.report_digest))
        kept_back = quarantine(services, version)
    rows = [] if kept_back is None else _rows(kept_back)
    if as_json:
        _print_json({**_line(version), **_details(version), "report": report, "kept_back": rows})
        return
    for name, value in {**_line(version), **_details(version)}.items():
        click.echo(f"{name:16} {value if isinstance(value, str | int) else json.dumps(value)}")
    if report is not None:
        _print_table("expectations", [_rule(r) for r in report.get("expectations", [])])
    if rows:
        _print_table(f"kept back: {len(rows)}", rows[:_SHOWN])


def _services(ctx: click.Context) -> "AbstractContextManager[Services]":
    from headway.services import open_services

    settings = ctx.find_object(Settings)
    if settings is None:
        raise UnknownReference("no settings are loaded", "call this through `headway`")
    return open_services(settings)


def _read(pipeline: str, source: str, files: Sequence[Path]) -> "Delivery":
    from headway.datasets.reading import read_delivery
    from headway.loading import load_pipeline

    return read_delivery(load_pipeline(pipeline), source, files)


def _find(services: "Services", reference: str) -> "DatasetVersion":
    dataset, at, number = reference.partition("@")
    if at and number.isdigit():
        return services.catalog.version(services.principal, dataset, int(number))
    parts = reference.split("/", 2)
    if len(parts) < 2:
        raise UnknownReference(
            f"{reference!r} names no dataset version", "write pipeline/source, /partition or @version"
        )
    found = services.catalog.current(services.principal, "/".join(parts[:2]), parts[2] if len(parts) == 3 else "")
    if found is None:
        raise UnknownReference(f"there is no version of {reference!r}", "`headway datasets list` shows what there is")
    return found


def _outcome(outcome: "IngestOutcome") -> dict[str, Any]:
    return {
        "dataset": outcome.dataset,
        "partition": outcome.partition,
        "status": outcome.status,
        "standing": outcome.standing,
        "reason": outcome.reason,
        "version": None if outcome.version is None else outcome.version.version,
        "content_digest": outcome.content_digest,
        "rows": outcome.rows,
        "rows_rejected": outcome.rows_rejected,
        "rows_quarantined": outcome.rows_quarantined,
        "exact_duplicates": outcome.exact_duplicates,
        "event_times": _span(outcome.event_times),
        "window": _span(outcome.window),
        "expectations": list(outcome.expectations),
        "rejected": [_rejected(r) for r in outcome.rejected],
        "drift": list(outcome.drift),
        "seconds": round(outcome.seconds, 4),
    }


def _span(times: tuple[int, int] | None) -> list[str] | None:
    from headway.datasets.zones import iso

    return None if times is None else [iso(times[0]), iso(times[1])]


def _rejected(row: "RejectedRow") -> dict[str, Any]:
    return {
        "file": row.file,
        "row": row.row,
        "column": row.column,
        "code": row.code,
        "value": row.value,
        "detail": row.detail,
    }


def _summary(name: str, versions: Sequence["DatasetVersion"]) -> dict[str, Any]:
    status = Counter(version.status for version in versions)
    return {
        "source": name,
        "partitions": len(versions),
        "released": status["released"],
        "quarantined": status["quarantined"],
        "other": len(versions) - status["released"] - status["quarantined"],
        "rows": sum(version.rows for version in versions),
    }


def _line(version: "DatasetVersion") -> dict[str, Any]:
    return {
        "dataset": version.dataset,
        "partition": version.partition,
        "version": version.version,
        "status": version.status,
        "reason": version.status_reason,
        "rows": version.rows,
        "content_digest": version.content_digest,
    }


def _details(version: "DatasetVersion") -> dict[str, Any]:
    return {
        "schema_hash": version.schema_hash,
        "privacy": version.privacy,
        "source_digest": version.source_digest,
        "manifest_digest": version.manifest_digest,
        "metadata": dict(version.metadata),
    }


def _rule(result: Mapping[str, Any]) -> dict[str, Any]:
    names = ("number", "type", "columns", "severity", "passed", "looked_at", "passed_over", "failing", "why")
    return {name: ", ".join(result[name]) if name == "columns" else result[name] for name in names}


def _rows(table: "pa.Table") -> list[dict[str, Any]]:
    return [{name: _plain(value) for name, value in row.items()} for row in table.to_pylist()]


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    return value.isoformat() if isinstance(value, date) else value


def _print_json(document: object) -> None:
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def _print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    click.echo(title)
    if not rows:
        return
    table = Table(*(str(name) for name in rows[0]))
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    # A pipe has no width, and a table squeezed into 80 columns loses its texts.
    console = Console()
    console = console if console.is_terminal else Console(width=_PIPE_WIDTH)
    console.print(table, markup=False)


def _print_rejected(rejected: Sequence["RejectedRow"]) -> None:
    for row in rejected[:_SHOWN]:
        click.echo(f"rejected: {row}")
    if len(rejected) > _SHOWN:
        click.echo(f"rejected: ... and {len(rejected) - _SHOWN} more")


def _print_outcomes(outcomes: Sequence["IngestOutcome"]) -> None:
    counted = Counter(outcome.status for outcome in outcomes)
    shown = [o for o in outcomes if len(outcomes) <= _SHOWN or o.standing != "released" or o.rows_quarantined]
    _print_table(
        ", ".join(f"{count} {status}" for status, count in sorted(counted.items())) or "no partition in the delivery",
        [
            {
                "partition": o.partition,
                "status": o.status,
                "rows": o.rows,
                "rejected": o.rows_rejected,
                "quarantined": o.rows_quarantined,
                "reason": o.reason,
            }
            for o in shown
        ],
    )
    for line in dict.fromkeys(line for outcome in outcomes for line in outcome.drift):
        click.echo(f"drift: {line}")
    for outcome in outcomes:
        _print_rejected(outcome.rejected)
