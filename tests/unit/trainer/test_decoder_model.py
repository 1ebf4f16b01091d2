"""The decoder computes what the papers say, and refuses options that make no decoder."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.models.decoder import Attention, Decoder, DecoderOptions, Mixture, Router, attend
from trainer.parallel.loss import token_loss_sum
from trainer.spec import model_facts

_SMALL: dict[str, Any] = {
    "vocab": 50,
    "sequence": 12,
    "dim": 16,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 24,
}
_OPTIONS = DecoderOptions(**_SMALL)
_MIXTURE = replace(_OPTIONS, experts=4, top_k=2)


def _decoder(options: DecoderOptions = _OPTIONS, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(options)


def _tokens(seed: int = 0, batch: int = 3) -> Tensor:
    return torch.randint(50, (batch, 12), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab", 0),
        ("sequence", -1),
        ("dim", 18),
        ("dim", 12),
        ("layers", 1.5),
        ("layers", True),
        ("heads", 3),
        ("kv_heads", 3),
        ("kv_heads", 0),
        ("hidden", "24"),
        ("tied", 1),
        ("rope_base", 0.0),
        ("rope_base", math.inf),
        ("norm_eps", -1e-5),
        ("experts", -1),
    ],
)
def test_options_are_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{'dim' if field == 'heads' else field} is "):
        DecoderOptions.parse({**_SMALL, field: value})


@pytest.mark.parametrize(("field", "value"), [("top_k", 5), ("top_k", 0), ("balance_rate", -0.1)])
def test_options_of_experts_are_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field} is "):
        DecoderOptions.parse({**_SMALL, "experts": 4, field: value})


def test_unknown_and_missing_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown options \['width'\]"):
        DecoderOptions.parse({**_SMALL, "width": 3})
    with pytest.raises(ValueError, match=r"missing options \['hidden', 'vocab'\]"):
        DecoderOptions.parse({key: value for key, value in _SMALL.items() if key not in ("vocab", "hidden")})


def test_layouts_read_the_sizes_from_the_options() -> None:
    facts = model_facts(replace(_MIXTURE, tied=True).to_json())

    assert (facts.layers, facts.heads, facts.kv_heads, facts.dim, facts.hidden) == (2, 4, 2, 16, 24)
    assert (facts.vocab, facts.sequence, facts.experts, facts.top_k, facts.tied) == (50, 12, 4, 2, True)


def test_the_first_weights_depend_on_the_seed_and_the_name_only() -> None:
    first, again, other = _decoder(), _decoder(), _decoder(seed=1)
    longer = dict(_decoder(replace(_OPTIONS, vocab=60)).named_parameters())

    for (name, p), (_, q), (_, r) in zip(
        first.named_parameters(), again.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(p, q)
        assert torch.equal(p, r) == (p.ndim == 1)
        if p.shape == longer[name].shape:
            assert torch.equal(p, longer[name])


def test_weights_that_lead_back_to_the_stream_start_smaller() -> None:
    model = _decoder(replace(_OPTIONS, dim=64, hidden=256, layers=8))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    assert float(parameters["layers.0.feed.w1.weight"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(parameters["layers.0.feed.w2.weight"].std()) == pytest.approx(0.02 / 4, rel=0.05)
    assert float(parameters["layers.7.attention.wo.weight"].std()) == pytest.approx(0.02 / 4, rel=0.05)


def test_a_tied_output_layer_is_the_embedding() -> None:
    tied, untied = _decoder(replace(_OPTIONS, tied=True)), _decoder()
    assert tied.head is not None
    assert tied.embed is not None
    assert tied.head.weight is tied.embed.weight
    assert "head.weight" not in dict(tied.named_parameters())
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 50 * 16


@pytest.mark.parametrize("options", [_OPTIONS, _MIXTURE], ids=["plain", "mixture"])
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10), st.integers(0, 1000))
@torch.no_grad()
def test_no_position_sees_a_later_one(options: DecoderOptions, last: int, seed: int) -> None:
    model, tokens = _decoder(options), _tokens(seed)
    changed = tokens.clone()
    changed[:, last + 1 :] = (changed[:, last + 1 :] + 7) % 50

    before, after = model(tokens), model(changed)

    torch.testing.assert_close(after[:, : last + 1], before[:, : last + 1], rtol=0, atol=1e-6)
    assert not torch.allclose(after[:, last + 1], before[:, last + 1], atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 6), st.integers(0, 100))
def test_rotated_products_depend_on_the_distance_only(a: int, b: int, shift: int, seed: int) -> None:
    attention = Attention(_OPTIONS)
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(4, generator=generator), torch.randn(4, generator=generator)
    turned_q = attention._rotate(q.expand(1, 12, 1, 4))[0, :, 0]
    turned_k = attention._rotate(k.expand(1, 12, 1, 4))[0, :, 0]

    here, there = turned_q[a] @ turned_k[b], turned_q[a + shift] @ turned_k[b + shift]

    torch.testing.assert_close(here, there, rtol=0, atol=1e-5)
    torch.testing.assert_close(turned_q[a].norm(), q.norm())
    torch.testing.assert_close(turned_q[0], q)


def test_the_rotation_is_that_of_the_paper() -> None:
    """Pair i of a head of width 4 turns by position * base^(-2i/4); pairs are (0, 2) and (1, 3)."""
    turned = Attention(replace(_OPTIONS, rope_base=100.0))._rotate(
        torch.tensor([1.0, 0.0, 0.0, 1.0]).expand(1, 12, 1, 4)
    )
    angle, slow = 3.0, 3.0 * 100.0**-0.5
    expected = torch.tensor([math.cos(angle), -math.sin(slow), math.sin(angle), math.cos(slow)])
    torch.testing.assert_close(turned[0, 3, 0], expected)


def test_more_positions_than_allowed_are_refused() -> None:
    with pytest.raises(ValueError, match="positions up to 13, but sequence is 12"):
        _decoder()(torch.zeros(1, 13, dtype=torch.int64))


def test_heads_share_their_group_s_keys() -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 5, 4, 8, generator=generator)
    k, v = torch.randn(2, 5, 2, 8, generator=generator), torch.randn(2, 5, 2, 8, generator=generator)

    mixed = attend(q, k, v)

    for head in range(4):
        scores = q[:, :, head] @ k[:, :, head // 2].transpose(1, 2) / math.sqrt(8)
        weights = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf).softmax(-1)
        torch.testing.assert_close(mixed[:, :, head], weights @ v[:, :, head // 2])


@torch.no_grad()
def test_every_token_gets_all_its_experts() -> None:
    torch.manual_seed(5)
    mixture = Mixture(_MIXTURE)
    for p in mixture.parameters():
        p.normal_(0, 0.3)
    mixture.router.bias[:] = torch.tensor([0.3, 0.0, 0.0, -0.3])
    x = torch.randn(2, 7, 16)

    got = mixture(x)

    experts, gates = mixture.experts, torch.sigmoid(x @ mixture.router.weight.T)
    for place in ((row, position) for row in range(2) for position in range(7)):
        chosen = (gates[place] + mixture.router.bias).argsort(descending=True)[:2]
        expected = torch.zeros(16)
        for e in chosen:
            inner = F.silu(experts.w1[e] @ x[place]) * (experts.w3[e] @ x[place])
            expected += gates[place][e] / gates[place][chosen].sum() * (experts.w2[e] @ inner)
        torch.testing.assert_close(got[place], expected, rtol=1e-4, atol=1e-5)
    assert int(mixture.router.load.sum()) == 2 * 7 * 2


def test_the_bias_evens_out_the_load_and_takes_no_gradient() -> None:
    torch.manual_seed(6)
    router = Router(replace(_MIXTURE, balance_rate=0.05))
    rows = torch.randn(400, 16)
    with torch.no_grad():
        router.weight.normal_(0, 0.1)
        router.bias[0] = 0.5
    router(rows)
    uneven = router.load.clone()
    assert int(uneven[0]) == 400
    for _ in range(40):
        router.balance(router.load)
        router(rows)

    assert int(router.load.max() - router.load.min()) < int(uneven.max() - uneven.min()) // 3
    assert "bias" in router.state_dict()
    assert [name for name, _ in router.named_parameters()] == ["weight"]


def test_evaluation_does_not_count() -> None:
    model = _decoder(_MIXTURE).eval()
    model(_tokens())
    assert all(int(m.load.sum()) == 0 for m in model.modules() if isinstance(m, Router))


@pytest.mark.parametrize(
    "options", [_OPTIONS, replace(_OPTIONS, tied=True), _MIXTURE], ids=["plain", "tied", "mixture"]
)
def test_it_learns_the_same_bits_twice(options: DecoderOptions) -> None:
    runs = []
    for _ in range(2):
        model, losses = _decoder(options), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = (torch.arange(13) * torch.tensor([[1], [2], [3]])) % 50
        for _ in range(25):
            optimizer.zero_grad()
            loss = token_loss_sum(model(tokens[:, :-1]), tokens[:, 1:]) / 36
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        runs.append([loss.hex() for loss in losses])
        assert losses[0] == pytest.approx(math.log(50), abs=0.2)
        assert losses[-1] < 1.5
    assert runs[0] == runs[1]


def test_the_loss_leaves_filling_out() -> None:
    logits, targets = torch.randn(2, 3, 50), torch.randint(50, (2, 3))
    weight = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    logs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(token_loss_sum(logits, targets, weight), -(logs * weight).sum())
    torch.testing.assert_close(token_loss_sum(logits, targets), -logs.sum())
    assert token_loss_sum(logits.bfloat16(), targets).dtype == torch.float32
