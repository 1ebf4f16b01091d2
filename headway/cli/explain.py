"""`headway explain`: from a prediction back to the raw rows that made it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from headway.home import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROWS_LISTED = 3


@click.command("explain")
@click.argument("prediction_id", metavar="ID")
@click.option("--pipeline", "-p", "reference", help="Name under pipelines/, or a folder; none: the model's own.")
@click.option("--feature", help="Only this feature, with more of its rows.")
@click.option("--rows", default=None, type=click.IntRange(min=0), help="Raw rows listed per feature; all are counted.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def command(
    settings: Settings, prediction_id: str, reference: str | None, feature: str | None, rows: int | None, as_json: bool
) -> None:
    """Walk from a prediction to its version, gates, run, data, and the raw rows that made each feature.

    ID is a prediction's id or its first characters. Everything that the prediction rests on is read again and compared
    with what was recorded: blobs, content digests, the digest of every raw row, the features recomputed from them, the
    model's answer to them, and the signatures of gates and promotion.

    Exits 1, naming dataset version and row, or statement, when something is not as it was recorded.
    """
    from headway.loading import load_pipeline
    from headway.registry.keys import KeyRing
    from headway.services import open_services
    from headway.serving.documents import explanation_document
    from headway.serving.explain import ROWS_SHOWN, explain, find_prediction

    shown = rows if rows is not None else ROWS_SHOWN if as_json or feature else _ROWS_LISTED
    with open_services(settings) as services:
        prediction = find_prediction(services, prediction_id)
        version = services.catalog.model_version(services.principal, prediction.model_id, prediction.model_version)
        pipeline = load_pipeline(reference or version.facts.pipeline)
        trust = KeyRing(settings.home / "keys").trust()
        found = explain(services, pipeline, trust, prediction.prediction_id, feature, shown)
    document = explanation_document(found)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        for line in _lines(document):
            click.echo(line)
    if found.problems:
        raise SystemExit(1)


def _lines(document: dict[str, Any]) -> Iterator[str]:
    prediction, version, run = document["prediction"], document["model_version"], document["training_run"]
    yield f"prediction  {prediction['prediction_id']}  {prediction['output']['probability']:.4f}  at {prediction['at']}"
    yield "request     " + ", ".join(f"{n}={v}" for n, v in prediction["request"].items())
    event = document["endpoint_event"]
    if event is not None:
        yield f"endpoint    {event['endpoint']} epoch {event['epoch']}: {event['operation']} by {event['actor']}"
    name = f"{version['model']}@{version['version']}"
    yield f"version     {name} ({version['kind']})  artifact {version['artifact_digest']}"
    for gate in document["gates"]:
        yield f"gate        {gate['gate']}: {gate['verdict']}  statement {gate['statement_digest']}"
    cost = f"{run['worker_seconds']:.0f} worker-seconds in {len(run['attempts'])} attempts"
    yield f"run         {run['run_id']}  as of {run['as_of']}, seed {run['seed']}, {cost}"
    yield f"            code {run['code_digest']}{' (dirty)' if run['code_dirty'] else ''}"
    yield f"trained on  {len(document['snapshots'])} snapshots, {len(document['training_datasets'])} dataset versions"
    for item in document["inputs"]:
        yield f"read        {item['dataset']} version {item['version']}  {item['content_digest']}"
    for kind in ("skipped", "absent"):
        for source, partitions in document[kind].items():
            yield f"{kind:<11} {source} {', '.join(partitions)}"
    for feature in document["features"]:
        yield from _feature_lines(feature)
    for problem in document["problems"]:
        yield f"PROBLEM     {problem['place']}: {problem['message']}"
    checked = f"{document['rows_checked']:,} raw rows read again"
    yield f"verified: {checked}" if document["verified"] else f"NOT verified: {len(document['problems'])} problems"


def _feature_lines(feature: dict[str, Any]) -> Iterator[str]:
    when = f", newest {feature['event_time']}" if feature["event_time"] else ""
    made_of = f"from {', '.join(feature['inputs'])}" if feature["inputs"] else f"{feature['row_count']} rows"
    yield f"feature     {feature['feature']} = {feature['value']}  ({feature['reason']}{when}; {made_of})"
    for row in feature["rows"]:
        identity = ", ".join(f"{n}={v}" for n, v in row["identity"].items())
        times = f"at {row['event_time']}, known {row['available_time']}"
        yield f"            {row['dataset']} v{row['version']}  {identity}  {times}  {row['row_digest']}"
    left = feature["row_count"] - len(feature["rows"])
    if left:
        yield f"            ... {left} more; digest over all: {feature['rows_digest']}"
