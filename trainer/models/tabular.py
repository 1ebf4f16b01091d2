"""Embeddings for categories, sine waves of numbers, and a residual network over them.

A network over plain standardised numbers is smooth in them, and what delays an aircraft is not. Learned sine waves of
each number let it bend where the data does (Gorishniy, Rubachev, Babenko: On Embeddings for Numerical Features in
Tabular Deep Learning, 2022, "periodic").
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Waves(nn.Module):
    """`sin(frequency x + phase)` of each number, with learned frequencies and phases.

    Args:
        numbers: How many numbers.
        count: Waves per number.
        spread: Standard deviation of the first frequencies, in radians per unit of a standardised number.
    """

    def __init__(self, numbers: int, count: int, spread: float) -> None:
        super().__init__()
        self.frequency = nn.Parameter(torch.randn(numbers, count) * spread)
        self.phase = nn.Parameter(torch.rand(numbers, count) * 2 * math.pi)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, numbers] to [batch, numbers * count]."""
        return torch.sin(x[:, :, None] * self.frequency + self.phase).flatten(1)


class ResidualBlock(nn.Module):
    """`x + W2 dropout(relu(W1 norm(x)))`, all of one width."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, width] to the same shape."""
        return x + self.second(self.dropout(torch.relu(self.first(self.norm(x)))))


class TabularNet(nn.Module):
    """Logits of a binary target from numbers [batch, numeric_width] and category codes [batch, categories].

    Args:
        category_sizes: Number of codes of each categorical input; an embedding has about their square root of columns.
        numeric_width: Columns of the numeric matrix.
        numbers: How many of them, from the left, are numbers; the others are missing indicators.
        width: Width of the residual blocks.
        blocks: Their number.
        dropout: Share of units that training leaves out inside each block.
        waves: Sine waves per number; 0 leaves them out.
        wave_spread: Standard deviation of their first frequencies.

    Raises:
        ValueError: sizes or a share that make no network.
    """

    def __init__(
        self,
        category_sizes: Sequence[int],
        numeric_width: int,
        numbers: int,
        width: int,
        blocks: int,
        dropout: float,
        waves: int,
        wave_spread: float,
    ) -> None:
        if width < 1 or min(blocks, waves) < 0 or wave_spread <= 0 or not 0 <= dropout < 1:
            raise ValueError(
                f"width {width} and wave_spread {wave_spread} must be positive, blocks {blocks} and waves {waves} not "
                f"negative, dropout {dropout} in [0, 1)"
            )
        super().__init__()
        widths = [min(16, round(size**0.5) + 1) for size in category_sizes]
        self.embeddings = nn.ModuleList(map(category_embedding, category_sizes, widths))
        self.waves = Waves(numbers, waves, wave_spread) if waves else None
        self.numbers = numbers
        self.enter = nn.Linear(numeric_width + numbers * waves + sum(widths), width)
        self.blocks = nn.ModuleList(ResidualBlock(width, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.leave = nn.Linear(width, 1)

    def forward(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        """Logits [batch]."""
        parts = [numeric, *(table(categorical[:, index]) for index, table in enumerate(self.embeddings))]
        if self.waves is not None:
            parts.append(self.waves(numeric[:, : self.numbers]))
        x = self.enter(torch.cat(parts, dim=1))
        for block in self.blocks:
            x = block(x)
        return self.leave(torch.relu(self.norm(x))).squeeze(1)


def category_embedding(size: int, width: int) -> nn.Embedding:
    """An embedding whose codes for "other" and "missing" start at zero: no evidence until training gives some."""
    table = nn.Embedding(size, width)
    nn.init.normal_(table.weight, std=0.1)
    with torch.no_grad():
        table.weight[:2] = 0.0
    return table
