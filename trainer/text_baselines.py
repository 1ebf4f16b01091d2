"""What general compressors and byte counts make of the text that a language model is judged on."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

COMPRESSORS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": lambda text: gzip.compress(text, 9, mtime=0),
    "zlib": lambda text: zlib.compress(text, 9),
    "lzma": lambda text: lzma.compress(text, preset=9),
}
"""By name: gzip -9 and xz -9 files and a zlib stream of level 9, headers and check sums included."""

_SYMBOLS = 257
"""The bytes, and the end of a document."""


def compressed_sizes(documents: Sequence[bytes]) -> dict[str, NDArray[np.int64]]:
    """Bytes [documents] of each document compressed on its own, by compressor."""
    return {
        name: np.array([len(compress(text)) for text in documents], dtype=np.int64)
        for name, compress in COMPRESSORS.items()
    }


def stream_sizes(documents: Sequence[bytes]) -> dict[str, int]:
    """Bytes of all documents, one after another, compressed as one stream, by compressor."""
    stream = b"".join(documents)
    return {name: len(compress(stream)) for name, compress in COMPRESSORS.items()}


def unigram_nats(learned: Iterable[bytes], documents: Sequence[bytes]) -> NDArray[np.float64]:
    """Nats [documents] by how often each byte, and the end of a document, stands in `learned`.

    Every symbol counts once more than it was seen (Laplace), so that none is impossible.
    """
    counts = np.ones(_SYMBOLS, np.float64)
    for text in learned:
        counts += _counts(text)
    cost = -np.log(counts / counts.sum())
    return np.array([float(_counts(text) @ cost) for text in documents], dtype=np.float64)


def _counts(text: bytes) -> NDArray[np.float64]:
    found = np.bincount(np.frombuffer(text, np.uint8), minlength=_SYMBOLS).astype(np.float64)
    found[_SYMBOLS - 1] = 1.0
    return found
