"""Samples of a text: shards of tokens that are verified once, mapped into memory, and cut into windows.

A shard is raw little-endian uint16. With T tokens of context its sample i is the tokens `i*T` to `i*T + T`, both
included: T go in, and the T that follow each of them are to be foretold. Windows stand in the order of the shards and
do not overlap but for that one token. What is left over at the end of a shard is not learned from; it is judged, as a
window whose missing tokens have weight 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.batches import TokenBatch
from trainer.blobs import digest_bytes
from trainer.data import DataRefused, blob_path
from trainer.engines.base import Engine
from trainer.examples import judge_sums
from trainer.models.inputs import TokenInputs
from trainer.process_group import Group
from trainer.spec import TokenDataSpec, TokenFile

TOKEN = np.dtype("<u2")

_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class TokenDataset:
    """What a run learns from: two splits, what goes into its model, counts, and the tokenizer's file as it is.

    `counts` holds tokens and samples of either split.
    """

    train: TokenExamples
    valid: TokenExamples
    inputs: TokenInputs
    counts: Mapping[str, int]
    tokenizer: bytes


class TokenExamples:
    """Windows of `context` tokens over shards; see `trainer.examples.Examples`.

    Args:
        shards: Tokens of each shard, [tokens] uint16.
        context: Tokens of a sample, T.
        rest: Whether what is left over at a shard's end is a sample too, the missing tokens of weight 0.
    """

    unit = "tokens"

    def __init__(self, shards: Sequence[NDArray[np.uint16]], context: int, *, rest: bool = False) -> None:
        self._shards = tuple(shards)
        self._context = context
        self._firsts = first_samples([len(shard) for shard in shards], context, rest=rest)

    @property
    def items(self) -> int:
        """Tokens that are foretold in a sample."""
        return self._context

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def take(self, places: Tensor, weight: Tensor | None) -> TokenBatch:
        """See `trainer.examples.Examples`."""
        size = self._context + 1
        tokens = np.zeros((len(places), size), dtype=np.int64)
        lengths = np.empty(len(places), dtype=np.int64)
        for row, (shard, offset) in enumerate(locate(self._firsts, places.numpy(), self._context)):
            window = self._shards[shard][offset : offset + size]
            tokens[row, : len(window)] = window
            lengths[row] = len(window)
        return TokenBatch.of(torch.from_numpy(tokens), _weights(lengths, size, weight))

    def judge(self, engine: Engine, group: Group, batch_size: int, beat: Callable[[], None]) -> dict[str, Any]:
        """`valid_loss`, the mean over all tokens in nats; see `trainer.examples.Examples`."""
        loss, tokens = judge_sums(self, engine, group, batch_size, beat)
        return {"valid_loss": loss / tokens}


def load_tokens(data: TokenDataSpec, store_root: Path, heartbeat: Callable[[], None]) -> TokenDataset:
    """Verify and map the shards of a run's training and validation tokens.

    Args:
        data: The tokens.
        store_root: Root of the content-addressed store.
        heartbeat: Called between pieces of the work.

    Raises:
        DataRefused: a blob is missing or altered, or holds a token that is not in the vocabulary.
    """
    train, valid = (
        [_open_shard(file, f"shard {split} {i}", data, store_root, heartbeat) for i, file in enumerate(files)]
        for split, files in (("train", data.of_split("train")), ("valid", data.of_split("valid")))
    )
    learned = TokenExamples(train, data.context)
    judged = TokenExamples(valid, data.context, rest=True)
    counts = {
        "tokens_train": sum(map(len, train)),
        "tokens_valid": sum(map(len, valid)),
        "samples_train": len(learned),
        "samples_valid": len(judged),
    }
    inputs = TokenInputs(data.vocab, data.context, data.end_token, data.tokenizer)
    return TokenDataset(learned, judged, inputs, counts, _read_tokenizer(data.tokenizer, store_root))


def first_samples(tokens: Sequence[int], context: int, *, rest: bool = False) -> NDArray[np.int64]:
    """Number of the first sample of each shard of so many `tokens`, and at the end how many samples there are."""
    followed = np.maximum(np.array(tokens, dtype=np.int64) - 1, 0)
    samples = -(-followed // context) if rest else followed // context
    return np.concatenate([[0], np.cumsum(samples)]).astype(np.int64)


def locate(firsts: NDArray[np.int64], places: NDArray[np.int64], context: int) -> list[tuple[int, int]]:
    """Shard and offset in tokens of each of the samples `places`; `firsts` is what `first_samples` said."""
    shards = np.searchsorted(firsts, places, side="right") - 1
    offsets = (places - firsts[shards]) * context
    return list(zip(shards.tolist(), offsets.tolist(), strict=True))


def _weights(lengths: NDArray[np.int64], size: int, weight: Tensor | None) -> Tensor | None:
    """Weights [b, size - 1] of the tokens from the second on; None when all count."""
    if weight is None and bool((lengths == size).all()):
        return None
    there = torch.from_numpy(np.arange(1, size)[None, :] < lengths[:, None]).to(torch.float32)
    return there if weight is None else there * weight[:, None]


def _open_shard(
    file: TokenFile, place: str, data: TokenDataSpec, store_root: Path, heartbeat: Callable[[], None]
) -> NDArray[np.uint16]:
    """The tokens of a shard, mapped; they were read once, through the same open file, to see that they are right."""
    path = blob_path(store_root, file.sha256)
    try:
        source = path.open("rb")
    except FileNotFoundError:
        raise DataRefused(place, f"{file.sha256} is not in the store {store_root}") from None
    with source:
        digest, size, last = hashlib.sha256(), 0, data.end_token
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            tokens = np.frombuffer(chunk[: len(chunk) // TOKEN.itemsize * TOKEN.itemsize], TOKEN)
            if len(tokens) and int(tokens.max()) >= data.vocab:
                raise DataRefused(place, f"holds the token {int(tokens.max())}; there are {data.vocab}")
            last = int(tokens[-1]) if len(tokens) else last
            heartbeat()
        found = f"sha256:{digest.hexdigest()}"
        if found != file.sha256 or size != file.size:
            raise DataRefused(place, f"the stored bytes of {file.sha256} have the digest {found}")
        if last != data.end_token:
            raise DataRefused(place, f"ends with the token {last}; a document ends with {data.end_token}")
        if not size:
            return np.empty(0, TOKEN)
        return cast("NDArray[np.uint16]", np.memmap(cast("Any", source), dtype=TOKEN, mode="r"))


def _read_tokenizer(digest: str, store_root: Path) -> bytes:
    try:
        content = blob_path(store_root, digest).read_bytes()
    except FileNotFoundError:
        raise DataRefused("data.tokenizer", f"{digest} is not in the store {store_root}") from None
    if digest_bytes(content) != digest:
        raise DataRefused("data.tokenizer", f"the stored bytes of {digest} have the digest {digest_bytes(content)}")
    return content
