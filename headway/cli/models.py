"""`headway models`: list, show, compare, verify and retire registered versions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headway.errors import HeadwayError
from headway.home import Settings
from headway.words import counted

if TYPE_CHECKING:
    from headway.catalog.registry_facts import ModelVersion
    from headway.registry.dossier import Checked, Dossier, Finding
    from headway.registry.keys import Trust
    from headway.services import Services

_ID = click.argument("reference", metavar="ID")
_MODEL = click.option("--model", "-m", "model_id", help="The model, when ID is a number alone.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_FOLDER = click.Path(file_okay=False, path_type=Path)
_BUNDLE = click.Path(exists=True, file_okay=False, path_type=Path)


class OtherVersion(HeadwayError):
    """A bundle of another version than the one that was asked for."""


@click.group("models")
def command() -> None:
    """List, show, compare, verify and retire registered model versions."""


@command.command("list")
@click.option("--model", "-m", "model_id", help="Only versions of this model.")
@_JSON
@click.pass_obj
def list_(settings: Settings, model_id: str | None, as_json: bool) -> None:
    """List the versions: what they are, whether their gates passed, and what they serve."""
    from headway.services import open_services

    with open_services(settings) as services:
        rows = [_line(services, v) for v in services.catalog.model_versions(services.principal, model_id)]
    if as_json:
        click.echo(json.dumps({"models": rows}, indent=2))
        return
    for row in rows:
        places = ", ".join(f"{p['as']} of {p['endpoint']}" for p in row["endpoints"])
        click.echo(
            f"{row['model']}@{row['version']}  {row['kind']:<8}  {row['as_of']}  {row['manifest_digest'][:19]}  "
            f"{row['standing']}{'; ' + places if places else ''}"
        )
    click.echo(counted(len(rows), "version"))


@command.command("show")
@_ID
@_MODEL
@_JSON
@click.pass_obj
def show(settings: Settings, reference: str, model_id: str | None, as_json: bool) -> None:
    """Show a version's card: metrics beside the baselines with intervals, gates, cost, lineage.

    ID is model@version, a version number, or the first characters of a manifest digest.
    """
    from headway.registry.card import card, card_lines
    from headway.registry.find import find_version
    from headway.services import open_services

    with open_services(settings) as services:
        version = find_version(services, reference, model_id)
        if as_json:
            click.echo(json.dumps(card(services, version), indent=2))
        else:
            click.echo("\n".join(card_lines(services, version)))


@command.command("compare")
@click.argument("references", metavar="ID ID...", nargs=-1, required=True)
@_MODEL
@_JSON
@click.pass_obj
def compare(settings: Settings, references: tuple[str, ...], model_id: str | None, as_json: bool) -> None:
    """Compare two or more versions by their own evaluations; says when those were not on the same months."""
    if len(references) < 2:
        raise click.UsageError("name two versions or more to compare; `headway models show` shows one")
    from headway.registry.find import find_version
    from headway.services import open_services

    with open_services(settings) as services:
        rows = [_compared(services, find_version(services, r, model_id)) for r in references]
    months = sorted({row["as_of"] for row in rows})
    same = len(months) == 1
    if as_json:
        click.echo(json.dumps({"same_months": same, "versions": rows}, indent=2))
        return
    for row in rows:
        measured = _measured(row)
        gains = ", ".join(f"{gain:+.4f} over {name}" for name, gain in row["gains"].items())
        click.echo(f"{row['version']}  {row['kind']:<8}  as_of {row['as_of'] or 'none'}  {measured}  {gains}")
        click.echo(f"    {row['standing']}; {row['worker_seconds']} worker-seconds, seed {row['seed']}")
    if not same:
        click.echo(f"evaluated after different as_of ({', '.join(months)}): compare gains, not AUC itself")


@command.command("verify")
@_ID
@_MODEL
@click.option("--bundle", type=_BUNDLE, help="Check this exported bundle, offline, instead of the catalog's version.")
@click.option("--export", type=_FOLDER, help="Write the version with its evidence as a bundle into this new folder.")
@click.option(
    "--keys",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Public keys to trust; none: this home's, else the bundle's own, which show no more than consistency.",
)
@_JSON
@click.pass_obj
def verify(
    settings: Settings,
    reference: str,
    model_id: str | None,
    bundle: Path | None,
    export: Path | None,
    keys: Path | None,
    as_json: bool,
) -> None:
    """Check every file and signed statement of a version with public keys only. Exits 1 when something does not hold.

    ID is model@version, a version number, or the first characters of a manifest digest. With --bundle,
    neither catalog nor store nor network is used.
    """
    if bundle is not None and export is not None:
        raise click.UsageError("give --bundle to check a folder, or --export to write one, not both")
    if bundle is None:
        dossier, checked, files, source = _verify_registered(settings, reference, model_id, keys, export)
    else:
        from headway.registry.bundle import verify_bundle

        trust, source = _trust(settings, keys, bundle)
        dossier, checked, files = verify_bundle(bundle, trust)
        _require_same(reference, model_id, dossier)
    problems = [f for f in (*checked.findings, *files) if f.problem]
    document = _verification(dossier, checked, [*checked.findings, *files], source)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        _print_verification(document)
        if export is not None:
            click.echo(f"exported to {export}")
    if problems:
        raise SystemExit(1)


@command.command("retire")
@_ID
@_MODEL
@click.option("--reason", required=True, help="Why; kept with the version.")
@click.pass_obj
def retire(settings: Settings, reference: str, model_id: str | None, reason: str) -> None:
    """Take a version out of use for ever; refused while an endpoint names it. Its files and evidence stay.

    ID is model@version, a version number, or the first characters of a manifest digest.
    """
    from headway.registry.find import find_version
    from headway.services import open_services

    with open_services(settings) as services:
        found = find_version(services, reference, model_id)
        retired = services.catalog.retire_model_version(services.principal, None, found.model_id, found.version, reason)
    click.echo(f"{retired.model_id}@{retired.version} is retired: it is never promoted again")


def _verify_registered(
    settings: Settings, reference: str, model_id: str | None, keys: Path | None, export: Path | None
) -> tuple[Dossier, Checked, Sequence[Finding], str]:
    from headway.registry.bundle import verify_stored, write_bundle
    from headway.registry.dossier import collect_dossier
    from headway.registry.find import find_version
    from headway.services import open_services

    with open_services(settings) as services:
        version = find_version(services, reference, model_id)
        trust, source = _trust(settings, keys, None)
        dossier = collect_dossier(services, version)
        checked, files = verify_stored(services.store, dossier, trust)
        if export is not None and checked.manifest is not None:
            write_bundle(services.store, dossier, checked.manifest, trust, export)
    return dossier, checked, files, source


def _trust(settings: Settings, keys: Path | None, bundle: Path | None) -> tuple[Trust, str]:
    """The keys to believe, and where they come from."""
    from headway.registry.bundle import bundled_keys
    from headway.registry.keys import read_trust

    own = settings.keys_folder / "public.json"
    if keys is not None:
        return read_trust(keys), str(keys)
    if own.exists() or bundle is None:
        return read_trust(own), str(own)
    return read_trust(bundled_keys(bundle)), "the bundle itself (shows that it is consistent, not whose it is)"


def _require_same(reference: str, model_id: str | None, dossier: Dossier) -> None:
    named = f"{dossier.model_id}@{dossier.version}"
    digits = reference.removeprefix("sha256:")
    by_number = reference == str(dossier.version) and model_id in (None, dossier.model_id)
    by_digest = len(digits) >= 6 and dossier.manifest_digest.startswith(f"sha256:{digits}")
    if reference != named and not by_number and not by_digest:
        raise OtherVersion(
            f"the bundle holds {named} with artifact {dossier.manifest_digest}, not {reference!r}",
            f"ask for {named}, or give the folder of the version that you mean",
        )


def _verification(dossier: Dossier, checked: Checked, findings: Sequence[Finding], source: str) -> dict[str, Any]:
    problems = {f.subject: f.problem for f in findings if f.problem}
    gates = {gate: str(s.predicate.get("verdict")) for gate, s in checked.statements.items()}
    return {
        "model": dossier.model_id,
        "version": dossier.version,
        "kind": dossier.kind,
        "manifest_digest": dossier.manifest_digest,
        "keys": source,
        "verified": not problems,
        "eligible": not problems and not checked.unpassed,
        "checked": [f.subject for f in findings],
        "problems": problems,
        "gates": gates,
        "promoted": [{"endpoint": p.endpoint_id, "epoch": p.epoch} for p in dossier.promotions],
    }


def _print_verification(document: dict[str, Any]) -> None:
    click.echo(f"{document['model']}@{document['version']}  {document['kind']}  {document['manifest_digest']}")
    click.echo(f"keys: {document['keys']}")
    for subject in document["checked"]:
        problem = document["problems"].get(subject)
        click.echo(f"  {'ok' if problem is None else 'PROBLEM':<8}{subject}{'' if problem is None else ': ' + problem}")
    unpassed = [f"{gate} {verdict}" for gate, verdict in document["gates"].items() if verdict != "pass"]
    if document["problems"]:
        count = len(document["problems"])
        click.echo(f"NOT verified: {counted(count, 'problem')}")
    else:
        click.echo(f"verified; {'not eligible: ' + ', '.join(unpassed) if unpassed else 'every gate passed'}")


def _line(services: Services, version: ModelVersion) -> dict[str, Any]:
    from headway.registry.card import serving, standing

    return {
        "model": version.model_id,
        "version": version.version,
        "kind": version.kind,
        "as_of": version.facts.as_of,
        "run_id": version.run_id,
        "manifest_digest": version.manifest_digest,
        "standing": standing(services, version),
        "endpoints": serving(services, version),
    }


def _row_metrics(mine: dict[str, Any]) -> dict[str, Any]:
    return {name: mine.get(name) for name in ("auc", "log_loss", "calibration_error")}


def _measured(row: dict[str, Any]) -> str:
    for name, shown in (("auc", "AUC"), ("bits_per_byte", "bits per byte")):
        if row.get(name) is not None:
            return f"{shown} {row[name]:.4f}"
    return "no evaluation"


def _compared(services: Services, version: ModelVersion) -> dict[str, Any]:
    from headway.registry.card import card

    document: Any = card(services, version)
    rows = {row["model"]: row for row in document["metrics"]}
    mine = rows.get("candidate", {})
    return {
        "version": f"{version.model_id}@{version.version}",
        "kind": version.kind,
        "as_of": version.facts.as_of,
        "standing": document["standing"],
        **({"bits_per_byte": mine["bits_per_byte"]} if "bits_per_byte" in mine else _row_metrics(mine)),
        "gains": {name: row["gain"] for name, row in rows.items() if row["gain"] is not None},
        "worker_seconds": document["cost"]["worker_seconds"],
        "seed": document["lineage"]["seed"],
    }
