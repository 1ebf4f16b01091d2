"""`headway check`: a declaration's faults with file, line and field."""

from __future__ import annotations

import json
from pathlib import Path

import click

from headway.declaration import PipelineSpec


@click.command("check")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--schema", is_flag=True, help="Print the JSON Schema of a declaration's attributes.")
@click.pass_context
def command(ctx: click.Context, file: Path | None, schema: bool) -> None:
    """Check FILE (a defs.yaml, its folder, or a pipeline's name) and everything that it refers to.

    Exits 1 when something is wrong; every fault is one line: file:line: field: what is wrong.
    """
    if schema:
        click.echo(json.dumps(PipelineSpec.model_json_schema(), indent=2))
        return
    if file is None:
        raise click.UsageError("give a FILE to check, or --schema")
    from headway.datasets.suites import SuiteRefused, check_suites
    from headway.loading import DeclarationInvalid, check_layout, load_pipeline

    try:
        pipeline = load_pipeline(file)
        check_layout(pipeline)
        check_suites(pipeline)
    except (DeclarationInvalid, SuiteRefused) as error:
        for problem in error.problems:
            click.echo(str(problem), err=True)
        ctx.exit(1)
    click.echo(f"{pipeline.name}: {_in_words(pipeline.spec)}; nothing wrong")


def _in_words(spec: PipelineSpec) -> str:
    sources = f"{len(spec.sources)} sources"
    if spec.text is not None:
        return f"{sources}, text of {spec.text.source!r} in {spec.text.tokenizer.vocab} tokens"
    return f"{sources}, {len(spec.features.views)} feature views, {len(spec.feature_names())} features"
