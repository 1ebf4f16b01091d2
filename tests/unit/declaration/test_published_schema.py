"""The JSON Schema under docs/ is the one that the code validates with."""

import json
from pathlib import Path

from headway.declaration import PipelineSpec

PUBLISHED = Path(__file__).parents[3] / "docs" / "pipeline.schema.json"


def test_published_schema_is_current() -> None:
    assert json.loads(PUBLISHED.read_text()) == PipelineSpec.model_json_schema(), (
        "run: .venv/bin/headway check --schema > docs/pipeline.schema.json"
    )


def test_every_field_that_is_not_obvious_has_a_description() -> None:
    schema = PipelineSpec.model_json_schema()
    assert schema["$defs"]["SourceSpec"]["properties"]["available_time"]["description"]
    assert schema["$defs"]["PartitionSpec"]["properties"]["before"]["description"]
