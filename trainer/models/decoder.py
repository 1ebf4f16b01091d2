"""A decoder-only transformer: RoPE, RMSNorm, SwiGLU, grouped-query attention, on request a mixture of experts.

Written so that it can be divided: heads are counted from the width at hand, blocks keep their names when a pipeline
cuts the others away, and attention and experts let an `exchange` stand between them and what they compute. The weights
of a parameter depend on the seed and its name only, whichever parts are built.

Sources: Su and others, RoFormer (2021); Zhang and Sennrich, Root Mean Square Layer Normalization (2019); Shazeer, GLU
Variants Improve Transformer (2020); Ainslie and others, GQA (2023); Wang and others, Auxiliary-Loss-Free Load Balancing
Strategy for Mixture-of-Experts (2024), with the sigmoid gate of DeepSeek-V3 (2024).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.parallel.plan import ParallelPlan, Style

_STD = 0.02


@dataclass(frozen=True)
class DecoderOptions:
    """The shape of a decoder.

    Args:
        vocab: Tokens.
        sequence: Most positions.
        dim: Width.
        layers: Blocks.
        heads: Query heads; they share `dim`.
        kv_heads: Key and value heads; each serves `heads / kv_heads` query heads.
        hidden: Width inside SwiGLU, of each expert where there are any.
        tied: The output layer uses the embedding's weights.
        rope_base: Base of the rotary frequencies.
        norm_eps: Added to the mean square.
        experts: Experts per block; 0 for a plain SwiGLU.
        top_k: Experts per token.
        balance_rate: Step of the routers' bias per optimizer step.

    Raises:
        ValueError: names the field, its value and the limit.
    """

    vocab: int
    sequence: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    tied: bool = False
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    experts: int = 0
    top_k: int = 2
    balance_rate: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("vocab", "sequence", "dim", "layers", "heads", "kv_heads", "hidden"):
            _whole(name, getattr(self, name), 1)
        _whole("experts", self.experts, 0)
        if type(self.tied) is not bool:
            raise ValueError(f"tied is {self.tied!r}, expected true or false")
        for name in ("rope_base", "norm_eps"):
            _positive(name, getattr(self, name))
        if self.dim % self.heads or self.dim // self.heads % 2:
            raise ValueError(f"dim is {self.dim}, expected an even multiple of heads ({self.heads})")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}, expected a divisor of heads ({self.heads})")
        if self.experts:
            _whole("top_k", self.top_k, 1)
            if self.top_k > self.experts:
                raise ValueError(f"top_k is {self.top_k}, expected at most experts ({self.experts})")
            if self.balance_rate != 0:
                _positive("balance_rate", self.balance_rate)

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> DecoderOptions:
        """The options of a run spec.

        Raises:
            ValueError: names what is unknown, missing or out of its limits.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ValueError(f"unknown options {unknown}; options are {sorted(known)}")
        missing = sorted(f.name for f in fields(cls) if f.default is MISSING and f.name not in options)
        if missing:
            raise ValueError(f"missing options {missing}")
        return cls(**options)

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


class HeadExchange(Protocol):
    """What lets an attention see whole sequences where this rank holds a part of them."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """See `trainer.parallel.sequence.Ulysses`."""
        ...


class RowExchange(Protocol):
    """What brings tokens to experts on other ranks."""

    def __call__(self, rows: Tensor, counts: Tensor, compute: Callable[[Tensor, list[int]], Tensor]) -> Tensor:
        """See `trainer.parallel.expert.TokenExchange`."""
        ...


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions.

    `part` says which part of the sequence [from `part * positions` on] the input is, `exchange` how to see the others.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, options: DecoderOptions) -> None:
        super().__init__()
        self.width = options.dim // options.heads
        self.wq = nn.Linear(options.dim, options.heads * self.width, bias=False)
        self.wk = nn.Linear(options.dim, options.kv_heads * self.width, bias=False)
        self.wv = nn.Linear(options.dim, options.kv_heads * self.width, bias=False)
        self.wo = nn.Linear(options.heads * self.width, options.dim, bias=False)
        self.exchange: HeadExchange | None = None
        self.part = 0
        angles = _angles(options.sequence, self.width, options.rope_base)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, positions, dim] to the same shape.

        Raises:
            ValueError: more positions than the options allow.
        """
        q, k, v = (self._heads(project(x)) for project in (self.wq, self.wk, self.wv))
        q, k = self._rotate(q), self._rotate(k)
        mixed = attend(q, k, v) if self.exchange is None else self.exchange(q, k, v, attend)
        return self.wo(mixed.flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        # Tensor ranks have a part of the heads: their number is what the width gives.
        return x.unflatten(-1, (-1, self.width))

    def _rotate(self, x: Tensor) -> Tensor:
        start = self.part * x.shape[1]
        stop = start + x.shape[1]
        if stop > len(self.cos):
            raise ValueError(f"positions up to {stop}, but sequence is {len(self.cos)}")
        cos, sin = self.cos[start:stop, None], self.sin[start:stop, None]
        even, odd = x.float().chunk(2, dim=-1)
        return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1).to(x.dtype)


