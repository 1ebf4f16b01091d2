"""The proof of a token snapshot holds for a right one, and names every planted fault."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.declaration_text import BpeTokenizer, BytesTokenizer, TextSpec, TextSplitSpec
from headway.text.bpe import learn_tokenizer
from headway.text.near import shingles, similarity
from headway.text.proof import TextProof, closest_across, prove_text
from headway.text.shards import TokenFiles, shard_tokens, write_shards
from headway.text.snapshot import Built, build_text
from headway.text.split import Document
from trainer.tokenizer import END_TOKEN, Tokenizer

SPLIT = TextSplitSpec(held_out=0.3, valid=0.2, near_duplicates=0.8)
TEXT = TextSpec(
    source="s", document="path", content="content", tokenizer=BpeTokenizer(kind="bpe", vocab=300), split=SPLIT
)


def _text(number: int) -> bytes:
    names = [f"name_{number * j % 23}" for j in range(1, 30)]
    return "\n".join(f"def {n}(self, value{i}):\n    return {n} + {i}" for i, n in enumerate(names)).encode()


TEXTS = {f"pkg/m{i:02d}.py": _text(i) for i in range(12)} | {"pkg/empty.py": b"", "pkg/copy.py": _text(3)}
BUILT = build_text(TEXT, TEXTS)


def _proved(built: Built = BUILT, texts: dict[str, bytes] = TEXTS) -> TextProof:
    return prove_text(built.documents, built.tokenizer, built.files, texts, SPLIT.near_duplicates)


def test_a_right_snapshot_is_proved() -> None:
    proof = _proved()
    assert proof.passed, proof.findings
    assert proof.documents == len(TEXTS)
    assert proof.altered == sum(d.split != "train" for d in BUILT.documents) > 0
    assert 0 < proof.closest < 0.8
    assert "14 documents" in proof.sentence()


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_the_same_documents_give_the_same_bits_and_other_held_out_text_the_same_training_bits(kind: str) -> None:
    tokenizer = BpeTokenizer(kind="bpe", vocab=300) if kind == "bpe" else BytesTokenizer(kind="bytes")
    text = TEXT.model_copy(update={"tokenizer": tokenizer})
    built = build_text(text, TEXTS)
    backwards = build_text(text, dict(reversed(TEXTS.items())))
    assert backwards.digest == built.digest
    assert built.tokenizer.kind == kind
    apart = [d.name for d in built.documents if d.split == "held_out"]
    other = build_text(text, TEXTS | {n: b"class Other:\n    pass\n" * 9 + n.encode() for n in apart})
    assert {d.name: d.split for d in other.documents} == {d.name: d.split for d in built.documents}
    assert other.tokenizer == built.tokenizer
    assert _data(other, "train") == _data(built, "train")
    assert _data(other, "valid") == _data(built, "valid")
    assert _data(other, "held_out") != _data(built, "held_out")
    assert other.digest != built.digest


def _data(built: Built, part: str) -> list[bytes]:
    return [s.data for s in built.files.shards if s.split == part]


def _leaky_tokenizer(built: Built) -> Built:
    """A tokenizer that saw every document."""
    tokenizer = learn_tokenizer([d.text for d in built.documents] * 3, built.tokenizer.vocab)
    assert tokenizer != built.tokenizer
    return replace(built, tokenizer=tokenizer, files=write_shards(built.documents, tokenizer))


def _with_documents(built: Built, documents: Sequence[Document]) -> Built:
    return replace(built, documents=list(documents), files=write_shards(documents, built.tokenizer))


def _torn_group(built: Built) -> Built:
    """One of two copies moved to another part."""
    part: Any = next(
        p for p in ("valid", "held_out") if p != next(d.split for d in built.documents if "copy" in d.name)
    )
    return _with_documents(built, [replace(d, split=part) if "copy" in d.name else d for d in built.documents])


def _stranger(built: Built) -> Built:
    """Training text that no document of the dataset has: what a leaking builder would have written."""
    first = next(d for d in built.documents if d.split == "train")
    return _with_documents(
        built, [replace(d, text=d.text + b"\nleaked = 1\n") if d is first else d for d in built.documents]
    )


def _table(built: Built, column: str, change: Callable[[list[Any]], list[Any]]) -> Built:
    table = built.files.documents
    index = table.column_names.index(column)
    values = pa.array(change(table.column(column).to_pylist()), table.schema.field(column).type)
    changed = table.set_column(index, table.schema.field(column), values)
    return replace(built, files=TokenFiles(built.files.shards, changed))


def _longer_file(built: Built) -> Built:
    last = built.files.shards[-1]
    more = (*built.files.shards[:-1], replace(last, data=last.data + b"\x00\x00"))
    return replace(built, files=TokenFiles(more, built.files.documents))


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (_leaky_tokenizer, "the tokenizer changes with the text"),
        (_torn_group, "1.000 similar and lie in different parts"),
        (_torn_group, "lies in more than one part"),
        (_stranger, "are not its text"),
        (lambda b: _table(b, "offset", lambda v: [v[0] + 1, *v[1:]]), "are not its text"),
        (lambda b: _table(b, "bytes", lambda v: [v[0] + 1, *v[1:]]), "another size or digest"),
        (lambda b: _table(b, "sha256", lambda v: ["0" * 64, *v[1:]]), "another size or digest"),
        (_longer_file, "more or less than their documents"),
    ],
)
def test_a_planted_fault_is_named(plant: Callable[[Built], Built], said: str) -> None:
    proof = _proved(plant(BUILT))
    assert not proof.passed
    assert any(said in finding for finding in proof.findings), proof.findings


def test_documents_lost_or_added_are_named() -> None:
    lost = _proved(texts={n: t for n, t in TEXTS.items() if n != "pkg/m01.py"})
    assert any("pkg/m01.py" in f for f in lost.findings)
    added = _proved(texts=TEXTS | {"pkg/new.py": b"x"})
    assert "pkg/new.py is not in both the dataset and the split" in added.findings


words = st.lists(st.sampled_from("abcdefgh"), max_size=40).map(lambda w: " ".join(w).encode())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(words, st.sampled_from(["train", "valid", "held_out"])), min_size=2, max_size=8))
def test_the_closest_pair_is_that_of_all_pairs(drawn: list[tuple[bytes, Any]]) -> None:
    documents = [Document(f"d{i}", text, f"d{i}", split) for i, (text, split) in enumerate(drawn)]
    apart = [
        similarity(shingles(a.text), shingles(b.text))
        for j, b in enumerate(documents)
        for a in documents[:j]
        if a.split != b.split
    ]
    closest, pair, pairs = closest_across(documents, {d.name: d.text for d in documents})
    assert (closest, pairs) == (max(apart, default=0.0), len(apart))
    if closest:
        a, b = (next(d for d in documents if d.name == name) for name in pair)
        assert similarity(shingles(a.text), shingles(b.text)) == closest
        assert a.split != b.split


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=30), min_size=1, max_size=12), st.integers(1, 60))
def test_shards_hold_whole_documents_in_order(texts: list[bytes], limit: int) -> None:
    documents = [Document(f"d{i:02d}", t, f"d{i:02d}", "train") for i, t in enumerate(texts)]
    files = write_shards(documents, Tokenizer(), limit)
    assert [s.name for s in files.shards] == [f"tokens/train-{i:05d}.bin" for i in range(len(files.shards))]
    whole = np.concatenate([shard_tokens(s.data) for s in files.shards]).tolist()
    assert whole == [token for text in texts for token in (*text, END_TOKEN)]
    streams = {s.name: shard_tokens(s.data) for s in files.shards}
    for row, text in zip(files.documents.to_pylist(), texts, strict=True):
        tokens = streams[row["shard"]][row["offset"] : row["offset"] + row["tokens"]].tolist()
        assert tokens == [*text, END_TOKEN]
    counts = {s.name: [r["tokens"] for r in files.documents.to_pylist() if r["shard"] == s.name] for s in files.shards}
    assert all(s.tokens <= limit or len(counts[s.name]) == 1 for s in files.shards)
