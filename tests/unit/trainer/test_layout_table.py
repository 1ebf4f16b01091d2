"""Every layout is supported with a parity test, or refused with its fields, a reason and a layout that would do."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.layouts import FAULTS, TABLE, Choice, check_layout, parity_cases, proof, render_page
from trainer.spec import (
    DEGREES,
    BatchSpec,
    LayoutConflict,
    LayoutSpec,
    ModelFacts,
    Offload,
    PipelineSchedule,
    Precision,
    SpecRefused,
    check_parallel,
    degree_product,
    model_facts,
    parse_layout,
)

PAGE = Path(__file__).parents[3] / "docs" / "layouts.md"
SMALL = ModelFacts(layers=4, heads=8, kv_heads=4, experts=4, dim=64, vocab=256, sequence=32, hidden=128, top_k=2)

# What has to work, in the words of the requirement: engine, layout, precision, offload, schedule.
REQUIRED = [
    *[("ddp", f"dp={n}", p, "", "1f1b") for n in (2, 4) for p in ("fp32", "bf16")],
    *[("fsdp2", f"shard={n}", p, "", "1f1b") for n in (2, 4) for p in ("fp32", "bf16")],
    ("fsdp2", "dp=2,shard=2", "fp32", "", "1f1b"),
    ("fsdp2", "shard=2", "fp32", "parameters", "1f1b"),
    *[("deepspeed", f"dp={n},zero={z}", "fp32", "", "1f1b") for n in (2, 4) for z in range(4)],
    *[("deepspeed", f"dp=2,zero={z}", "bf16", "", "1f1b") for z in (1, 2, 3)],
    ("deepspeed", "dp=2,zero=2", "fp32", "optimizer", "1f1b"),
    ("fsdp2", "tp=2", "fp32", "", "1f1b"),
    ("fsdp2", "tp=2,shard=2", "fp32", "", "1f1b"),
    ("deepspeed", "tp=2,zero=1", "fp32", "", "1f1b"),
    ("deepspeed", "tp=2,dp=2,zero=2", "fp32", "", "1f1b"),
    *[("ddp", "pp=2", "fp32", "", s) for s in ("gpipe", "1f1b", "interleaved", "zero_bubble")],
    ("ddp", "pp=2,dp=2", "fp32", "", "1f1b"),
    ("ddp", "sp=2", "fp32", "", "1f1b"),
    ("ddp", "sp=2,dp=2", "fp32", "", "1f1b"),
    ("deepspeed", "sp=2,zero=3", "fp32", "", "1f1b"),
    ("fsdp2", "ep=2", "fp32", "", "1f1b"),
    ("fsdp2", "ep=4", "fp32", "", "1f1b"),
]

engines = st.sampled_from(["ddp", "fsdp2", "deepspeed"])


@st.composite
def layouts(draw: st.DrawFn) -> LayoutSpec:
    engine: Any = draw(engines)
    degrees: dict[str, Any] = {
        name: draw(st.integers(1, 6)) for name in draw(st.lists(st.sampled_from(DEGREES), max_size=3, unique=True))
    }
    world = degree_product(LayoutSpec(**degrees))
    nodes = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    return LayoutSpec(
        engine=engine,
        zero=draw(st.integers(0, 3)) if engine == "deepspeed" else 0,
        nodes=nodes,
        processes_per_node=world // nodes,
        schedule=draw(st.sampled_from(get_args(PipelineSchedule))),
        offload=draw(st.sampled_from(get_args(Offload))),
        activation_checkpointing=draw(st.booleans()),
        compile=draw(st.booleans()),
        **degrees,
    )


facts = st.builds(
    ModelFacts,
    **{name: st.integers(0, 12) for name in ("layers", "heads", "kv_heads", "experts", "vocab", "sequence", "hidden")},
    tied=st.booleans(),
)
batches = st.builds(lambda share, a: BatchSpec(share * a, a), st.integers(1, 24), st.integers(1, 6))


def _layout(engine: str, text: str, offload: Any = "", schedule: Any = "1f1b") -> LayoutSpec:  # noqa: ANN401
    return replace(parse_layout(engine, text), offload=offload, schedule=schedule)


def _conflict(layout: LayoutSpec, precision: Precision, clip_norm: float = 1.0, *more: Any) -> LayoutConflict | None:  # noqa: ANN401
    try:
        check_layout(layout, precision, clip_norm, *more)
    except LayoutConflict as refused:
        return refused
    return None


def _refused(layout: LayoutSpec, precision: Precision = "fp32", clip_norm: float = 1.0, **more: Any) -> LayoutConflict:  # noqa: ANN401
    with pytest.raises(LayoutConflict) as refused:
        check_layout(layout, precision, clip_norm, **more)
    return refused.value


@settings(max_examples=200, deadline=None)
@given(
    layout=layouts(),
    precision=st.sampled_from(get_args(Precision)),
    clip_norm=st.sampled_from([0.0, 1.0]),
    model=st.none() | st.just(SMALL) | facts,
    batch=batches,
)
def test_every_layout_is_proven_or_refused_with_one_that_is(
    layout: LayoutSpec, precision: Precision, clip_norm: float, model: ModelFacts | None, batch: BatchSpec
) -> None:
    names = {case.name for case in parity_cases()}
    refused = _conflict(layout, precision, clip_norm, model, batch)
    if refused is not None:
        near = refused.nearest
        near.check()
        check_layout(near, refused.nearest_precision, clip_norm, model, batch)
        batch.check_ranks(near.data_ranks)
        assert layout.world_size % near.world_size == 0
        assert (near, refused.nearest_precision) != (layout, precision)
        layout, precision = near, refused.nearest_precision
    proven = proof(Choice(layout, precision))
    assert proven is not None
    assert proven.name in names
    assert (proven.layout.engine, proven.layout.zero, proven.layout.offload) == (
        layout.engine,
        layout.zero,
        layout.offload,
    )


@settings(max_examples=100, deadline=None)
@given(layout=layouts(), precision=st.sampled_from(get_args(Precision)))
def test_the_nearest_layout_has_as_many_ranks_where_the_model_allows(layout: LayoutSpec, precision: Precision) -> None:
    refused = _conflict(layout, precision)
    if refused is not None:
        assert refused.nearest.world_size == layout.world_size
        assert refused.nearest.nodes == layout.nodes


@pytest.mark.parametrize(("engine", "text", "precision", "offload", "schedule"), REQUIRED)
def test_what_was_measured_to_work_is_supported(
    engine: str, text: str, precision: Precision, offload: str, schedule: str
) -> None:
    check_layout(_layout(engine, text, offload, schedule), precision, 1.0, SMALL, BatchSpec(32, 4))


def test_no_parity_case_stands_twice_and_each_is_supported() -> None:
    cases = parity_cases()
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        check_layout(case.layout, case.precision, 1.0, SMALL, BatchSpec(32, case.accumulation))


def test_accumulation_is_proven_for_every_plain_layout() -> None:
    proven = {(c.layout.engine, c.layout.zero) for c in parity_cases() if c.layout.pp == 1 and c.accumulation == 2}
    assert proven == {("ddp", 0), ("fsdp2", 0), *(("deepspeed", stage) for stage in range(4))}


def test_every_row_is_proven_along_its_own_degrees() -> None:
    for row in TABLE:
        for case in row.cases():
            assert Choice(case.layout, case.precision).degrees == row.degrees
            assert case.layout.zero == row.zero


@pytest.mark.parametrize(
    ("engine", "text", "precision", "clip_norm", "fields", "reason", "near"),
    [
        ("deepspeed", "dp=2,zero=0", "bf16", 1.0, ["layout.zero", "precision"], "FP16_Unfused", "dp=2,zero=1 bf16"),
        ("deepspeed", "sp=2,zero=0", "fp32", 1.0, ["layout.sp", "layout.zero"], "unreduced", "deepspeed sp=2,zero=3"),
        ("deepspeed", "sp=2,zero=2", "fp32", 0.0, ["layout.sp", "layout.zero"], "unreduced", "deepspeed sp=2,zero=3"),
        (
            "deepspeed",
            "pp=2,zero=0",
            "fp32",
            1.0,
            ["layout.pp", "layout.zero", "optimizer.clip_norm"],
            "its own gradient norm",
            "ddp pp=2",
        ),
        ("deepspeed", "pp=2,zero=2", "fp32", 1.0, ["layout.pp", "layout.zero"], "PipelineModule", "ddp pp=2"),
        ("deepspeed", "ep=2,zero=3", "fp32", 1.0, ["layout.ep", "layout.zero"], "experts", "ddp ep=2"),
        ("deepspeed", "ep=2,zero=1", "fp32", 1.0, ["layout.engine", "layout.ep"], "MoE is not used", "ddp ep=2"),
        ("deepspeed", "shard=2", "fp32", 1.0, ["layout.engine", "layout.shard"], "over dp", "deepspeed dp=2,zero=1"),
        ("ddp", "shard=2", "fp32", 1.0, ["layout.engine", "layout.shard"], "whole on every rank", "fsdp2 shard=2 fp32"),
        ("fsdp2", "dp=2", "fp32", 1.0, ["layout.engine", "layout.dp", "layout.shard"], "what ddp is for", "ddp dp=2"),
        ("deepspeed", "pp=2,zero=1", "fp32", 1.0, ["layout.engine", "layout.pp"], "PipelineModule is not", "ddp pp=2"),
        ("ddp", "tp=2,sp=2", "fp32", 1.0, ["layout.engine", "layout.tp", "layout.sp"], "no parity test", ""),
        ("deepspeed", "dp=2", "fp16", 1.0, ["precision", "layout.engine", "layout.dp"], "no parity test", "dp=2"),
    ],
)
def test_what_does_not_go_together_is_named_with_the_nearest(
    engine: str,
    text: str,
    precision: Precision,
    clip_norm: float,
    fields: list[str],
    reason: str,
    near: str,
) -> None:
    refused = _refused(_layout(engine, text), precision, clip_norm)
    assert list(refused.fields) == fields
    assert reason in refused.reason
    assert all(f"{name} {value!r}" in str(refused) for name, value in refused.fields.items())
    assert near in str(refused).partition("the nearest valid choice is ")[2]


def test_pipelines_without_clipping_are_not_refused_for_clipping() -> None:
    refused = _refused(_layout("deepspeed", "pp=2,zero=0"), clip_norm=0.0)
    assert "optimizer.clip_norm" not in refused.fields


@pytest.mark.parametrize(
    ("changed", "fields"),
    [
        ({"offload": "optimizer"}, {"layout.offload", "layout.engine", "layout.dp"}),
        ({"schedule": "gpipe"}, {"layout.schedule", "layout.pp"}),
        ({"pp": 2, "schedule": "zbv"}, {"layout.schedule", "layout.engine", "layout.dp", "layout.pp"}),
        ({"sp": 2, "activation_checkpointing": True}, {"layout.activation_checkpointing", "layout.engine"}),
    ],
)
def test_options_that_no_row_has_are_named(changed: dict[str, Any], fields: set[str]) -> None:
    layout = replace(LayoutSpec(dp=2), **changed)
    world = degree_product(layout)
    refused = _refused(replace(layout, processes_per_node=world))
    assert fields <= set(refused.fields)


@pytest.mark.parametrize(
    ("engine", "text", "changed", "field", "value"),
    [
        ("fsdp2", "tp=2", {"heads": 3}, "model.options.heads", 3),
        ("fsdp2", "tp=4", {"kv_heads": 2}, "model.options.kv_heads", 2),
        ("fsdp2", "tp=2", {"experts": 0, "hidden": 129}, "model.options.hidden", 129),
        ("fsdp2", "tp=2", {"vocab": 255}, "model.options.vocab", 255),
        ("ddp", "sp=2", {"sequence": 33}, "model.options.sequence", 33),
        ("ddp", "sp=2", {"kv_heads": 1}, "model.options.kv_heads", 1),
        ("ddp", "pp=2", {"layers": 3}, "model.options.layers", 3),
        ("ddp", "pp=2", {"tied": True}, "model.options.tied", True),
        ("fsdp2", "ep=2", {"experts": 3}, "model.options.experts", 3),
        ("fsdp2", "ep=2", {"experts": 0}, "model.options.experts", 0),
        ("ddp", "pp=2", {"layers": 0}, "model.options.layers", 0),
    ],
)
def test_sizes_that_do_not_divide_are_named(
    engine: str, text: str, changed: dict[str, Any], field: str, value: object
) -> None:
    model = replace(SMALL, **changed)
    refused = _refused(_layout(engine, text), model_facts=model)
    assert refused.fields[field] == value
    check_layout(refused.nearest, refused.nearest_precision, 1.0, model)


def test_interleaved_schedules_need_two_stages_per_rank() -> None:
    six = replace(SMALL, layers=6)
    check_layout(_layout("ddp", "pp=2"), "fp32", 1.0, six)
    refused = _refused(_layout("ddp", "pp=2", schedule="interleaved"), model_facts=six)
    assert refused.fields == {"layout.pp": 2, "model.options.layers": 6, "layout.schedule": "interleaved"}
    assert refused.nearest.pp == 2


def test_a_schedule_gets_the_micro_batches_that_it_needs() -> None:
    refused = _refused(_layout("ddp", "pp=2"), batch=BatchSpec(8, 1))
    assert refused.fields["batch.accumulation"] == 1
    assert refused.nearest.schedule == "gpipe"
    assert (
        "batch.accumulation" in _refused(_layout("ddp", "pp=2", schedule="zero_bubble"), batch=BatchSpec(10, 5)).fields
    )


def test_a_batch_that_does_not_divide_names_sizes_that_do() -> None:
    layout = parse_layout("ddp", "dp=2")
    with pytest.raises(SpecRefused, match="62 rows do not divide by 2 data-parallel ranks x 2 micro-batches; 60 or 64"):
        check_parallel(layout, "fp32", 1.0, BatchSpec(62, 2), ModelFacts())
    with pytest.raises(SpecRefused, match="3 rows do not divide by 2 data-parallel ranks x 3 micro-batches; 6 would"):
        check_parallel(layout, "fp32", 1.0, BatchSpec(3, 3), ModelFacts())
    with pytest.raises(SpecRefused, match="by 1 data-parallel ranks x 2 micro-batches; 62 or 64"):
        check_parallel(layout, "fp32", 1.0, BatchSpec(63, 2), ModelFacts())


def test_experts_take_rows_of_their_own() -> None:
    with pytest.raises(SpecRefused, match="by 2 data-parallel ranks"):
        check_parallel(parse_layout("fsdp2", "ep=2"), "fp32", 1.0, BatchSpec(7, 1), SMALL)
    check_parallel(parse_layout("ddp", "sp=2"), "fp32", 1.0, BatchSpec(7, 1), SMALL)


def test_a_model_without_stated_sizes_trains_on_replicas_only() -> None:
    flights = model_facts({"width": 64, "blocks": 2, "dropout": 0.1})
    check_layout(parse_layout("deepspeed", "dp=2,zero=3"), "fp32", 1.0, flights)
    for text in ("tp=2", "sp=2", "pp=2"):
        refused = _refused(parse_layout("ddp", text), model_facts=flights)
        assert (refused.nearest.engine, refused.nearest.dp) == ("ddp", 2)


def test_checkpointing_needs_blocks_that_are_known() -> None:
    layout = replace(parse_layout("ddp", "dp=2"), activation_checkpointing=True, compile=True)
    check_layout(layout, "fp32", 1.0, SMALL)
    refused = _refused(layout, model_facts=ModelFacts())
    assert refused.fields == {"layout.activation_checkpointing": True, "model.options.layers": 0}
    assert refused.nearest == replace(layout, activation_checkpointing=False)


def test_sizes_are_read_from_options_and_nothing_else_is() -> None:
    read = model_facts({"layers": 4, "heads": True, "dim": "64", "vocab": -1, "tied": 1, "sequence": 32.0, "top_k": 2})
    assert read == ModelFacts(layers=4, top_k=2)


def test_the_page_shows_the_table() -> None:
    assert PAGE.read_text() == render_page(), "run: python -m trainer.layouts > docs/layouts.md"
    for fault in FAULTS:
        assert fault.reason in PAGE.read_text()
