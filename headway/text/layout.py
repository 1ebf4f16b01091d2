"""Names of what a token snapshot's manifest holds; light, since training plans read it as well."""

from __future__ import annotations

from typing import Literal, cast

from trainer.spec import TokenSplit

TRAIN: Literal["train"] = "train"
VALID: Literal["valid"] = "valid"
HELD_OUT: Literal["held_out"] = "held_out"
SPLITS: tuple[TokenSplit, ...] = (TRAIN, VALID, HELD_OUT)

TOKENIZER_ENTRY = "tokenizer.json"
DOCUMENTS_ENTRY = "documents.parquet"
PROOF_ENTRY = "proof.json"


def shard_name(part: TokenSplit, number: int) -> str:
    """The entry of a part's token file, such as `tokens/held_out-00000.bin`."""
    return f"tokens/{part}-{number:05d}.bin"


def part_of_shard(entry: str) -> TokenSplit | None:
    """The part that a token file belongs to; None for an entry that is no token file."""
    folder, _, file = entry.rpartition("/")
    part = file.rpartition("-")[0]
    return cast("TokenSplit", part) if folder == "tokens" and part in SPLITS else None
