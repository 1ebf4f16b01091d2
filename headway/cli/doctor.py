"""`headway doctor`: can this installation work, and if not, what mends it?"""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from headway.errors import HeadwayError
from headway.findings import Finding
from headway.home import Settings

_LOW_DISK = 2 << 30
# What a stage needs that nothing imports before it: Dagster's pages, training, signing, serving, monitoring.
_PACKAGES = (
    *("dagster", "torch", "deepspeed", "safetensors", "scikit-learn", "cryptography"),
    *("starlette", "uvicorn", "msgspec", "prometheus-client", "scipy"),
)


@click.command("doctor")
@click.option("--cluster", is_flag=True, help="Look at the Kubernetes cluster of the platform profile instead.")
@click.option(
    "--platform",
    "profile",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The platform profile [default: HEADWAY_PLATFORM].",
)
@click.option("--no-pod", is_flag=True, help="With --cluster: start no pod of the training image.")
@click.option("--wait", "within_s", type=click.FloatRange(1), default=180.0, show_default=True, help="For that pod.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def command(
    ctx: click.Context, cluster: bool, profile: Path | None, no_pod: bool, within_s: float, as_json: bool
) -> None:
    """Look at the environment, clock, databases, store, keys and workers, and say how to mend what is wrong.

    With --cluster: permissions, kinds, queues, nodes, volume and image of the place where attempts run. Exits 1 when
    something is wrong.
    """
    settings: Settings = ctx.obj
    if cluster:
        from headway.cli.cluster_checks import look_at_cluster

        findings = list(look_at_cluster(settings, profile, pod=not no_pod, within_s=within_s))
    else:
        findings = [finding for look in _LOOKS for finding in _guarded(look, settings)]
    if as_json:
        click.echo(json.dumps({"findings": [vars(f) for f in findings]}, indent=2))
    else:
        for finding in findings:
            remedy = f"; {finding.remedy}" if finding.remedy and not finding.ok else ""
            click.echo(f"{'ok    ' if finding.ok else 'WRONG '}  {finding.name:<12}  {finding.detail}{remedy}")
    ctx.exit(0 if all(f.ok for f in findings) else 1)


def _guarded(look: Callable[[Settings], Iterator[Finding]], settings: Settings) -> Iterator[Finding]:
    """A look that is refused is a finding, too: the others still have to be made."""
    try:
        yield from look(settings)
    except HeadwayError as error:
        yield Finding(look.__name__.strip("_"), False, error.message, error.remedy)


def _environment(settings: Settings) -> Iterator[Finding]:
    del settings
    right = sys.version_info >= (3, 11)
    yield Finding("python", right, sys.version.split()[0], "use Python 3.11 or later")
    for name in _PACKAGES:
        try:
            yield Finding("package", True, f"{name} {version(name)}")
        except PackageNotFoundError:
            yield Finding("package", False, f"{name} is not installed", "run `make venv`")


def _settings(settings: Settings) -> Iterator[Finding]:
    unknown = ", ".join(settings.unknown)
    yield Finding("settings", not unknown, f"unknown: {unknown}" if unknown else "all known", "unset what is unknown")
    right = settings.dagster_home.is_absolute()
    yield Finding("dagster home", right, str(settings.dagster_home), "set HEADWAY_HOME to an absolute path")


def _clock(settings: Settings) -> Iterator[Finding]:
    from headway.world import clock_in_force

    yield Finding("clock", True, clock_in_force(settings.clock_file))


def _online(settings: Settings) -> Iterator[Finding]:
    from headway.features.online import online_store_for

    with closing(online_store_for(settings)) as online:
        online.states(settings.tenant, "any")
        yield Finding("online store", True, "it answers; `headway serve` and the online_features asset fill it")


def _database(settings: Settings) -> Iterator[Finding]:
    from headway.services import open_services

    with open_services(settings) as services:
        services.catalog.open_attempts(services.principal)
        yield Finding("database", True, f"{services.catalog.database.dialect} answers, migrated to the newest schema")


def _store(settings: Settings) -> Iterator[Finding]:
    root = settings.store_root
    try:
        with tempfile.NamedTemporaryFile(dir=settings.home, prefix=".doctor-") as probe:
            probe.write(b"x")
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        yield Finding("store", False, f"{settings.home} cannot be written: {error}", "mend its permissions")
        return
    space = os.statvfs(settings.home)
    free = space.f_bavail * space.f_frsize
    detail = f"{root} can be written, {free / 2**30:.1f} GiB free"
    yield Finding("store", free >= _LOW_DISK, detail, "free some space: checkpoints and artifacts need it")


def _keys(settings: Settings) -> Iterator[Finding]:
    folder = settings.keys_folder
    if not folder.exists():
        yield Finding("keys", True, "none yet: they are made when the first statement is signed")
        return
    open_to_others = sorted(p.name for p in folder.iterdir() if _is_private(p) and p.stat().st_mode & 0o077)
    others = stat.S_IMODE(folder.stat().st_mode) & 0o077
    wrong = ", ".join([*open_to_others, *(["the folder itself"] if others else [])])
    yield Finding(
        "keys",
        not wrong,
        f"readable by others: {wrong}" if wrong else f"{folder} is private",
        f"chmod 700 {folder}; chmod 600 the private keys, and rotate them if somebody could have read them",
    )


def _is_private(path: Path) -> bool:
    return path.is_file() and path.name != "public.json"


def _workers(settings: Settings) -> Iterator[Finding]:
    from headway.services import open_services
    from headway.training.launchers import launcher_for
    from headway.training.reconcile import Reconciler

    with open_services(settings) as services:
        actions = Reconciler(services, launcher_for(settings), dry_run=True).all()
    todo = [a for a in actions if a.kind in ("submit", "finish", "kill")]
    detail = "; ".join(f"{a.run_id} {a.kind}" for a in todo[:5]) or "rows and processes agree"
    yield Finding("workers", not todo, detail, "run `headway reconcile`")


_LOOKS = (_environment, _settings, _clock, _database, _online, _store, _keys, _workers)
