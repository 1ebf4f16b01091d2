"""From bytes to tokens and back: bytes themselves, or byte pairs merged in the order in which they were learned.

Ids 0 to 255 are bytes, 256 ends a document, 257 on are merges. The text is first cut into pieces (words with the blank
before them, digits, signs, line ends with the indentation after them), and no merge crosses a cut. Whatever the bytes
are, decoding what was encoded gives them back. Standard library only; a tokenizer is JSON, never code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

from trainer.blobs import Json, canonical_json, digest_bytes

TOKENIZER_FORMAT = "headway.tokenizer/1"
END_TOKEN = 256
BYTES_VOCAB = 257
MOST_TOKENS = 65_536
LONGEST_PIECE = 48

PIECES = re.compile(
    rb" ?[A-Za-z_\x80-\xff]{1,48}| ?[0-9]{1,3}| ?[^\sA-Za-z_0-9\x80-\xff]{1,48}|[\r\n]{1,48}[ \t]{0,48}|[^\S\r\n]{1,48}"
)

# Pieces of source text repeat; beyond so many different ones the memory is worth more than the time.
_PIECES_KEPT = 262_144


class TokenizerRefused(ValueError):
    """A tokenizer file that cannot be what it says."""


class UnknownToken(ValueError):
    """A token that the tokenizer does not have."""


@dataclass(frozen=True)
class Tokenizer:
    """`merges[i]` are the two tokens that token `257 + i` stands for; none of them: every byte is a token."""

    merges: tuple[tuple[int, int], ...] = ()
    _ranks: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False)
    _bytes: list[bytes] = field(init=False, repr=False, compare=False)
    _seen: dict[bytes, tuple[int, ...]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        spelled = [bytes([i]) for i in range(256)] + [b""]
        for number, (left, right) in enumerate(self.merges):
            made = BYTES_VOCAB + number
            if not (0 <= left < made and 0 <= right < made) or END_TOKEN in (left, right):
                raise TokenizerRefused(f"merge {number} joins {left} and {right}; it may join bytes and earlier merges")
            spelled.append(spelled[left] + spelled[right])
        if len(spelled) > MOST_TOKENS:
            raise TokenizerRefused(f"{len(spelled)} tokens; the most are {MOST_TOKENS}")
        ranks = {pair: BYTES_VOCAB + number for number, pair in enumerate(self.merges)}
        if len(ranks) != len(self.merges):
            raise TokenizerRefused("a merge stands twice")
        object.__setattr__(self, "_ranks", ranks)
        object.__setattr__(self, "_bytes", spelled)

    @classmethod
    def parse(cls, data: bytes) -> Tokenizer:
        """The tokenizer that a `tokenizer.json` holds.

        Raises:
            TokenizerRefused: another format, an unknown or a missing field, or merges that cannot be.
        """
        try:
            raw: object = json.loads(data)
        except ValueError as error:
            raise TokenizerRefused(f"not JSON: {error}") from error
        if not isinstance(raw, dict) or sorted(cast("dict[str, object]", raw)) != _FIELDS:
            raise TokenizerRefused(f"a tokenizer has the fields {_FIELDS}")
        stated = cast("dict[str, object]", raw)
        made = cls(tuple(_merges(stated["merges"])))
        if stated != made.to_json():
            raise TokenizerRefused(f"stated {_head(stated)}, and its merges give {_head(made.to_json())}")
        return made

    @property
    def kind(self) -> str:
        """`bytes` or `bpe`."""
        return "bpe" if self.merges else "bytes"

    @property
    def vocab(self) -> int:
        """How many tokens there are, the end of a document included."""
        return BYTES_VOCAB + len(self.merges)

    @property
    def end_token(self) -> int:
        """The token that ends a document."""
        return END_TOKEN

    @property
    def digest(self) -> str:
        """The digest of `dump()`."""
        return digest_bytes(self.dump())

    def to_json(self) -> dict[str, Json]:
        """The tokenizer as JSON."""
        return {
            "format": TOKENIZER_FORMAT,
            "kind": self.kind,
            "vocab": self.vocab,
            "end_token": END_TOKEN,
            "pieces": PIECES.pattern.decode("ascii"),
            "merges": [list(pair) for pair in self.merges],
        }

    def dump(self) -> bytes:
        """The canonical bytes of `tokenizer.json`."""
        return canonical_json(self.to_json())

    def encode(self, data: bytes) -> list[int]:
        """The tokens of some bytes; the end of a document is for the caller to add."""
        if not self.merges:
            return list(data)
        tokens: list[int] = []
        for piece in PIECES.findall(data):
            known = self._seen.get(piece)
            if known is None:
                if len(self._seen) >= _PIECES_KEPT:
                    self._seen.clear()
                known = self._seen[piece] = tuple(self._merged(piece))
            tokens += known
        return tokens

    def decode(self, tokens: Iterable[int]) -> bytes:
        """The bytes of some tokens; the end of a document has none.

        Raises:
            UnknownToken: an id outside the vocabulary.
        """
        spelled = self._bytes
        wanted = list(tokens)
        for token in wanted:
            if not 0 <= token < len(spelled):
                raise UnknownToken(f"token {token}; ids are 0 to {len(spelled) - 1}")
        return b"".join(spelled[token] for token in wanted)

    def _merged(self, piece: bytes) -> list[int]:
        """Join pairs, the one that was learned first before the others, until none is left."""
        tokens, ranks = list(piece), self._ranks
        while len(tokens) > 1:
            best = min(ranks.get(pair, MOST_TOKENS) for pair in pairwise(tokens))
            if best == MOST_TOKENS:
                break
            tokens = join_pair(tokens, self.merges[best - BYTES_VOCAB], best)
        return tokens


def join_pair(tokens: Sequence[int], pair: tuple[int, int], made: int) -> list[int]:
    """`tokens` with every occurrence of `pair`, from the left, replaced by `made`."""
    joined: list[int] = []
    place, last = 0, len(tokens) - 1
    while place <= last:
        if place < last and (tokens[place], tokens[place + 1]) == pair:
            joined.append(made)
            place += 2
        else:
            joined.append(tokens[place])
            place += 1
    return joined


_FIELDS = ["end_token", "format", "kind", "merges", "pieces", "vocab"]


def _merges(raw: object) -> Iterable[tuple[int, int]]:
    if not isinstance(raw, list):
        raise TokenizerRefused("merges are no list")
    for pair in cast("list[object]", raw):
        left_right = cast("list[object]", pair) if isinstance(pair, list) else []
        if len(left_right) != 2 or not all(type(token) is int for token in left_right):
            raise TokenizerRefused(f"{pair!r:.80} is no pair of tokens")
        left, right = cast("list[int]", left_right)
        yield left, right


def _head(stated: dict[str, object] | dict[str, Json]) -> dict[str, object]:
    return {name: value for name, value in stated.items() if name != "merges"}
