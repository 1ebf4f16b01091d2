"""What a language model says of documents: nats of each, and tokens that it would write.

A document is coded on its own: the model sees the end token, then the document's tokens, and has to foretell them and
the end token behind them. No document is seen through another. Windows of `context` tokens slide by `stride`; a token
is judged in the first window that reaches it, so that all but the first window's tokens have at least
`context - stride` tokens before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

_WINDOWS_AT_ONCE = 16


@dataclass(frozen=True)
class Window:
    """Positions `start` to `stop` of a document's coded tokens; those from `judged` on count in this window."""

    document: int
    start: int
    judged: int
    stop: int


def document_windows(document: int, targets: int, context: int, stride: int) -> Iterator[Window]:
    """The windows over `targets` tokens that are to be foretold: every one is judged exactly once."""
    done = start = 0
    while done < targets:
        stop = min(start + context, targets)
        yield Window(document, start, done, stop)
        done = stop
        start += stride


def document_nats(
    module: nn.Module, documents: Sequence[NDArray[np.int64]], end_token: int, context: int, stride: int
) -> NDArray[np.float64]:
    """Nats [documents] that the model needs for each document and its end.

    Args:
        module: Gives logits [batch, positions, vocabulary] of tokens [batch, positions].
        documents: Tokens of each document, without the end token.
        end_token: Stands before and behind each document.
        context: Most tokens that the model sees.
        stride: How far a window lies behind the one before it, 1 to `context`.

    Raises:
        ValueError: a stride outside of its limits.
    """
    if not 1 <= stride <= context:
        raise ValueError(f"stride is {stride}, expected 1 to context ({context})")
    coded = [np.concatenate([[end_token], tokens, [end_token]]).astype(np.int64) for tokens in documents]
    windows = [
        window
        for index, tokens in enumerate(coded)
        for window in document_windows(index, len(tokens) - 1, context, stride)
    ]
    # Windows of like length together: little is computed for filling.
    windows.sort(key=lambda w: (w.start - w.stop, w.document, w.start))
    nats = np.zeros(len(documents), np.float64)
    module.eval()
    with torch.inference_mode():
        for first in range(0, len(windows), _WINDOWS_AT_ONCE):
            chosen = windows[first : first + _WINDOWS_AT_ONCE]
            for window, found in zip(chosen, _window_nats(module, coded, chosen), strict=True):
                nats[window.document] += found
    return nats


def _window_nats(module: nn.Module, coded: Sequence[NDArray[np.int64]], windows: Sequence[Window]) -> list[float]:
    longest = max(w.stop - w.start for w in windows)
    given = torch.zeros((len(windows), longest), dtype=torch.int64)
    wanted = torch.zeros((len(windows), longest), dtype=torch.int64)
    for row, w in enumerate(windows):
        given[row, : w.stop - w.start] = torch.from_numpy(coded[w.document][w.start : w.stop])
        wanted[row, : w.stop - w.start] = torch.from_numpy(coded[w.document][w.start + 1 : w.stop + 1])
    logits: Tensor = module(given)
    losses = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape)
    # Attention looks back only: the filling behind a window changes nothing before it.
    return [losses[row, w.judged - w.start : w.stop - w.start].double().sum().item() for row, w in enumerate(windows)]


def continue_tokens(
    module: nn.Module,
    prompt: Sequence[int],
    count: int,
    *,
    context: int,
    end_token: int,
    temperature: float,
    seed: int,
) -> list[int]:
    """Draw up to `count` tokens that follow `prompt`; the end token ends them and is left out.

    The same seed draws the same tokens on one kind of machine.

    Args:
        module: As in `document_nats`.
        prompt: At least one token.
        count: Most tokens to draw.
        context: Most tokens that the model sees; older ones are forgotten.
        end_token: Ends a document.
        temperature: Divides the logits; above 0.
        seed: Of the random numbers.

    Raises:
        ValueError: no prompt, or a temperature that is not above 0.
    """
    if not prompt or temperature <= 0:
        raise ValueError(f"a prompt of {len(prompt)} tokens and temperature {temperature}; both must be above 0")
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    module.eval()
    with torch.inference_mode():
        for _ in range(count):
            logits = module(torch.tensor([tokens[-context:]]))[0, -1].double() / temperature
            drawn = int(torch.multinomial(logits.softmax(-1), 1, generator=generator).item())
            if drawn == end_token:
                break
            tokens.append(drawn)
    return tokens[len(prompt) :]
