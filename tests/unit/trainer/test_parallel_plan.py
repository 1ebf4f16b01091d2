"""A plan names what the model has; stages share the blocks out and keep the names; the norm is torch's."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainer.models.decoder import Decoder, DecoderOptions, decoder_plan
from trainer.parallel.clip import clip_gradients, grad_norm
from trainer.parallel.plan import ParallelPlan, PlanMismatch, check_plan, cut_stage, matching, stage_blocks

_OPTIONS = DecoderOptions(vocab=20, sequence=8, dim=16, layers=5, heads=4, kv_heads=2, hidden=24)


def _decoder(options: DecoderOptions = _OPTIONS) -> Decoder:
    torch.manual_seed(0)
    return Decoder(options)


@pytest.mark.parametrize("experts", [0, 4])
def test_the_decoder_s_plan_fits_it(experts: int) -> None:
    options = replace(_OPTIONS, experts=experts)
    check_plan(_decoder(options), decoder_plan(options))


def test_a_plan_for_another_model_is_refused_by_name() -> None:
    plan = replace(decoder_plan(_OPTIONS), tensor={"layers.*.attention.wz": "column"})
    with pytest.raises(PlanMismatch, match=r"names 'layers\.\*\.attention\.wz', which the Decoder has not"):
        check_plan(_decoder(), plan)


def test_unknown_styles_and_falling_split_points_are_refused() -> None:
    with pytest.raises(PlanMismatch, match=r"tensor\['head'\] is 'diagonal'"):
        ParallelPlan("layers", tensor={"head": "diagonal"})  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanMismatch, match="must rise"):
        ParallelPlan("layers", split_points=(2, 2))
    with pytest.raises(PlanMismatch, match="must rise"):
        ParallelPlan("layers", split_points=(0,))


def test_a_star_stands_for_one_part_of_a_name() -> None:
    names = [name for name, _ in matching(_decoder(), "layers.*.attention")]
    assert names == [f"layers.{index}.attention" for index in range(5)]
    assert matching(_decoder(), "layers.*") != matching(_decoder(), "*")
    assert matching(_decoder(), "") == []


@given(st.integers(1, 40), st.integers(1, 40))
def test_stages_share_all_blocks_in_order(blocks: int, stages: int) -> None:
    if stages > blocks:
        with pytest.raises(PlanMismatch, match="a stage would have none"):
            stage_blocks(blocks, stages)
        return
    ranges = stage_blocks(blocks, stages)
    assert [*itertools.chain(*ranges)] == [*range(blocks)]
    assert len(ranges) == stages
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_split_points_decide_where_they_are_given() -> None:
    assert stage_blocks(5, 3, (1, 4)) == [range(1), range(1, 4), range(4, 5)]
    with pytest.raises(PlanMismatch, match="make 2 stages, expected 3"):
        stage_blocks(5, 3, (2,))
    with pytest.raises(PlanMismatch, match="a stage would have none"):
        stage_blocks(5, 3, (1, 5))


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 5))
@torch.no_grad()
def test_stages_one_after_the_other_are_the_model(stages: int) -> None:
    whole, plan = _decoder(), decoder_plan(_OPTIONS)
    tokens = torch.arange(16).view(2, 8)
    parts = [cut_stage(_decoder(), plan, stage, stages) for stage in range(stages)]

    x = tokens
    for part in parts:
        x = part(x)

    assert torch.equal(x, whole(tokens))
    held = [dict(part.named_parameters()) for part in parts]
    assert sum(map(len, held)) == len(dict(whole.named_parameters()))
    for name, p in whole.named_parameters():
        (home,) = [own for own in held if name in own]
        assert torch.equal(home[name], p)


def test_tied_layers_cannot_be_on_two_stages() -> None:
    tied = replace(_OPTIONS, tied=True)
    with pytest.raises(PlanMismatch, match=r"embed \(stage 0\) and head \(stage 1\) share a parameter"):
        cut_stage(_decoder(tied), decoder_plan(tied), 0, 2)
    cut_stage(_decoder(tied), decoder_plan(tied), 0, 1)


def test_blocks_without_names_cannot_be_cut() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(PlanMismatch, match="'0' is a Sequential, expected a ModuleDict"):
        cut_stage(model, ParallelPlan("0"), 0, 1)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=30), st.floats(0.01, 1e3))
def test_norm_and_clip_are_torch_s(values: list[float], limit: float) -> None:
    def parameters() -> list[nn.Parameter]:
        made = [nn.Parameter(torch.zeros(len(values))), nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
        made[0].grad, made[1].grad = torch.tensor(values), torch.tensor([1.0, -2.0])
        return made

    ours, theirs = parameters(), parameters()

    norm = grad_norm(ours)
    clip_gradients(ours, norm, limit)

    expected = nn.utils.clip_grad_norm_(theirs, limit)
    assert norm == pytest.approx(expected.item(), rel=1e-5)
    for p, q in zip(ours[:2], theirs[:2], strict=True):
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


def test_small_gradients_add_up_in_double_precision() -> None:
    p, q = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    p.grad, q.grad = torch.tensor([1e4]), torch.tensor([1.0])
    assert grad_norm([p, q]) == pytest.approx((1e8 + 1) ** 0.5, rel=1e-12)
