"""`headway kube`: what a run looks like to a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headway.errors import HeadwayError
from headway.home import Settings

if TYPE_CHECKING:
    from headway.training.attempt import Accelerator
    from headway.training.kubernetes.platform import Platform
    from trainer.spec import AttemptSpec, RunSpec


class SpecUnusable(HeadwayError):
    """A file that is no run spec, or one that no worker may start."""


@click.group("kube")
def command() -> None:
    """Look at what a run becomes on Kubernetes."""


@command.command("render")
@click.argument("spec", metavar="SPEC")
@click.option(
    "--backend",
    type=click.Choice(["job", "jobset", "trainjob"]),
    default="job",
    show_default=True,
    help="A Job with its Service is what the launcher runs.",
)
@click.option(
    "--platform",
    "profile",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The platform profile [default: HEADWAY_PLATFORM, else a small example].",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write there instead of printing.")
@click.pass_obj
def render(settings: Settings, spec: str, backend: str, profile: Path | None, out: Path | None) -> None:
    """Print the objects of an attempt as YAML, checked as far as that goes without a cluster.

    SPEC is a file that holds a run spec (JSON), or a run's id or its first characters. Nothing is sent anywhere. What
    no cluster would take is refused with the field's path.
    """
    from headway.files import replace_file
    from headway.training.kubernetes.platform import example, load_platform

    file = profile or settings.platform_file
    if file is None:
        click.echo("no platform profile is named (--platform, HEADWAY_PLATFORM): an example is used", err=True)
    platform = example() if file is None else load_platform(file)
    given = _of_file if Path(spec).is_file() else _of_run
    attempt, run_spec = given(settings, spec, "cuda" if platform.gpu.count else "cpu")
    text = as_yaml(documents(settings, backend, attempt, run_spec, platform))
    if out is None:
        click.echo(text, nl=False)
    else:
        replace_file(out, text.encode())
        click.echo(f"{out} written")


def documents(
    settings: Settings, backend: str, attempt: AttemptSpec, spec: RunSpec, platform: Platform
) -> list[dict[str, Any]]:
    """The objects of one attempt, in the order in which they are made.

    Raises:
        ManifestInvalid: names every field that no cluster would take.
    """
    from headway.training.kubernetes.jobset import render_jobset
    from headway.training.kubernetes.manifest import render as render_job
    from headway.training.kubernetes.names import names_of
    from headway.training.kubernetes.trainjob import render_trainjob
    from headway.training.launchers import instance_of

    names = names_of(instance_of(settings), settings.tenant, attempt, spec)
    if backend == "jobset":
        return [render_jobset(attempt, spec, platform, names)]
    if backend == "trainjob":
        return render_trainjob(attempt, spec, platform, names)
    return list(render_job(attempt, spec, platform, names))


def as_yaml(objects: list[dict[str, Any]]) -> str:
    """Documents as YAML, fields in the order in which they were written, nothing abbreviated by anchors."""
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            del data
            return True

    return yaml.dump_all(objects, Dumper=Plain, sort_keys=False, allow_unicode=True, width=120)


def _of_file(settings: Settings, name: str, accelerator: Accelerator) -> tuple[AttemptSpec, RunSpec]:
    """The first attempt of a run of this spec; its id follows from the spec's digest."""
    from trainer.spec import SpecRefused, parse_run

    file = Path(name)
    try:
        spec = parse_run(file.read_bytes())
    except OSError as error:
        raise SpecUnusable(f"{file} cannot be read: {error.strerror}", "name a readable file") from error
    except SpecRefused as error:
        raise SpecUnusable(f"{file}: {error}", "correct that field of the run spec") from error
    run_id = spec.digest.removeprefix("sha256:")[:24]
    return _attempt(settings, spec, run_id, 1, 1, spec.layout.nodes, accelerator), spec


def _of_run(settings: Settings, reference: str, accelerator: Accelerator) -> tuple[AttemptSpec, RunSpec]:
    """The newest attempt of a run of the catalog."""
    from headway.cli.runs import find_run
    from headway.services import open_services
    from headway.training.reconcile import nodes_of
    from trainer.spec import parse_attempt, parse_run

    with open_services(settings) as services:
        run = find_run(services, reference)
        spec = parse_run(services.store.get_bytes(run.facts.spec_digest))
    last = run.last
    attempt = _attempt(settings, spec, run.run_id, last.attempt, last.token, nodes_of(last), accelerator)
    submitted = Path(attempt.run_dir) / "attempts" / str(attempt.attempt) / "attempt.json"
    # What was sent, where it was; it holds the variables of the day.
    return (parse_attempt(submitted.read_bytes()) if submitted.exists() else attempt), spec


def _attempt(
    settings: Settings, spec: RunSpec, run_id: str, number: int, token: int, nodes: int, accelerator: Accelerator
) -> AttemptSpec:
    from headway.training.attempt import attempt_spec
    from headway.training.launchers import runs_root_of

    run_dir = runs_root_of(settings) / run_id
    where = {"run_dir": run_dir, "store_root": settings.store_root}
    return attempt_spec(spec, run_id, number, token, nodes=nodes, accelerator=accelerator, **where)
