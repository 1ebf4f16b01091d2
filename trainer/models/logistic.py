"""Logistic regression under the contract of the networks: one weight per number and per category code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class LogisticRegression(nn.Module):
    """Logits of a binary target, linear in the numbers [batch, numeric_width] and in indicators of the codes."""

    def __init__(self, category_sizes: Sequence[int], numeric_width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(numeric_width, 1)
        self.categories = nn.ModuleList(nn.Embedding(size, 1) for size in category_sizes)

    def forward(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        """Logits [batch]."""
        logits = self.linear(numeric)
        for index, table in enumerate(self.categories):
            logits = logits + table(categorical[:, index])
        return torch.squeeze(logits, 1)
