"""`headway explain`: from a prediction back to the raw rows that made it."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from headway.home import Settings
from headway.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROWS_LISTED = 3
_PROBLEMS_LISTED = 20


@click.command("explain")
@click.argument("prediction_id", metavar="ID")
@click.option("--pipeline", "-p", "reference", help="Name under pipelines/, or a folder; none: the model's own.")
@click.option("--feature", help="Only this feature, with more of its rows.")
@click.option("--rows", default=None, type=click.IntRange(min=0), help="Raw rows listed per feature; all are counted.")
@click.option("--all", "everything", is_flag=True, help="Print every gate, dataset version, feature and row.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def command(
    settings: Settings,
    prediction_id: str,
    reference: str | None,
    feature: str | None,
    rows: int | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Walk from a prediction to its version, gates, run, data, and the raw rows that made each feature.

    ID is a prediction's id or its first characters. Everything that the prediction rests on is read again and compared
    with what was recorded: blobs, content digests, the digest of every raw row, the features recomputed from them, the
    model's answer to them, and the signatures of gates and promotion.

    Exits 1, naming dataset version and row, or statement, when something is not as it was recorded.
    """
    from headway.loading import Pipeline, PipelineNotFound, load_pipeline
    from headway.registry.keys import KeyRing
    from headway.services import open_services
    from headway.serving.documents import explanation_document
    from headway.serving.explain import ROWS_SHOWN, explain, find_prediction
    from headway.serving.ship import ship

    def known(name: str) -> Pipeline | None:
        """The pipeline whose answers are shipped: the one that was named, else that under pipelines/."""
        named = None if reference is None else load_pipeline(reference)
        if named is not None and named.name == name:
            return named
        try:
            return load_pipeline(name)
        except PipelineNotFound:
            return None

    shown = rows if rows is not None else ROWS_SHOWN if as_json or feature else _ROWS_LISTED
    with open_services(settings) as services:
        prediction = find_prediction(services, prediction_id, lambda: ship(services, known, settings.serving_folder))
        version = services.catalog.model_version(services.principal, prediction.model_id, prediction.model_version)
        pipeline = load_pipeline(reference or version.facts.pipeline)
        trust = KeyRing(settings.keys_folder).trust()
        found = explain(services, pipeline, trust, prediction.prediction_id, feature, shown)
    document = explanation_document(found)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        single = feature is not None or rows is not None
        for line in _lines(document, everything, everything or single):
            click.echo(line)
    if found.problems:
        raise SystemExit(1)


def _lines(document: dict[str, Any], everything: bool, each_feature: bool) -> Iterator[str]:
    prediction, version, run = document["prediction"], document["model_version"], document["training_run"]
    yield f"prediction  {prediction['prediction_id']}  {prediction['output']['probability']:.4f}  at {prediction['at']}"
    yield "request     " + ", ".join(f"{n}={v}" for n, v in prediction["request"].items())
    event = document["endpoint_event"]
    if event is not None:
        yield f"endpoint    {event['endpoint']} epoch {event['epoch']}: {event['operation']} by {event['actor']}"
    name = f"{version['model']}@{version['version']}"
    yield f"version     {name} ({version['kind']})  artifact {version['artifact_digest']}"
    yield from _gate_lines(document["gates"], everything)
    attempts = counted(len(run["attempts"]), "attempt")
    cost = f"{run['worker_seconds']:.0f} worker-seconds in {attempts}"
    yield f"run         {run['run_id']}  as of {run['as_of']}, seed {run['seed']}, {cost}"
    yield f"            code {run['code_digest']}{' (dirty)' if run['code_dirty'] else ''}"
    datasets = counted(len(document["training_datasets"]), "dataset version")
    yield f"trained on  {counted(len(document['snapshots']), 'snapshot')}, {datasets}"
    yield from _input_lines(document, everything)
    if each_feature:
        for feature in document["features"]:
            yield from _feature_lines(feature)
    else:
        yield from _group_lines(document["features"])
    yield from _problem_lines(document["problems"], everything)
    checked = f"{counted(document['rows_checked'], 'raw row')} read again"
    count = counted(len(document["problems"]), "problem")
    yield f"verified: {checked}" if document["verified"] else f"NOT verified: {count}"
    if not everything:
        yield "--all prints every gate, dataset version, feature and row; --feature NAME the rows of one"


def _gate_lines(gates: list[dict[str, Any]], everything: bool) -> Iterator[str]:
    for gate in gates:
        if everything or gate["verdict"] != "pass":
            yield f"gate        {gate['gate']}: {gate['verdict']}  statement {gate['statement_digest']}"
    if not everything:
        passed = sum(gate["verdict"] == "pass" for gate in gates)
        yield f"gates       {passed} of {len(gates)} passed"


def _input_lines(document: dict[str, Any], everything: bool) -> Iterator[str]:
    if everything:
        for item in document["inputs"]:
            yield f"read        {item['dataset']} version {item['version']}  {item['content_digest']}"
    else:
        for dataset, number in Counter(item["dataset"] for item in document["inputs"]).items():
            yield f"read        {dataset}  {counted(number, 'version')}"
    for kind in ("skipped", "absent"):
        for source, partitions in document[kind].items():
            shown = ", ".join(partitions) if everything else counted(len(partitions), "partition")
            yield f"{kind:<11} {source} {shown}"


def _group_lines(features: list[dict[str, Any]]) -> Iterator[str]:
    """One line per view, one for the derived features and one for the custom ones."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for feature in features:
        of_view = feature["kind"] in ("latest", "window")
        groups.setdefault(feature["feature"].partition("__")[0] if of_view else feature["kind"], []).append(feature)
    for name, members in groups.items():
        rows = max(feature["row_count"] for feature in members)
        made_of = "" if name == "derived" else f" of up to {counted(rows, 'row')}"
        parts = [counted(len(members), "feature") + made_of]
        empty = sum(feature["value"] is None for feature in members)
        parts += [f"{empty} without a value"] if empty else []
        newest = max((feature["event_time"] for feature in members if feature["event_time"]), default="")
        parts += [f"newest {newest}"] if newest else []
        yield f"features    {name}: {', '.join(parts)}"


def _problem_lines(problems: list[dict[str, Any]], everything: bool) -> Iterator[str]:
    listed = problems if everything else problems[:_PROBLEMS_LISTED]
    for problem in listed:
        yield f"PROBLEM     {problem['place']}: {problem['message']}"
    if len(listed) < len(problems):
        yield f"            and {counted(len(problems) - len(listed), 'more problem')}"


def _feature_lines(feature: dict[str, Any]) -> Iterator[str]:
    when = f", newest {feature['event_time']}" if feature["event_time"] else ""
    made_of = f"from {', '.join(feature['inputs'])}" if feature["inputs"] else counted(feature["row_count"], "row")
    yield f"feature     {feature['feature']} = {feature['value']}  ({feature['reason']}{when}; {made_of})"
    for row in feature["rows"]:
        identity = ", ".join(f"{n}={v}" for n, v in row["identity"].items())
        times = f"at {row['event_time']}, known {row['available_time']}"
        yield f"            {row['dataset']} v{row['version']}  {identity}  {times}  {row['row_digest']}"
    left = feature["row_count"] - len(feature["rows"])
    if left:
        yield f"            ... {left} more; digest over all: {feature['rows_digest']}"