class SwiGLU(nn.Module):
    """`w2(silu(w1 x) * w3 x)`."""

    def __init__(self, options: DecoderOptions) -> None:
        super().__init__()
        self.w1 = nn.Linear(options.dim, options.hidden, bias=False)
        self.w3 = nn.Linear(options.dim, options.hidden, bias=False)
        self.w2 = nn.Linear(options.hidden, options.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., dim] to the same shape."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Router(nn.Module):
    """Chooses experts by a sigmoid gate plus a bias that keeps them equally busy; the bias has no part in the weights.

    `load` counts the tokens of each expert since the last `balance`. It is no buffer: replicas must not copy it.
    """

    bias: Tensor

    def __init__(self, options: DecoderOptions) -> None:
        super().__init__()
        self.top_k = options.top_k
        self.rate = options.balance_rate
        self.weight = nn.Parameter(torch.empty(options.experts, options.dim))
        self.register_buffer("bias", torch.zeros(options.experts))
        self.load = torch.zeros(options.experts, dtype=torch.int64)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights [n, top_k] that sum to one and experts [n, top_k] of `rows` [n, dim]; tokens per expert [experts]."""
        with torch.autocast(rows.device.type, enabled=False):
            gates = F.linear(rows.float(), self.weight.float()).sigmoid()
        chosen = (gates.detach() + self.bias).topk(self.top_k, dim=-1).indices
        weights = gates.gather(-1, chosen)
        counts = chosen.flatten().bincount(minlength=len(self.bias))
        if self.training:
            # A block that is computed again for its gradients counts twice, all its experts alike: signs do not change.
            self.load = self.load.to(counts.device) + counts
        return weights / weights.sum(-1, keepdim=True), chosen, counts

    def balance(self, load: Tensor) -> None:
        """Raise the bias of experts with less than the mean of `load` [experts], lower the others', and count anew."""
        mean = load.double().mean()
        self.bias += self.rate * torch.sign(mean - load).to(self.bias)
        self.load = torch.zeros_like(self.load)


