"""Which rows each step learns from, the rates, and the validation measure: pure functions."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.batches import BatchPlan
from trainer.examples import auc
from trainer.loop import rate_factor
from trainer.spec import OptimizerSpec


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    world_size, accumulation = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    size = world_size * accumulation * draw(st.integers(1, 5))
    return BatchPlan(draw(st.integers(1, 60)), size, world_size, accumulation, draw(st.integers(-5, 2**63)))


@settings(max_examples=60, deadline=None)
@given(plans(), st.integers(0, 3))
def test_every_epoch_takes_every_row_once_on_one_rank(plan: BatchPlan, epoch: int) -> None:
    order = plan.order(epoch)
    seen: list[int] = []
    for index in range(plan.steps_per_epoch):
        step = epoch * plan.steps_per_epoch + index
        assert plan.place(step)[0] == epoch
        real = 0
        for rank in range(plan.data_ranks):
            batches = plan.micro_batches(order, step, rank)
            assert len(batches) == plan.accumulation
            for places, weight in batches:
                assert len(places) == plan.global_size // (plan.data_ranks * plan.accumulation)
                kept = places if weight is None else places[weight == 1]
                seen.extend(kept.tolist())
                real += len(kept)
        assert real == plan.real_rows(step)
        assert plan.samples(step + 1) == epoch * plan.rows + len(seen)
    assert sorted(seen) == list(range(plan.rows))


def test_order_depends_on_seed_and_epoch_alone() -> None:
    orders = {
        (seed, epoch): BatchPlan(1000, 8, 2, 1, seed).order(epoch).tolist()
        for seed, epoch in product((2**63, 2**63 + 1), (0, 1, 2))
    }
    assert len({tuple(order) for order in orders.values()}) == 6
    for (seed, epoch), order in orders.items():
        assert BatchPlan(1000, 64, 4, 2, seed).order(epoch).tolist() == order


def test_order_of_another_machine_or_year() -> None:
    # A checkpoint's position means nothing when the generator gives another order.
    assert BatchPlan(8, 8, 1, 1, 7).order(3).tolist() == [4, 3, 5, 6, 0, 7, 1, 2]


def test_rates_warm_up_linearly_and_fall_to_nothing() -> None:
    spec = OptimizerSpec(warmup_share=0.1)
    factors = [rate_factor(step, 100, spec) for step in range(100)]
    assert factors[:10] == [(step + 1) / 10 for step in range(10)]
    assert factors[10] == 1.0
    assert all(late < early for early, late in pairwise(factors[10:]))
    assert 0 < factors[-1] < 0.001
    assert rate_factor(0, 1, OptimizerSpec(warmup_share=0.0)) == 1.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=30))
def test_auc_is_the_share_of_pairs_in_order(rows: list[tuple[int, bool]]) -> None:
    scores = np.array([float(score) for score, _ in rows])
    target = np.array([float(label) for _, label in rows], dtype=np.float32)
    pairs = [
        1.0 if high > low else 0.5 if high == low else 0.0
        for high, low in product(scores[target == 1], scores[target == 0])
    ]
    expected = sum(pairs) / len(pairs) if pairs else None
    assert auc(scores, target) == (None if expected is None else pytest.approx(expected))


def test_filling_has_weight_zero_and_real_rows_one() -> None:
    plan = BatchPlan(5, 4, 2, 2, 0)
    order = torch.arange(5)
    last = [plan.micro_batches(order, 1, rank) for rank in (0, 1)]
    weights = [None if weight is None else weight.tolist() for batches in last for _, weight in batches]
    assert weights == [None, [0.0], [0.0], [0.0]]
