"""Tokenizers give back every byte, and learn the merges that the plain rule gives."""

import json
import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.text.bpe import TooLittleText, learn_tokenizer
from trainer.tokenizer import BYTES_VOCAB, END_TOKEN, LONGEST_PIECE, PIECES, Tokenizer, TokenizerRefused, UnknownToken

CODE = b"def read(self, path):\n    return self.open(path)\n\n\ndef write(self, path):\n    self.open(path, 'w')\n" * 3
LEARNED = learn_tokenizer([CODE], BYTES_VOCAB + 30)

texts = st.text(alphabet=st.characters(), max_size=300).map(lambda t: t.encode("utf-8", "surrogatepass"))
scraps = st.lists(
    st.sampled_from([b"a", b"b", b"aa", b" a", b"ab", b"\n", b"  ", b"1", b"+", b"\xc3\xa9"]), max_size=60
)


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=300), texts, scraps.map(b"".join)))
@example(b"")
@example(b"x" * 200 + b" " * 200 + b"\n" * 200 + b"9" * 200)
def test_every_byte_comes_back(data: bytes) -> None:
    for tokenizer in (Tokenizer(), LEARNED):
        tokens = tokenizer.encode(data)
        assert tokenizer.decode(tokens) == data
        assert END_TOKEN not in tokens
        assert all(0 <= token < tokenizer.vocab for token in tokens)


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_pieces_are_the_text_and_short(data: bytes) -> None:
    pieces = PIECES.findall(data)
    assert b"".join(pieces) == data
    assert all(len(piece) <= 2 * LONGEST_PIECE for piece in pieces)


def _plain_merges(documents: list[bytes], count: int) -> list[tuple[int, int]]:
    """The rule as it is written down: count all pairs anew before every merge."""
    words = Counter(piece for d in documents for piece in PIECES.findall(d))
    tokens = {word: list(word) for word in words}
    merges: list[tuple[int, int]] = []
    for number in range(count):
        pairs: Counter[tuple[int, int]] = Counter()
        for word, times in words.items():
            for pair in pairwise(tokens[word]):
                pairs[pair] += times
        if not pairs:
            break
        best = min(pairs, key=lambda p: (-pairs[p], p))
        if pairs[best] < 2:
            break
        merges.append(best)
        for word, before in tokens.items():
            after: list[int] = []
            for token in before:
                if after and (after[-1], token) == best:
                    after[-1] = BYTES_VOCAB + number
                else:
                    after.append(token)
            tokens[word] = after
    return merges


@settings(max_examples=60, deadline=None)
@given(st.lists(scraps.map(b"".join), min_size=1, max_size=6), st.randoms())
def test_the_learned_merges_are_those_of_the_plain_rule_in_any_order(
    documents: list[bytes], order: random.Random
) -> None:
    wanted = _plain_merges(documents, 12)
    shuffled = list(documents)
    order.shuffle(shuffled)
    for given_order in (documents, shuffled):
        assert list(learn_tokenizer(given_order, BYTES_VOCAB + len(wanted)).merges) == wanted


def test_encoding_joins_what_was_learned_first() -> None:
    tokenizer = Tokenizer(((ord("b"), ord("c")), (ord("a"), ord("b"))))
    assert tokenizer.encode(b"abc") == [ord("a"), BYTES_VOCAB]
    assert tokenizer.encode(b"ab") == [BYTES_VOCAB + 1]


def test_learning_twice_gives_the_same_bits() -> None:
    again = learn_tokenizer([CODE], BYTES_VOCAB + 30)
    assert again.dump() == LEARNED.dump()
    assert again.digest == LEARNED.digest


def test_too_little_text_names_the_vocabulary_that_it_gives() -> None:
    with pytest.raises(TooLittleText, match=r"258 tokens, the declaration asks for 4096"):
        learn_tokenizer([b"abab xyz"], 4096)


def test_a_tokenizer_file_is_read_back() -> None:
    for tokenizer in (Tokenizer(), LEARNED):
        read = Tokenizer.parse(tokenizer.dump())
        assert read == tokenizer
        assert read.encode(CODE) == tokenizer.encode(CODE)
        assert json.loads(tokenizer.dump())["vocab"] == tokenizer.vocab


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vocab": 4096}, "its merges give"),
        ({"kind": "bytes"}, "its merges give"),
        ({"pieces": ".*"}, "its merges give"),
        ({"format": "headway.tokenizer/2"}, "its merges give"),
        ({"merges": [[97, 400]]}, "joins 97 and 400"),
        ({"merges": [[97, END_TOKEN]]}, "joins 97 and 256"),
        ({"merges": [[97, 98], [97, 98]]}, "stands twice"),
        ({"merges": [[97]]}, "no pair"),
        ({"merges": [[97, 1.5]]}, "no pair"),
        ({"merges": "ab"}, "no list"),
        ({"run": "me"}, "has the fields"),
    ],
)
def test_a_tokenizer_file_that_cannot_be_is_refused(change: dict[str, Any], said: str) -> None:
    document = json.loads(LEARNED.dump()) | change
    with pytest.raises(TokenizerRefused, match=said):
        Tokenizer.parse(json.dumps(document).encode())
    with pytest.raises(TokenizerRefused, match="not JSON"):
        Tokenizer.parse(b"\x80\x04.")


@pytest.mark.parametrize("token", [-1, BYTES_VOCAB + 30])
def test_an_unknown_token_is_refused(token: int) -> None:
    with pytest.raises(UnknownToken, match=str(token)):
        LEARNED.decode([97, token])
