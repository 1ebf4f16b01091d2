"""How many nodes the next attempt of an elastic run has, and what its layout is then."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.trainer_runs import toy_spec

from headway.declaration import TrainingSpec
from headway.training.elastic import Ran, next_nodes
from headway.training.plan import declared_layout
from trainer.blobs import canonical_json
from trainer.spec import LayoutSpec, RunSpec, SpecRefused, degree_product, layout_on, parse_layout, parse_run


def elastic(layout: LayoutSpec, fewest: int, batch: int = 24) -> RunSpec:
    spec = toy_spec()
    return replace(spec, layout=replace(layout, min_nodes=fewest), batch=replace(spec.batch, global_size=batch))


@given(
    st.sets(st.integers(1, 8), min_size=1),
    st.lists(st.builds(Ran, st.integers(1, 8), st.sampled_from(["peer_lost", "node_lost", "never_started"]))),
    st.none() | st.integers(0, 9),
)
def test_the_rule_gives_a_possible_number_and_never_more_than_there_is_room_for(
    possible: set[int], history: list[Ran], capacity: int | None
) -> None:
    numbers = sorted(possible)
    nodes = next_nodes(numbers, history, capacity)
    assert nodes in possible
    if not history:
        assert nodes == max(possible)
    elif capacity is not None:
        assert nodes <= max(capacity, min(possible))
        assert not any(nodes < n <= capacity for n in possible)
    elif history[-1].reason_code == "never_started":
        assert nodes < history[-1].nodes or nodes == min(possible)
    else:
        assert nodes <= max(history[-1].nodes, min(possible))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 2), st.integers(1, 4), st.integers(1, 4))
def test_fewer_nodes_change_dp_or_shard_and_nothing_else(dp: int, shard: int, tp: int, most: int, nodes: int) -> None:
    world = dp * shard * tp
    if world % most:
        return
    layout = LayoutSpec(
        engine="fsdp2", dp=dp, shard=shard, tp=tp, nodes=most, processes_per_node=world // most, min_nodes=1
    )
    try:
        smaller = layout_on(layout, nodes)
    except SpecRefused:
        assert nodes > most or (dp * nodes % most and shard * nodes % most)
        return
    smaller.check()
    assert degree_product(smaller) == smaller.world_size == nodes * layout.processes_per_node
    assert replace(smaller, dp=dp, shard=shard, nodes=most, min_nodes=1) == layout
    assert smaller.dp == dp or smaller.shard == shard


def test_only_numbers_that_keep_the_global_batch_are_possible() -> None:
    assert elastic(parse_layout("ddp", "dp=4", nodes=4), 1, batch=24).possible_nodes() == (1, 2, 3, 4)
    assert elastic(parse_layout("ddp", "dp=4", nodes=4), 1, batch=32).possible_nodes() == (1, 2, 4)
    assert toy_spec().possible_nodes() == (2,)


@pytest.mark.parametrize(
    ("layout", "fewest", "batch", "field"),
    [
        (parse_layout("ddp", "dp=4", nodes=4), 3, 32, "layout.min_nodes"),
        (parse_layout("ddp", "dp=3", nodes=3), 4, 24, "layout.min_nodes"),
        (parse_layout("ddp", "dp=2", nodes=2), -1, 24, "layout.min_nodes"),
    ],
)
def test_a_range_that_cannot_be_kept_is_refused_before_launch(
    layout: LayoutSpec, fewest: int, batch: int, field: str
) -> None:
    with pytest.raises(SpecRefused) as refused:
        elastic(layout, fewest, batch).check()
    assert refused.value.field == field


def test_the_range_is_part_of_the_run_and_absent_where_there_is_none() -> None:
    plain, spec = toy_spec(), elastic(toy_spec().layout, 1, 8)
    assert b"min_nodes" not in canonical_json(plain.to_json())
    assert plain.digest != spec.digest
    assert parse_run(canonical_json(spec.to_json())) == spec


def test_a_declaration_says_how_many_nodes_or_a_range() -> None:
    declared = {"factory": "model.build", "as_of": {"start": "2026-02-01", "end": "2026-06-01"}}
    assert declared_layout(TrainingSpec.model_validate(declared | {"nodes": 2})).min_nodes == 0
    ranged = declared_layout(TrainingSpec.model_validate(declared | {"nodes": {"min": 1, "max": 3}}))
    assert (ranged.nodes, ranged.dp, ranged.min_nodes) == (3, 3, 1)
    same = declared_layout(TrainingSpec.model_validate(declared | {"nodes": {"min": 2, "max": 2}}))
    assert same == declared_layout(TrainingSpec.model_validate(declared | {"nodes": 2}))
