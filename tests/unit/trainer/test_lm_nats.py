"""Nats of documents against a direct computation, and tokens that a seed draws."""

import gzip
import lzma
import math
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trainer.lm_nats import continue_tokens, document_nats, document_windows
from trainer.models.decoder import Decoder, DecoderOptions
from trainer.text_baselines import compressed_sizes, stream_sizes, unigram_nats

VOCAB, END, CONTEXT = 23, 22, 8


def _decoder() -> nn.Module:
    torch.manual_seed(3)
    options = {"vocab": VOCAB, "sequence": CONTEXT, "dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "hidden": 16}
    model = Decoder(DecoderOptions.parse(options))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0)  # Far from uniform: a token in the wrong place changes the sum.
    return model


def _direct(model: nn.Module, tokens: list[int], stride: int) -> float:
    """Every token by itself: the window that first reaches it, computed alone."""
    coded = [END, *tokens, END]
    total = 0.0
    for target in range(1, len(coded)):
        start = 0
        while start + CONTEXT < target:
            start += stride
        logits = model(torch.tensor([coded[start:target]]))[0, -1].double()
        total -= float(logits.log_softmax(-1)[coded[target]])
    return total


@settings(max_examples=25, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, VOCAB - 2), max_size=30), min_size=1, max_size=5),
    stride=st.integers(1, CONTEXT),
)
def test_the_nats_of_a_document_are_the_sum_over_its_tokens_and_its_end(
    documents: list[list[int]], stride: int
) -> None:
    model = _decoder()
    found = document_nats(model, [np.array(d, np.int64) for d in documents], END, CONTEXT, stride)
    with torch.inference_mode():
        wanted = [_direct(model, tokens, stride) for tokens in documents]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@given(targets=st.integers(1, 400), context=st.integers(1, 40), part=st.integers(1, 40))
def test_every_token_is_judged_once_with_the_promised_context(targets: int, context: int, part: int) -> None:
    stride = min(part, context)
    windows = list(document_windows(0, targets, context, stride))
    judged = [place for w in windows for place in range(w.judged, w.stop)]
    assert judged == list(range(targets))
    assert all(w.stop - w.start <= context for w in windows)
    assert all(w.judged - w.start >= context - stride for w in windows[1:])


def test_a_uniform_model_needs_the_logarithm_of_its_vocabulary_per_token() -> None:
    class Uniform(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return torch.zeros(*tokens.shape, VOCAB)

    nats = document_nats(Uniform(), [np.arange(9), np.array([], np.int64)], END, CONTEXT, 4)
    np.testing.assert_allclose(nats, [10 * math.log(VOCAB), math.log(VOCAB)], rtol=1e-6)


@pytest.mark.parametrize("stride", [0, CONTEXT + 1])
def test_a_stride_that_skips_tokens_is_refused(stride: int) -> None:
    with pytest.raises(ValueError, match=f"stride is {stride}"):
        document_nats(_decoder(), [np.array([1])], END, CONTEXT, stride)


def test_a_seed_draws_the_same_tokens_and_another_one_others() -> None:
    model = _decoder()

    def drawn(seed: int, temperature: float = 1.5) -> list[int]:
        return continue_tokens(model, [1, 2, 3], 20, context=CONTEXT, end_token=END, temperature=temperature, seed=seed)

    assert drawn(5) == drawn(5)
    assert len({tuple(drawn(seed)) for seed in range(5)}) > 1
    assert END not in drawn(5)
    with torch.inference_mode():
        likeliest = int(model(torch.tensor([[1, 2, 3]]))[0, -1].argmax())
    assert drawn(5, temperature=1e-6)[:1] in ([likeliest], [])
    with pytest.raises(ValueError, match="temperature"):
        drawn(5, temperature=0.0)


def test_the_end_token_ends_a_continuation() -> None:
    class Ends(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            wanted = torch.full(tokens.shape, END if tokens.shape[1] > 3 else 7)
            return F.one_hot(wanted, VOCAB).float() * 100

    assert continue_tokens(Ends(), [1], 9, context=CONTEXT, end_token=END, temperature=1.0, seed=0) == [7, 7, 7]


def test_compressors_are_those_of_the_standard_library_and_open_to_the_same_bytes() -> None:
    documents = [b"import os\n" * 50, b"", b"def f(x):\n    return x\n"]
    sizes = compressed_sizes(documents)
    assert {name: list(map(int, found)) for name, found in sizes.items()} == {
        "gzip": [len(gzip.compress(d, 9, mtime=0)) for d in documents],
        "zlib": [len(zlib.compress(d, 9)) for d in documents],
        "lzma": [len(lzma.compress(d, preset=9)) for d in documents],
    }
    assert stream_sizes(documents)["gzip"] == len(gzip.compress(b"".join(documents), 9, mtime=0))


def test_unigram_bytes_cost_what_their_share_of_the_learned_text_says() -> None:
    learned = [b"aab", b"b"]
    # Laplace: 2 of a, 2 of b and 2 ends over 6 + 257 symbols.
    seen, total = 3, 6 + 257
    wanted = [-(2 * math.log(seen / total)) - math.log(seen / total), -math.log(1 / total) - math.log(seen / total)]
    np.testing.assert_allclose(unigram_nats(learned, [b"ab", b"z"]), wanted, rtol=1e-12)
