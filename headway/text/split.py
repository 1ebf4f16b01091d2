"""Which documents are learned from, which decide when to stop, and which judge: drawn by groups of near duplicates."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.declaration_text import TextSplitSpec
from headway.errors import HeadwayError
from headway.text.layout import HELD_OUT, SPLITS, TRAIN, VALID
from headway.text.near import Shingles, components, near_duplicates, shingles
from trainer.spec import TokenSplit


class SplitEmpty(HeadwayError):
    """Too few documents, or shares too small: one part of the split has no document."""


@dataclass(frozen=True)
class Document:
    """One document: its name, its text in UTF-8, the first name of its group, and its part of the split."""

    name: str
    text: bytes
    group: str
    split: TokenSplit


def split_documents(texts: Mapping[str, bytes], declared: TextSplitSpec) -> list[Document]:
    """The documents in order of their names, each with its group and its part.

    Groups are chains of near duplicates; a group falls as a whole, by a hash of its first name and the seed. So one
    document more moves no other, unless it joins groups.

    Raises:
        SplitEmpty: names the part that no document fell into.
    """
    names = sorted(texts)
    groups = group_names(names, [shingles(texts[name]) for name in names], declared.near_duplicates)
    documents = [Document(n, texts[n], g, part_of(g, declared)) for n, g in zip(names, groups, strict=True)]
    for part in SPLITS:
        if not any(d.split == part and d.text for d in documents):
            raise SplitEmpty(
                f"none of {len(documents)} documents in {len(set(groups))} groups of near duplicates with any text "
                f"falls into {part!r} (held_out {declared.held_out}, valid {declared.valid})",
                "give more documents, raise the share under text.split, or change its seed",
            )
    return documents


def group_names(names: Sequence[str], documents: Sequence[Shingles], threshold: float) -> list[str]:
    """For each document, in order of the names, the first name in its group."""
    return [names[first] for first in components(len(names), near_duplicates(documents, threshold))]


def part_of(group: str, declared: TextSplitSpec) -> TokenSplit:
    """The part that a group falls into: its hash, as a number in [0, 1), against the declared shares."""
    drawn = hashlib.sha256(f"{declared.seed}\0{group}".encode()).digest()
    place = int.from_bytes(drawn[:8], "big") / 2**64
    if place < declared.held_out:
        return HELD_OUT
    return VALID if place < declared.held_out + declared.valid else TRAIN
