"""Windows over shards: each token is foretold once; shards are verified; what makes batches ahead stays bounded."""

import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.token_runs import CONTEXT, END, TOKENIZER, put_blob, put_tokens, shard_of

from trainer.data import DataRefused
from trainer.examples import Ahead
from trainer.spec import TokenDataSpec
from trainer.tokens import TokenExamples, load_tokens


def quiet() -> None:
    """A heartbeat that nobody listens to."""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 9), st.booleans())
def test_samples_are_windows_side_by_side(sizes: list[int], context: int, rest: bool) -> None:
    starts = np.concatenate([[0], np.cumsum(sizes)])
    # Every token has a value of its own.
    shards = [np.arange(a, b, dtype="<u2") for a, b in pairwise(starts)]
    examples = TokenExamples(shards, context, rest=rest)
    wanted = [list(shard[i : i + context + 1]) for shard in shards for i in range(0, len(shard) - 1, context)]
    wanted = [window for window in wanted if rest or len(window) == context + 1]
    assert len(examples) == len(wanted)
    if not wanted:
        return
    order = torch.tensor(np.random.default_rng(len(wanted)).permutation(len(wanted)))
    batch = examples.take(order, None)
    weight = torch.ones_like(batch.target) if batch.weight is None else batch.weight
    for row, place in enumerate(order.tolist()):
        window = wanted[place]
        real = int(weight[row].sum())
        assert real == len(window) - 1
        assert batch.given[row, :real].tolist() == window[:-1]
        assert batch.target[row, :real].tolist() == window[1:]
    assert batch.items == sum(len(window) - 1 for window in wanted)
    if rest:
        assert batch.items == sum(max(size - 1, 0) for size in sizes)


def test_filling_counts_for_nothing() -> None:
    examples = TokenExamples([shard_of(100, 1)], 8)
    batch = examples.take(torch.tensor([3, 0]), torch.tensor([1.0, 0.0]))
    assert batch.weight is not None
    assert (batch.items, batch.weight.sum(1).tolist()) == (8, [8.0, 0.0])


def test_the_shards_of_a_run_are_mapped_and_counted(tmp_path: Path) -> None:
    shards = {"train": [shard_of(100, 1), shard_of(60, 2)], "valid": [shard_of(40, 3)], "held_out": [shard_of(9, 4)]}
    data = put_tokens(tmp_path, shards)
    held = data.of_split("held_out")[0].sha256
    (tmp_path / "sha256" / held[7:9] / held[9:]).unlink()
    dataset = load_tokens(data, tmp_path, quiet)
    assert dataset.counts == {"tokens_train": 160, "tokens_valid": 40, "samples_train": 6 + 3, "samples_valid": 3}
    assert dataset.tokenizer == TOKENIZER
    assert (dataset.inputs.vocab, dataset.inputs.context, dataset.inputs.tokenizer) == (64, CONTEXT, data.tokenizer)
    assert dataset.train.take(torch.tensor([6]), None).given[0].tolist() == shard_of(60, 2)[:CONTEXT].tolist()


def _alter(store: Path, data: TokenDataSpec) -> TokenDataSpec:
    file = store / "sha256" / data.files[0].sha256[7:9] / data.files[0].sha256[9:]
    file.write_bytes(file.read_bytes()[:-2] + b"\1\0")
    return data


def _remove(store: Path, data: TokenDataSpec) -> TokenDataSpec:
    (store / "sha256" / data.files[0].sha256[7:9] / data.files[0].sha256[9:]).unlink()
    return data


def _other_tokenizer(store: Path, data: TokenDataSpec) -> TokenDataSpec:
    (store / "sha256" / data.tokenizer[7:9] / data.tokenizer[9:]).write_bytes(b"{}")
    return data


def _shards(*tokens: int) -> Callable[[Path, TokenDataSpec], TokenDataSpec]:
    def put(store: Path, _: TokenDataSpec) -> TokenDataSpec:
        return put_tokens(store, {"train": [np.array(tokens, "<u2")], "valid": [shard_of(40, 3)]})

    return put


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_alter, "shard train 0: the stored bytes of sha256:"),
        (_remove, r"shard train 0: sha256:\w+ is not in the store"),
        (_other_tokenizer, "data.tokenizer: the stored bytes of sha256:"),
        (_shards(1, 64, END), "shard train 0: holds the token 64; there are 64"),
        (_shards(1, 2, 3), "shard train 0: ends with the token 3; a document ends with 63"),
    ],
)
def test_tokens_that_are_not_what_they_should_be_are_refused(
    spoil: Callable[[Path, TokenDataSpec], TokenDataSpec], message: str, tmp_path: Path
) -> None:
    data = put_tokens(tmp_path, {"train": [shard_of(100, 1)], "valid": [shard_of(40, 3)]})
    with pytest.raises(DataRefused, match=message):
        load_tokens(spoil(tmp_path, data), tmp_path, quiet)


def test_a_shard_is_read_in_pieces_with_a_sign_of_life_after_each(tmp_path: Path) -> None:
    beats: list[None] = []
    data = put_tokens(tmp_path, {"train": [shard_of(5 << 20, 1)], "valid": [shard_of(40, 3)]})
    load_tokens(data, tmp_path, lambda: beats.append(None))
    assert len(beats) == 4


def test_batches_are_made_in_order_and_not_far_ahead() -> None:
    made: list[int] = []
    looked = threading.Semaphore(0)

    def make(step: int) -> int:
        made.append(step)
        looked.release()
        return step * step

    ahead = Ahead(make, 3, 9, most=2)
    for step in range(3, 9):
        for _ in range(2 if step == 3 else 0):
            assert looked.acquire(timeout=120)
        # What is taken, what lies ready, and the one that may be in the making.
        assert len(made) <= step - 3 + 3
        assert ahead.take(step) == step * step
    ahead.close()
    assert made == list(range(3, 9))


def test_what_goes_wrong_ahead_is_raised_where_it_is_taken() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise ValueError("step 2 cannot be made")
        return step

    ahead = Ahead(make, 0, 5)
    assert [ahead.take(0), ahead.take(1)] == [0, 1]
    with pytest.raises(ValueError, match="step 2 cannot be made"):
        ahead.take(2)
    ahead.close()


def test_closing_ends_the_thread_in_the_middle_of_the_run() -> None:
    before = threading.active_count()
    ahead = Ahead(lambda step: step, 0, 1_000_000)
    assert ahead.take(0) == 0
    ahead.close()
    assert threading.active_count() == before


def test_a_store_keeps_a_blob_by_its_digest(tmp_path: Path) -> None:
    digest = put_blob(tmp_path, b"x")
    assert (tmp_path / "sha256" / digest[7:9] / digest[9:]).read_bytes() == b"x"
