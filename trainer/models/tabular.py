"""Embeddings for categories, and a residual network over them and the numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


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
        width: Width of the residual blocks.
        blocks: Their number.
        dropout: Share of units that training leaves out inside each block.

    Raises:
        ValueError: sizes or a share that make no network.
    """

    def __init__(
        self, category_sizes: Sequence[int], numeric_width: int, width: int, blocks: int, dropout: float
    ) -> None:
        if width < 1 or blocks < 0 or not 0 <= dropout < 1:
            raise ValueError(
                f"width {width} must be positive, blocks {blocks} not negative, dropout {dropout} in [0, 1)"
            )
        super().__init__()
        widths = [min(16, round(size**0.5) + 1) for size in category_sizes]
        self.embeddings = nn.ModuleList(map(category_embedding, category_sizes, widths))
        self.enter = nn.Linear(numeric_width + sum(widths), width)
        self.blocks = nn.ModuleList(ResidualBlock(width, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.leave = nn.Linear(width, 1)

    def forward(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        """Logits [batch]."""
        embedded = [table(categorical[:, index]) for index, table in enumerate(self.embeddings)]
        x = self.enter(torch.cat([numeric, *embedded], dim=1))
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
