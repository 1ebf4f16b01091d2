"""Near duplicates are found, and never lie in two parts of a split."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.declaration_text import TextSplitSpec
from headway.text.near import MOST_MISSED, SIGNATURE, components, near_duplicates, rows_per_band, shingles, similarity
from headway.text.split import SplitEmpty, part_of, split_documents

WORDS = [f"w{i}" for i in range(400)]
WIDE = TextSplitSpec(held_out=0.3, valid=0.3, near_duplicates=0.6)


def _document(seed: int, words: int) -> list[str]:
    drawn = random.Random(seed)
    return [drawn.choice(WORDS) for _ in range(words)]


def _edited(document: list[str], seed: int, edits: int) -> list[str]:
    drawn, changed = random.Random(seed), list(document)
    for _ in range(edits):
        changed[drawn.randrange(len(changed))] = drawn.choice(WORDS)
    return changed


@st.composite
def corpora(draw: st.DrawFn) -> dict[str, bytes]:
    """Documents, many of which are others with a few words changed, copied, cut short or empty."""
    texts = [_document(draw(st.integers(0, 5)), draw(st.integers(0, 120))) for _ in range(draw(st.integers(2, 6)))]
    for _ in range(draw(st.integers(0, 10))):
        base = draw(st.sampled_from(texts))
        texts.append(_edited(base, draw(st.integers(0, 99)), draw(st.integers(0, 6))) if base else base)
    spread = [f"filler{i} " * 7 for i in range(20)]
    named = {f"doc{i:02d}": " ".join(words).encode() for i, words in enumerate(texts)}
    return named | {f"filler{i:02d}": text.encode() for i, text in enumerate(spread)}


@settings(max_examples=40, deadline=None)
@given(corpora(), st.sampled_from([0.5, 0.6, 0.8, 1.0]), st.integers(0, 3))
def test_near_duplicates_lie_in_one_part(texts: dict[str, bytes], threshold: float, seed: int) -> None:
    declared = TextSplitSpec(held_out=0.3, valid=0.3, near_duplicates=threshold, seed=seed)
    documents = split_documents(texts, declared)
    assert [d.name for d in documents] == sorted(texts)
    sets = {d.name: set(shingles(d.text).tolist()) for d in documents}
    for i, left in enumerate(documents):
        assert left.split == part_of(left.group, declared)
        for right in documents[:i]:
            a, b = sets[left.name], sets[right.name]
            if len(a & b) / len(a | b) >= threshold:
                assert (left.group, left.split) == (right.group, right.split)


@settings(max_examples=30, deadline=None)
@given(corpora())
def test_groups_are_the_chains_of_all_pairs(texts: dict[str, bytes]) -> None:
    sets = [shingles(texts[n]) for n in sorted(texts)]
    every = [(i, j) for j in range(len(sets)) for i in range(j) if similarity(sets[i], sets[j]) >= 0.7]
    assert components(len(sets), near_duplicates(sets, 0.7)) == components(len(sets), every)


def test_one_document_more_moves_no_other() -> None:
    texts = {f"d{i}": " ".join(_document(100 + i, 60)).encode() for i in range(60)}
    before = {d.name: d.split for d in split_documents(texts, WIDE)}
    more = texts | {"a": " ".join(_document(999, 60)).encode()}
    after = {d.name: d.split for d in split_documents(more, WIDE)}
    assert {name: after[name] for name in before} == before
    assert {d.name: d.split for d in split_documents(texts, WIDE.model_copy(update={"seed": 1}))} != before


def test_shares_are_what_is_declared() -> None:
    declared = TextSplitSpec(held_out=0.1, valid=0.05)
    parts = [part_of(f"group {i}", declared) for i in range(20_000)]
    assert parts.count("held_out") / 20_000 == pytest.approx(0.1, abs=0.01)
    assert parts.count("valid") / 20_000 == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize("threshold", [0.5, 0.55, 0.6, 0.7, 0.8, 0.9, 1.0])
def test_bands_overlook_next_to_nothing(threshold: float) -> None:
    rows = rows_per_band(threshold)
    assert SIGNATURE % rows == 0
    assert (1 - threshold**rows) ** (SIGNATURE // rows) <= MOST_MISSED


def test_similarity_is_jaccard_of_runs_of_five_words() -> None:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    left, right = shingles(" ".join(words).encode()), shingles(" ".join([*words[:9], "other"]).encode())
    assert (len(left), len(right)) == (6, 6)
    assert similarity(left, right) == 5 / 7
    assert similarity(left, shingles(b"\n\tone two  three four five six seven eight nine ten\n")) == 1
    assert len(shingles(b"")) == len(shingles(b"one two")) == 1
    assert np.array_equal(shingles(b"same text"), shingles(b"same  text"))
    assert similarity(shingles(b""), shingles(b"one two")) == 0


def test_a_part_without_documents_is_refused() -> None:
    with pytest.raises(SplitEmpty, match=r"2 documents in 1 groups.*falls into"):
        split_documents({"a": b"x = 1\n", "b": b"x = 1\n"}, TextSplitSpec())
