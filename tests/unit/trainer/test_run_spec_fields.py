"""Fields that came later leave the digests of stored run specs alone; a layout is written and read as text."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.spec import DEGREES, LayoutSpec, SpecRefused, TokenDataSpec, layout_text, parse_layout, parse_run

# A run spec as it was stored before `schedule`, `offload`, `activation_checkpointing` and `compile` existed.
STORED: dict[str, Any] = {
    "pipeline": "flights",
    "data": {
        "files": [{"partition": "2013-01", "sha256": "sha256:" + "a" * 64, "size": 1234, "rows": 27004}],
        "identity": ["carrier", "flight"],
        "target": "late",
        "observed_at": "scheduled",
        "known_at": "arrived",
        "cut": 1370044800000000,
        "validation_from": 1367366400000000,
        "categorical": ["carrier", "origin"],
        "numeric": ["distance", "rate"],
    },
    "model": {
        "file": "pipelines/flights/model.py",
        "function": "build",
        "code_digest": "sha256:" + "b" * 64,
        "code_manifest": "sha256:" + "c" * 64,
        "options": {"width": 64, "blocks": 2},
    },
    "seed": 7,
    "layout": {
        "engine": "deepspeed",
        "zero": 1,
        "nodes": 2,
        "processes_per_node": 1,
        "dp": 2,
        "shard": 1,
        "tp": 1,
        "pp": 1,
        "sp": 1,
        "ep": 1,
    },
    "optimizer": {
        "lr": 0.001,
        "weight_decay": 0.01,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-08,
        "clip_norm": 1.0,
        "warmup_share": 0.05,
    },
    "batch": {"global_size": 1024, "accumulation": 1},
    "schedule": {"epochs": 10, "patience": 3, "checkpoint_every": 200},
    "restart": {
        "max_attempts": 4,
        "hang_factor": 20.0,
        "hang_floor_s": 60.0,
        "grace_s": 20.0,
        "group_timeout_s": 60.0,
    },
    "precision": "fp32",
    "determinism": "deterministic",
    "threads": 1,
    "format": "headway.run/1",
}
STORED_DIGEST = "sha256:f56b601e2a7371168e7b36fcf76e107d0f37f5168cfe2ff8acdd9ca8b96eedd8"

degrees = st.fixed_dictionaries({}, optional=dict.fromkeys(DEGREES, st.integers(1, 6)))


def test_a_stored_spec_keeps_its_digest() -> None:
    spec = parse_run(json.dumps(STORED))
    assert spec.digest == STORED_DIGEST
    assert spec.to_json() == STORED


@pytest.mark.parametrize(
    ("name", "value"),
    [("schedule", "gpipe"), ("offload", "optimizer"), ("activation_checkpointing", True), ("compile", True)],
)
def test_a_later_field_in_force_changes_the_digest_and_comes_back(name: str, value: object) -> None:
    changed = LayoutSpec(**{"engine": "deepspeed", "zero": 1, name: value})
    assert changed.to_json() == {**LayoutSpec(engine="deepspeed", zero=1).to_json(), name: value}


def test_a_later_field_at_its_default_may_be_written_out() -> None:
    written = {**STORED, "layout": {**STORED["layout"], "schedule": "1f1b", "offload": "", "compile": False}}
    assert parse_run(json.dumps(written)).digest == STORED_DIGEST


@given(given=degrees, engine=st.sampled_from(["ddp", "fsdp2", "deepspeed"]), zero=st.integers(0, 3))
def test_a_layout_is_read_as_it_was_written(given: dict[str, int], engine: str, zero: int) -> None:
    entries = {**given, **({"zero": zero} if engine == "deepspeed" else {})}
    text = ",".join(f"{name}={value}" for name, value in entries.items()) or "dp=1"
    layout = parse_layout(engine, text)
    assert {name: getattr(layout, name) for name in entries} == entries
    assert parse_layout(engine, layout_text(layout)) == layout
    layout.check()


def test_stage_1_is_meant_with_deepspeed_when_none_is_named() -> None:
    assert parse_layout("deepspeed", "dp=2").zero == 1
    assert parse_layout("fsdp2", "shard=2").zero == 0


def test_nodes_follow_from_the_degrees() -> None:
    assert parse_layout("ddp", "dp=2,pp=2").processes_per_node == 4
    assert parse_layout("ddp", "dp=2,pp=2", nodes=2).processes_per_node == 2
    assert parse_layout("ddp", "dp=2,pp=2", processes_per_node=1).nodes == 4


@pytest.mark.parametrize(
    ("engine", "text", "nodes", "field"),
    [
        ("ddp", "", None, "layout"),
        ("ddp", "dp", None, "layout"),
        ("ddp", "dp=2,", None, "layout"),
        ("ddp", "xp=2", None, "layout"),
        ("ddp", "dp=two", None, "layout.dp"),
        ("ddp", "dp=-1", None, "layout.dp"),
        ("ddp", "dp=²", None, "layout.dp"),
        ("ddp", "dp=" + "9" * 5000, None, "layout.dp"),
        ("ddp", "dp=0", None, "layout.dp"),
        ("ddp", "tp=2,dp=2,tp=2", None, "layout.tp"),
        ("ddp", "dp=2,zero=1", None, "layout.zero"),
        ("fsdp2", "shard=2,zero=0", None, "layout.zero"),
        ("deepspeed", "dp=2,zero=4", None, "layout.zero"),
        ("ddp", "dp=3", 2, "layout.nodes"),
        ("ddp", "dp=3", 0, "layout.nodes"),
        ("tpu", "dp=3", None, "layout.engine"),
    ],
)
def test_text_that_is_no_layout_is_refused(engine: str, text: str, nodes: int | None, field: str) -> None:
    with pytest.raises(SpecRefused) as refused:
        parse_layout(engine, text, nodes)
    assert refused.value.field == field
    assert len(str(refused.value)) < 300


def test_the_rows_are_split_over_replicas_shards_and_experts() -> None:
    assert parse_layout("fsdp2", "dp=2,shard=3,ep=5,tp=2,pp=2,sp=2").data_ranks == 30


def token_document(**changes: object) -> dict[str, Any]:
    """The stored spec, learning from tokens; `changes` are of its data."""
    files = [
        {"split": split, "sha256": "sha256:" + letter * 64, "size": 200, "tokens": 100}
        for split, letter in (("train", "1"), ("valid", "2"), ("held_out", "3"))
    ]
    data = {"files": files, "tokenizer": "sha256:" + "4" * 64, "vocab": 300, "context": 8, "end_token": 256}
    return STORED | {"data": data | {"kind": "tokens"} | changes}


def test_a_spec_of_tokens_is_read_as_it_is_written() -> None:
    spec = parse_run(json.dumps(token_document()))
    assert isinstance(spec.data, TokenDataSpec)
    assert parse_run(json.dumps(spec.to_json())) == spec
    assert [file.split for file in spec.tokens.of_split("valid")] == ["valid"]
    with pytest.raises(SpecRefused, match=r"data\.kind: 'tokens'; rows of a table"):
        _ = spec.rows
    with pytest.raises(SpecRefused, match="tokens are expected here"):
        _ = parse_run(json.dumps(STORED)).tokens


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kind": "images"}, "data.kind"),
        ({"kind": ["tokens"]}, "data.kind"),
        ({"files": []}, "data.files"),
        ({"files": [{"split": "train", "sha256": "sha256:" + "1" * 64, "size": 3, "tokens": 1}]}, "data.files"),
        ({"files": [{"split": "test", "sha256": "sha256:" + "1" * 64, "size": 2, "tokens": 1}]}, "data.files[0].split"),
        ({"vocab": 65_537}, "data.vocab"),
        ({"end_token": 300}, "data.end_token"),
        ({"context": 0}, "data.context"),
        ({"target": "late"}, "data.target"),
    ],
)
def test_tokens_that_cannot_be_learned_from_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecRefused) as refused:
        parse_run(json.dumps(token_document(**changes)))
    assert refused.value.field == field


@pytest.mark.parametrize("name", ["steps", "judge_every"])
def test_steps_of_a_schedule_are_not_negative(name: str) -> None:
    with pytest.raises(SpecRefused, match=f"schedule.{name}: -1 is less than 0"):
        parse_run(json.dumps(STORED | {"schedule": {**STORED["schedule"], name: -1}}))


@pytest.mark.parametrize(("option", "value"), [("vocab", 299), ("sequence", 7)])
def test_a_model_too_small_for_the_tokens_is_refused(option: str, value: int) -> None:
    model = STORED["model"] | {"options": {option: value}}
    with pytest.raises(SpecRefused, match=f"model.options.{option}: {value} "):
        parse_run(json.dumps(token_document() | {"model": model}))
