"""The proof that what judges a language model was not seen: looked up in the stored files, and by trying to leak.

Constructive: every document lies in one part; no two documents of different parts are near duplicates, measured for
every pair; and the stored tokens of each document are its text. Adversarial: the texts of all documents that are kept
apart are replaced by others, and the tokenizer and the training files must come out bit for bit the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.text.bpe import learn_tokenizer
from headway.text.layout import TRAIN
from headway.text.near import Shingles, shingles
from headway.text.shards import Shard, TokenFiles, shard_tokens, write_shards
from headway.text.split import Document
from trainer.blobs import Json, digest_bytes
from trainer.tokenizer import BYTES_VOCAB, END_TOKEN, Tokenizer

_SHOWN = 20


@dataclass(frozen=True)
class TextProof:
    """What was looked at, and every fault by name; none of them means proved.

    `closest` is the highest similarity of two documents in different parts.
    """

    documents: int
    pairs: int
    closest: float
    closest_pair: tuple[str, str]
    altered: int
    findings: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing leaks."""
        return not self.findings

    def sentence(self) -> str:
        """The proof in one line."""
        if self.findings:
            return f"{len(self.findings)} faults: {self.findings[0]}"
        return (
            f"held for {self.documents} documents: the closest two of {self.pairs} pairs across the split are "
            f"{self.closest:.3f} similar, and {self.altered} altered documents moved no training byte"
        )

    def to_json(self) -> dict[str, Json]:
        """The proof as JSON."""
        return {
            "kind": "text",
            "passed": self.passed,
            "documents": self.documents,
            "pairs": self.pairs,
            "closest": self.closest,
            "closest_pair": list(self.closest_pair),
            "documents_altered": self.altered,
            "findings": list(self.findings),
        }


def build(documents: Sequence[Document], vocab: int) -> tuple[Tokenizer, TokenFiles]:
    """The tokenizer that the training documents give, and the files of all documents.

    Raises:
        TooLittleText: the training documents do not give so many tokens.
    """
    tokenizer = Tokenizer()
    if vocab > BYTES_VOCAB:
        tokenizer = learn_tokenizer((d.text for d in documents if d.split == TRAIN), vocab)
    return tokenizer, write_shards(documents, tokenizer)


def prove_text(
    documents: Sequence[Document], tokenizer: Tokenizer, files: TokenFiles, texts: Mapping[str, bytes], threshold: float
) -> TextProof:
    """Prove a split and its files against the texts as they were read again, by name."""
    findings = [*_misplaced(documents, texts), *_misread(tokenizer, files, texts)]
    closest, pair, pairs = closest_across(documents, texts)
    if closest >= threshold:
        findings.append(f"{pair[0]} and {pair[1]} are {closest:.3f} similar and lie in different parts")
    altered = [d if d.split == TRAIN else replace(d, text=_poison(d.name, len(d.text))) for d in documents]
    again, moved = build(altered, tokenizer.vocab)
    if again.digest != tokenizer.digest:
        findings.append("the tokenizer changes with the text of documents that are kept apart")
    if _train_digests(moved.shards) != _train_digests(files.shards):
        findings.append("the training files change with the text of documents that are kept apart")
    return TextProof(
        len(documents), pairs, closest, pair, sum(d.split != TRAIN for d in documents), tuple(findings[:_SHOWN])
    )


def closest_across(documents: Sequence[Document], texts: Mapping[str, bytes]) -> tuple[float, tuple[str, str], int]:
    """The most similar two documents of different parts, their similarity, and how many pairs there are.

    Every pair is measured: sparse rows of shingles, multiplied.
    """
    sets = [shingles(texts[d.name]) for d in documents if d.name in texts]
    kept = [d for d in documents if d.name in texts]
    parts = np.array([d.split for d in kept])
    best, pair, pairs = 0.0, ("", ""), 0
    for row, others in _similarities(sets):
        across = parts[:row] != parts[row]
        pairs += int(across.sum())
        apart = np.where(across, others, 0.0)
        if row and apart.max() > best:
            best, pair = float(apart.max()), (kept[int(apart.argmax())].name, kept[row].name)
    return best, pair, pairs


def _similarities(sets: Sequence[Shingles]) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """For each document its number and its similarity to every one before it."""
    from scipy.sparse import csr_array

    sizes = np.array([len(s) for s in sets], dtype=np.int64)
    columns = np.unique(np.concatenate(sets), return_inverse=True)[1]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    rows = csr_array((np.ones(len(columns), np.int32), columns, starts))
    by_shingle = rows.T.tocsr()
    for row in range(len(sets)):
        shared = (rows[[row]] @ by_shingle).toarray().ravel()[:row]
        yield row, shared / (sizes[:row] + sizes[row] - shared)


def _misplaced(documents: Sequence[Document], texts: Mapping[str, bytes]) -> list[str]:
    names = [d.name for d in documents]
    twice = sorted({n for n in names if names.count(n) > 1}) if len(set(names)) != len(names) else []
    lost = sorted(set(texts) ^ set(names))
    groups: dict[str, str] = {}
    torn = sorted({d.group for d in documents if groups.setdefault(d.group, d.split) != d.split})
    found = [f"{name} lies in more than one part" for name in twice]
    found += [f"{name} is not in both the dataset and the split" for name in lost]
    return found + [f"the group of {group} lies in more than one part" for group in torn]


def _misread(tokenizer: Tokenizer, files: TokenFiles, texts: Mapping[str, bytes]) -> list[str]:
    """Documents whose stored tokens are not their text, and files that hold more than their documents."""
    streams = {shard.name: shard_tokens(shard.data) for shard in files.shards}
    found: list[str] = []
    for row in files.documents.to_pylist():
        tokens = streams[row["shard"]][row["offset"] : row["offset"] + row["tokens"]].tolist()
        text = texts.get(row["document"])
        whole = bool(tokens) and tokens[-1] == END_TOKEN and END_TOKEN not in tokens[:-1]
        if text is None or not whole or tokenizer.decode(tokens) != text:
            found.append(f"the tokens of {row['document']} are not its text")
        elif (len(text), hashlib.sha256(text).hexdigest()) != (row["bytes"], row["sha256"]):
            found.append(f"the table gives another size or digest of {row['document']}")
    if sum(files.documents.column("tokens").to_pylist()) != sum(s.tokens for s in files.shards):
        found.append("the token files hold more or less than their documents")
    return found


def _poison(name: str, length: int) -> bytes:
    """Other text of the same length: what a leak would carry over."""
    word = hashlib.sha256(name.encode()).hexdigest().encode() + b" poisoned(" + name.encode() + b")\n"
    return (word * (length // len(word) + 1))[:length]


def _train_digests(shards: Sequence[Shard]) -> list[tuple[str, str]]:
    return [(s.name, digest_bytes(s.data)) for s in shards if s.split == TRAIN]
