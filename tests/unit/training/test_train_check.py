"""`headway train check`: what a layout comes to, or why it cannot run, from a spec or a declaration alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from support.training_bench import ATTRIBUTES

from headway.cli.train_check import SpecUnreadable, command
from trainer.spec import DataFile, DataSpec, LayoutSpec, ModelSpec, RunSpec

DECODER = {"vocab": 256, "sequence": 64, "dim": 64, "layers": 4, "heads": 8, "kv_heads": 4, "hidden": 128}


def _spec(layout: LayoutSpec, **changed: Any) -> RunSpec:  # noqa: ANN401 - fields of RunSpec
    options = changed.pop("options", {})
    return RunSpec(
        pipeline="p",
        data=DataSpec((DataFile("a", "sha256:0", 1, 1),), ("i",), "y", "o", "k", 2, 1, (), ("x",)),
        model=ModelSpec("pipelines/p/model.py", "build", "sha256:1", options=options),
        seed=1,
        layout=layout,
        **changed,
    )


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., Result]:
    def checked(spec: RunSpec, *arguments: str) -> Result:
        file = tmp_path / "spec.json"
        file.write_text(json.dumps(spec.to_json()))
        return CliRunner().invoke(command, [str(file), *arguments])

    return checked


@pytest.fixture
def declare(tmp_path: Path) -> Callable[..., Result]:
    def declared(training: dict[str, Any]) -> Result:
        folder = tmp_path / "shop"
        folder.mkdir()
        attributes = {**ATTRIBUTES, "training": {**ATTRIBUTES["training"], **training}}
        document = {"type": "assets.component.ModelPipeline", "attributes": attributes}
        (folder / "defs.yaml").write_text(yaml.safe_dump(document))
        (folder / "model.py").write_text("def build(inputs, options):\n    return None\n")
        (folder / "visits.suite.json").write_text("{}")
        return CliRunner().invoke(command, [str(folder), "--json"])

    return declared


def test_a_valid_spec_says_its_ranks_rows_and_memory(check: Callable[..., Result]) -> None:
    layout = LayoutSpec(engine="deepspeed", zero=2, nodes=2, processes_per_node=2, dp=4)
    result = check(_spec(layout, options=DECODER), "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["ok"] is True
    assert (found["engine"], found["layout"], found["precision"]) == ("deepspeed", "dp=4,zero=2", "fp32")
    assert (found["world_size"], found["nodes"], found["data_ranks"]) == (4, 2, 4)
    assert found["rows_per_rank"] * 4 == found["global_batch"] == 1024
    memory = found["memory"]
    assert memory["gradients"] * 4 == memory["parameters"]
    kinds = ("parameters", "gradients", "optimizer", "activations", "transient")
    assert memory["total"] == sum(memory[k] for k in kinds)


def test_the_findings_are_readable(check: Callable[..., Result]) -> None:
    result = check(_spec(LayoutSpec(processes_per_node=2, dp=2), options=DECODER))
    assert result.exit_code == 0
    assert result.stdout.startswith("ok: ddp dp=2 fp32\n2 ranks: 1 nodes x 2 processes\n1024 rows per step: 2 data")
    for kind in ("parameters", "gradients", "optimizer", "activations", "transient", "total"):
        assert f"  {kind} " in result.stdout


def test_a_model_without_sizes_has_no_estimate_and_says_why(check: Callable[..., Result]) -> None:
    result = check(_spec(LayoutSpec(), options={"width": 64}), "--json")
    found = json.loads(result.stdout)
    assert (found["ok"], found["memory"]) == (True, None)
    assert "state no layers, heads" in found["memory_unknown"]


def test_a_layout_that_trains_wrongly_is_refused_with_the_nearest(check: Callable[..., Result]) -> None:
    layout = LayoutSpec(engine="deepspeed", zero=0, nodes=2, dp=2)
    result = check(_spec(layout, precision="bf16"), "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["ok"] is False
    assert found["fields"] == {"layout.zero": 0, "precision": "bf16"}
    assert "FP16_UnfusedOptimizer" in found["reason"]
    near = found["nearest"]
    assert (near["text"], near["precision"], near["nodes"]) == ("dp=2,zero=1", "bf16", 2)
    nearest = LayoutSpec(**{k: v for k, v in near.items() if k not in ("in_words", "text", "precision")})
    assert check(_spec(nearest, precision="bf16"), "--json").exit_code == 0


def test_a_refusal_is_one_line(check: Callable[..., Result]) -> None:
    result = check(_spec(LayoutSpec(processes_per_node=2, tp=2)))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("refused: layout.tp: layout.tp 2, model.options.heads 0 do not go together: ")
    assert result.stderr.count("\n") == 1


def test_a_field_that_is_wrong_by_itself_has_no_nearest(check: Callable[..., Result]) -> None:
    result = check(_spec(LayoutSpec(processes_per_node=2)), "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["field"], found["nearest"]) == ("layout.dp", None)
    assert "the world size is 2" in found["reason"]


def test_what_is_no_spec_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text("{")
    result = CliRunner().invoke(command, [str(tmp_path / "spec.json"), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["field"] == "$"


def test_a_file_that_cannot_be_read_is_a_wrong_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "spec.json").write_text("{}")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    result = CliRunner().invoke(command, [str(tmp_path / "spec.json")])
    assert isinstance(result.exception, SpecUnreadable)


def test_a_declaration_is_checked_without_data(declare: Callable[..., Result]) -> None:
    training = {"engine": "fsdp2", "layout": "shard=2,tp=2", "nodes": 1, "options": DECODER, "precision": "bf16"}
    result = declare(training)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["engine"], found["layout"], found["precision"]) == ("fsdp2", "shard=2,tp=2", "bf16")
    assert (found["world_size"], found["nodes"], found["processes_per_node"]) == (4, 1, 4)


def test_a_declaration_that_cannot_run_is_refused(declare: Callable[..., Result]) -> None:
    result = declare({"engine": "ddp", "layout": "pp=2,sp=2", "options": DECODER})
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert set(found["fields"]) == {"layout.engine", "layout.pp", "layout.sp"}
    assert found["nearest"]["engine"] == "ddp"
