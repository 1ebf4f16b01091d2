"""`headway predict`: ask the model of an endpoint, or look at what a version would say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headway.errors import HeadwayError
from headway.home import Settings

if TYPE_CHECKING:
    from headway.loading import Pipeline
    from headway.registry.keys import KeyRing
    from headway.services import Services
    from headway.serving.predict import Answer, Target

_LISTED = 20


class VersionReferenceWrong(HeadwayError):
    """A text that names no model version."""


class OutputRefused(HeadwayError):
    """A place where answers cannot be written."""


@click.command("predict")
@click.option(
    "--file", "-f", "file", required=True, type=click.Path(path_type=Path), help="Requests: .json or .parquet."
)
@click.option("--pipeline", "-p", "reference", help="Name under pipelines/, or a folder; none: the model's own.")
@click.option("--endpoint", "-e", help="Which endpoint answers; none: the only one there is.")
@click.option("--version", "-v", "wanted", metavar="MODEL@N", help="A dry look at a version: nothing is recorded.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Write all answers to OUT.parquet or OUT.json.")
@click.pass_obj
def command(
    settings: Settings,
    file: Path,
    reference: str | None,
    endpoint: str | None,
    wanted: str | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Answer the requests of FILE.

    A request holds only what a caller knows at the observation, as `serving` in the pipeline's defs.yaml declares it:
    times are ISO 8601 with a zone, and features are refused, because Headway computes them as of the observation. The
    JSON form is a list of objects, or {"requests": [...]}.

    Answers carry the model version and artifact digest, when the features are from, and a prediction id that
    `headway explain` takes. They are recorded before they are shown.

    An endpoint answers only while the signed statement of its promotion verifies with the public keys of this home.
    --version is a dry look, which asks for no promotion and records nothing.
    """
    from headway.loading import load_pipeline
    from headway.registry.keys import KeyRing
    from headway.services import open_services
    from headway.serving.predict import predict
    from headway.serving.requests import RequestsRefused, read_requests

    if endpoint is not None and wanted is not None:
        raise click.UsageError("give --endpoint or --version, not both")
    _check_output(output)
    with open_services(settings) as services:
        pipeline = None if reference is None else load_pipeline(reference)
        target = _target(services, KeyRing(settings.keys_folder), pipeline, endpoint, wanted)
        pipeline = pipeline or load_pipeline(target.version.facts.pipeline)
        requests = read_requests(file, pipeline.spec)
        try:
            answers = predict(services, pipeline, requests, target)
        except RequestsRefused as error:
            raise RequestsRefused(file.name, error.problems) from error
    if output is not None:
        _write(output, answers)
    _show(answers, as_json, output)


def _target(
    services: Services, keyring: KeyRing, pipeline: Pipeline | None, endpoint: str | None, wanted: str | None
) -> Target:
    from headway.serving.predict import endpoint_target, find_endpoint, version_target

    if wanted is not None:
        found = re.fullmatch(r"(.+)@([1-9][0-9]{0,8})", wanted)
        if found is None:
            raise VersionReferenceWrong(f"{wanted!r} names no version", "write MODEL@N, for instance flight_delay@3")
        return version_target(services, found[1], int(found[2]))
    found = endpoint or find_endpoint(services, None if pipeline is None else pipeline.name)
    return endpoint_target(services, keyring.trust(), found)


def _check_output(output: Path | None) -> None:
    """Refuse before anything is asked or recorded what could not be written afterwards."""
    if output is None:
        return
    if output.suffix not in (".json", ".parquet"):
        raise OutputRefused(f"{output} ends in {output.suffix!r}", "write to a .json or .parquet file")
    if not output.parent.is_dir():
        raise OutputRefused(f"there is no folder {output.parent}", "make it first")
    if output.exists():
        raise OutputRefused(f"{output} exists already", "remove it, or write to another file")


def _documents(answers: list[Answer]) -> list[dict[str, Any]]:
    from headway.serving.documents import answer_document

    return [answer_document(a) for a in answers]


def _write(output: Path, answers: list[Answer]) -> None:
    documents = _documents(answers)
    if output.suffix == ".json":
        output.write_text(json.dumps({"predictions": documents}, indent=2) + "\n", encoding="utf-8")
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat = [{**d, "features": json.dumps(d["features"], sort_keys=True)} for d in documents]
    pq.write_table(pa.Table.from_pylist(flat), output)


def _show(answers: list[Answer], as_json: bool, output: Path | None) -> None:
    if as_json:
        click.echo(json.dumps({"predictions": _documents(answers)}, indent=2))
        return
    first = answers[0]
    click.echo(f"{first.model_id} version {first.model_version}  artifact {first.artifact_digest}")
    for answer in answers[:_LISTED]:
        click.echo(f"{answer.prediction_id or '-':<36}  {answer.probability:.4f}  {_quality(answer)}")
    if len(answers) > _LISTED:
        click.echo(f"and {len(answers) - _LISTED} more; --json or --output gives all")
    if output is not None:
        click.echo(f"{len(answers)} answers written to {output}")
    if first.prediction_id is None:
        click.echo("a dry look: no promotion was checked, nothing was recorded, `headway explain` knows nothing of it")
    else:
        click.echo(f"recorded for endpoint {first.endpoint_id} (epoch {first.endpoint_epoch})")


def _quality(answer: Answer) -> str:
    missing = [view for view, found in answer.views.items() if found.status == "missing"]
    parts = [f"no rows for {', '.join(missing)}"] if missing else []
    parts += [f"degraded: {', '.join(answer.degraded)}"] if answer.degraded else []
    return "; ".join(parts) or "all features fresh"
