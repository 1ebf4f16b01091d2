"""Learns byte pairs from documents.

The rule is that of Gage (1994), as Sennrich, Haddow and Birch (2016) use it: join the most frequent pair of neighbours
inside the pieces, again and again. Of pairs that are equally frequent the one with the smaller ids is taken, so that
the same documents, in any order, give the same merges.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

from headway.errors import HeadwayError
from trainer.tokenizer import BYTES_VOCAB, PIECES, Tokenizer, join_pair

# A pair that stands once would be learned by heart.
FEWEST_OCCURRENCES = 2

Pair = tuple[int, int]


class TooLittleText(HeadwayError):
    """Documents that do not hold as many repeated pairs as the vocabulary asks for."""


def learn_tokenizer(documents: Iterable[bytes], vocab: int) -> Tokenizer:
    """The tokenizer of `vocab` tokens that these documents give; the order of the documents does not matter.

    Raises:
        TooLittleText: no pair is left that stands twice.
    """
    counted: Counter[bytes] = Counter()
    for document in documents:
        counted.update(PIECES.findall(document))
    words = [(list(piece), count) for piece, count in counted.items() if len(piece) > 1]
    merges = list(_Learner(words).merges(vocab - BYTES_VOCAB))
    if len(merges) < vocab - BYTES_VOCAB:
        raise TooLittleText(
            f"the training documents give {BYTES_VOCAB + len(merges)} tokens, the declaration asks for {vocab}",
            f"declare tokenizer.vocab {BYTES_VOCAB + len(merges)} or less, or give more text",
        )
    return Tokenizer(tuple(merges))


class _Learner:
    """Words with their counts, and of every pair how often and in which words it stands; kept up to date by merges."""

    def __init__(self, words: list[tuple[list[int], int]]) -> None:
        self._words = [tokens for tokens, _ in words]
        self._counts = [count for _, count in words]
        self._pairs: defaultdict[Pair, int] = defaultdict(int)
        self._places: defaultdict[Pair, set[int]] = defaultdict(set)
        for word, (tokens, count) in enumerate(words):
            for pair in pairwise(tokens):
                self._pairs[pair] += count
                self._places[pair].add(word)
        self._queue = [(-count, pair) for pair, count in self._pairs.items()]
        heapq.heapify(self._queue)

    def merges(self, most: int) -> Iterable[Pair]:
        """The merges in order, at most so many; fewer when no pair is frequent enough."""
        for number in range(most):
            pair = self._most_frequent()
            if pair is None:
                return
            self._join(pair, BYTES_VOCAB + number)
            yield pair

    def _most_frequent(self) -> Pair | None:
        while self._queue:
            count, pair = heapq.heappop(self._queue)
            # An entry of the queue may be out of date; every change of a count pushed another one.
            if -count == self._pairs[pair]:
                return pair if -count >= FEWEST_OCCURRENCES else None
        return None

    def _join(self, pair: Pair, made: int) -> None:
        changed: set[Pair] = set()
        for word in self._places.pop(pair):
            before, count = self._words[word], self._counts[word]
            after = join_pair(before, pair, made)
            for old in pairwise(before):
                self._pairs[old] -= count
                changed.add(old)
                if old != pair:
                    self._places[old].discard(word)
            for new in pairwise(after):
                self._pairs[new] += count
                changed.add(new)
                self._places[new].add(word)
            self._words[word] = after
        for touched in changed:
            if self._pairs[touched] > 0:
                heapq.heappush(self._queue, (-self._pairs[touched], touched))
            else:
                del self._pairs[touched]
