"""Near duplicates: documents that share most of their runs of words.

A document is the set of its shingles, the runs of five words (identifiers, numbers, single signs). Two documents are
near duplicates when the Jaccard similarity of their sets, |A and B| / |A or B|, reaches a threshold. Candidates come
from MinHash signatures (Broder 1997) and banding (Indyk and Motwani 1998); each candidate is then measured exactly.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

RUN = 5
SIGNATURE = 128
MOST_MISSED = 1e-6
"""The chance at which a pair exactly at the threshold may be overlooked."""

_WORDS = re.compile(rb"[A-Za-z0-9_\x80-\xff]+|[^\sA-Za-z0-9_\x80-\xff]")
_PRIME = np.uint64(0x100000001B3)
_BLOCK = 4096

Shingles = NDArray[np.uint64]


def shingles(text: bytes) -> Shingles:
    """The distinct runs of five words as sorted 64-bit hashes; a shorter document is one run, so none is empty."""
    words = np.array([_word_hash(w) for w in _WORDS.findall(text)], dtype=np.uint64)
    if len(words) < RUN:
        return np.array([_word_hash(b"\0".join([b"short", *_WORDS.findall(text)]))], dtype=np.uint64)
    runs = np.zeros(len(words) - RUN + 1, dtype=np.uint64)
    for place in range(RUN):
        runs = (runs ^ words[place : place + len(runs)]) * _PRIME
    return np.unique(_mixed(runs))


def similarity(left: Shingles, right: Shingles) -> float:
    """The Jaccard similarity of two documents."""
    shared = len(np.intersect1d(left, right, assume_unique=True))
    return shared / (len(left) + len(right) - shared)


def near_duplicates(documents: Sequence[Shingles], threshold: float) -> list[tuple[int, int]]:
    """Pairs (i, j), i < j, at least as similar as the threshold, which connect every two such documents.

    Documents with the same shingles are paired with the first of them only. A pair of others is overlooked with chance
    1e-6 at most.
    """
    first: dict[bytes, int] = {}
    same = [(i, j) for j, d in enumerate(documents) if (i := first.setdefault(d.tobytes(), j)) != j]
    kept = list(first.values())
    if not kept:
        return []
    signed = np.stack([_signature(documents[i]) for i in kept])
    found = [(kept[i], kept[j]) for i, j in sorted(_candidates(signed, rows_per_band(threshold)))]
    return sorted([*same, *((i, j) for i, j in found if similarity(documents[i], documents[j]) >= threshold)])


def rows_per_band(threshold: float) -> int:
    """Rows of a signature that have to agree in one band: the most with which few enough pairs are overlooked.

    Of 128 / r bands of r rows, a pair of similarity t agrees in none with chance (1 - t^r)^(128 / r).
    """
    fitting = [r for r in (16, 8, 4, 2, 1) if (1 - threshold**r) ** (SIGNATURE // r) <= MOST_MISSED]
    return fitting[0] if fitting else 1


def components(count: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """For each of `count` documents the smallest one that is connected to it by a chain of pairs."""
    parent = list(range(count))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for i, j in pairs:
        low, high = sorted((root(i), root(j)))
        parent[high] = low
    return [root(i) for i in range(count)]


@lru_cache(maxsize=1 << 18)
def _word_hash(word: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(word, digest_size=8).digest(), "little")


def _mixed(values: Shingles) -> Shingles:
    """Steele, Lea and Flood's splitmix64 finalizer: neighbours in, unrelated values out."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _signature(document: Shingles) -> Shingles:
    """The least value of each of 128 hash functions over a document's shingles, [128]."""
    offsets = _mixed(np.arange(1, SIGNATURE + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))[:, None]
    least = np.full(SIGNATURE, np.iinfo(np.uint64).max, dtype=np.uint64)
    for start in range(0, len(document), _BLOCK):
        least = np.minimum(least, _mixed(document[None, start : start + _BLOCK] ^ offsets).min(axis=1))
    return least


def _candidates(signed: Shingles, rows: int) -> set[tuple[int, int]]:
    """Pairs that agree in some band."""
    pairs: set[tuple[int, int]] = set()
    for start in range(0, SIGNATURE, rows):
        same: defaultdict[bytes, list[int]] = defaultdict(list)
        for document, row in enumerate(np.ascontiguousarray(signed[:, start : start + rows])):
            same[row.tobytes()].append(document)
        for members in same.values():
            pairs.update(combinations(members, 2))
    return pairs