class Experts(nn.Module):
    """SwiGLU experts, stacked along the first dimension of each parameter."""

    def __init__(self, options: DecoderOptions) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(options.experts, options.hidden, options.dim))
        self.w3 = nn.Parameter(torch.empty(options.experts, options.hidden, options.dim))
        self.w2 = nn.Parameter(torch.empty(options.experts, options.dim, options.hidden))
        self.exchange: RowExchange | None = None

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Results of `rows` [n, dim], those of expert 0 first, with `counts` [experts] rows each."""
        if self.exchange is None:
            return self.compute(rows, counts.tolist())
        return self.exchange(rows, counts, self.compute)

    def compute(self, rows: Tensor, counts: list[int]) -> Tensor:
        """The same with the experts that this rank holds."""
        w1, w3, w2 = map(_local, (self.w1, self.w3, self.w2))
        # An expert without rows computes too: every rank has to take part in every backward exchange.
        return torch.cat(
            [
                F.linear(F.silu(F.linear(part, w1[e])) * F.linear(part, w3[e]), w2[e])
                for e, part in enumerate(rows.split(counts))
            ]
        )


class Mixture(nn.Module):
    """Every token goes to its `top_k` experts; none is dropped."""

    def __init__(self, options: DecoderOptions) -> None:
        super().__init__()
        self.router = Router(options)
        self.experts = Experts(options)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, positions, dim] to the same shape."""
        rows = x.flatten(0, -2)
        weights, chosen, counts = self.router(rows)
        order = chosen.flatten().argsort(stable=True)
        source = order // chosen.shape[-1]
        results = self.experts(rows[source], counts) * weights.flatten()[order, None]
        total = torch.zeros(rows.shape, dtype=results.dtype, device=rows.device).index_add(0, source, results)
        return total.to(x.dtype).view_as(x)


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + feed(norm(x))`."""

    def __init__(self, options: DecoderOptions) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(options.dim, options.norm_eps)
        self.attention = Attention(options)
        self.feed_norm = nn.RMSNorm(options.dim, options.norm_eps)
        self.feed = Mixture(options) if options.experts else SwiGLU(options)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, positions, dim] to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed(self.feed_norm(x))


class Decoder(nn.Module):
    """Logits of the next token at every position.

    A stage of a pipeline lacks `embed`, or `norm` and `head` (None), and takes or gives activations in their place.
    The first weights come from one draw of torch's random state.
    """

    def __init__(self, options: DecoderOptions) -> None:
        super().__init__()
        # Before torch draws for the layers that it makes: how much that takes depends on their sizes.
        seed = int(torch.randint(2**62, ()).item())
        self.embed: nn.Embedding | None = nn.Embedding(options.vocab, options.dim)
        self.layers = nn.ModuleDict({str(index): Block(options) for index in range(options.layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(options.dim, options.norm_eps)
        self.head: nn.Linear | None = nn.Linear(options.dim, options.vocab, bias=False)
        if options.tied:
            self.head.weight = self.embed.weight
        init_weights(self, seed, options.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, positions] int64 to logits [batch, positions, vocab]."""
        x = tokens if self.embed is None else self.embed(tokens)
        for block in self.layers.values():
            x = block(x)
        if self.head is None or self.norm is None:
            return x
        return self.head(self.norm(x))


def decoder_plan(options: DecoderOptions) -> ParallelPlan:
    """How a decoder may be divided."""
    tensor: dict[str, Style] = {
        "embed": "vocab",
        "head": "vocab",
        "layers.*.attention.wq": "column",
        "layers.*.attention.wk": "column",
        "layers.*.attention.wv": "column",
        "layers.*.attention.wo": "row",
    }
    if not options.experts:
        tensor |= {"layers.*.feed.w1": "column", "layers.*.feed.w3": "column", "layers.*.feed.w2": "row"}
    return ParallelPlan(
        blocks="layers",
        first=("embed",),
        last=("norm", "head"),
        tensor=tensor,
        sequence="layers.*.attention",
        experts="layers.*.feed.experts" if options.experts else "",
        routers="layers.*.feed.router" if options.experts else "",
    )


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention [batch, positions, heads, width] of queries to keys and values that may have fewer heads."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return mixed.transpose(1, 2)


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, layers: int) -> None:
    """Fill the parameters: ones for norms, else a normal with deviation 0.02, less where a block adds to its input.

    That is `0.02 / sqrt(2 layers)`, as in GPT-2 (Radford and others, 2019). Each parameter has random numbers of its
    own, by `seed` and name.
    """
    for name, p in model.named_parameters():
        if p.ndim == 1:
            p.fill_(1.0)
            continue
        generator = torch.Generator().manual_seed(_seed_of(seed, name))
        leaves = any(part in ("wo", "w2") for part in name.split("."))
        p.normal_(0.0, _STD / math.sqrt(2 * layers) if leaves else _STD, generator=generator)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1


def _angles(positions: int, width: int, base: float) -> Tensor:
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return (torch.arange(positions, dtype=torch.float64)[:, None] * frequencies).float()


def _local(weight: Tensor) -> Tensor:
    # Of a DTensor, whose module would cost a server that never sees one two seconds to import.
    to_local: Callable[[], Tensor] | None = getattr(weight, "to_local", None)
    return weight if to_local is None else to_local()


def _whole(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {value!r}, expected a whole number of at least {least}")


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}, expected a positive number")
