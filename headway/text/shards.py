"""Token files: little-endian uint16, one document after another, each followed by the end token."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headway.text.layout import SPLITS, shard_name
from headway.text.split import Document
from trainer.spec import TokenSplit
from trainer.tokenizer import Tokenizer

SHARD_TOKENS = 1 << 24
"""A document that would make a shard longer begins the next one; 32 MiB."""

DOCUMENTS_SCHEMA = pa.schema(
    [
        ("document", pa.string()),
        ("split", pa.string()),
        ("group", pa.string()),
        ("shard", pa.string()),
        ("offset", pa.int64()),
        ("tokens", pa.int64()),
        ("bytes", pa.int64()),
        ("sha256", pa.string()),
    ]
)


@dataclass(frozen=True)
class Shard:
    """One token file: its name in the snapshot, its part of the split, its bytes and how many tokens they are."""

    name: str
    split: TokenSplit
    data: bytes

    @property
    def tokens(self) -> int:
        """Tokens in the file."""
        return len(self.data) // 2


@dataclass(frozen=True)
class TokenFiles:
    """All token files, and where each document lies in them (`DOCUMENTS_SCHEMA`).

    `offset` and `tokens` count tokens, the end token included; `bytes` and `sha256` are those of the text in UTF-8.
    """

    shards: tuple[Shard, ...]
    documents: pa.Table


def write_shards(documents: Sequence[Document], tokenizer: Tokenizer, limit: int = SHARD_TOKENS) -> TokenFiles:
    """Encode every document and lay the parts of the split out in files of about `limit` tokens."""
    shards: list[Shard] = []
    rows: list[dict[str, object]] = []
    for part in SPLITS:
        made = _part_shards([d for d in documents if d.split == part], tokenizer, limit, part, rows)
        shards += made
    return TokenFiles(tuple(shards), pa.Table.from_pylist(rows, schema=DOCUMENTS_SCHEMA))


def shard_tokens(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """The tokens of a file's bytes."""
    return np.frombuffer(data, dtype="<u2")


def _part_shards(
    documents: Sequence[Document], tokenizer: Tokenizer, limit: int, part: TokenSplit, rows: list[dict[str, object]]
) -> list[Shard]:
    shards: list[Shard] = []
    open_parts: list[bytes] = []
    length = 0

    def name() -> str:
        return shard_name(part, len(shards))

    for document in documents:
        tokens = np.array([*tokenizer.encode(document.text), tokenizer.end_token], dtype="<u2")
        if length and length + len(tokens) > limit:
            shards.append(Shard(name(), part, b"".join(open_parts)))
            open_parts, length = [], 0
        rows.append(
            {
                "document": document.name,
                "split": part,
                "group": document.group,
                "shard": name(),
                "offset": length,
                "tokens": len(tokens),
                "bytes": len(document.text),
                "sha256": hashlib.sha256(document.text).hexdigest(),
            }
        )
        open_parts.append(tokens.tobytes())
        length += len(tokens)
    if open_parts:
        shards.append(Shard(name(), part, b"".join(open_parts)))
    return shards
