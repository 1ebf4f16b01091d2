"""`python -m trainer.lm_evaluate --plan plan.json --output DIR`: bits of held-out documents by a language model.

The plan names the artifact (`artifact`), the tree that its module is built from (`code_root`), the documents as a
Parquet file (`documents`: `document`, `group`, `split`, `content` as bytes), and `learned`, a Parquet file of the
documents that were learned from (`group`, `content`); `stride` as in `trainer.lm_nats` (0: half the context);
`baselines`, whether compressors and byte counts are measured too; and `samples`: prompts, how many tokens to draw,
temperature and seed. Documents are cut into tokens by the artifact's own tokenizer, which must give their bytes back.

`DIR/scores.parquet` holds one row per document: its bytes, the bits of the model (`bits_model`) and, when asked, of
each compressor on the document alone and of the byte counts of the learned text (`bits_gzip`, `bits_zlib`, `bits_lzma`,
`bits_unigram_bytes`). Its metadata `headway.measured` says how the numbers were made: `context` and `stride` of the
model, `tokens` of all documents, `streams` (bytes of all documents together as one compressed stream, by compressor)
and `samples`, what was drawn behind each prompt. `DIR/report.json` says how long each part took.

A document that is not marked as held out, or whose group or text was learned from, is refused: nothing is measured.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trainer.blobs import Json, canonical_json, digest_bytes
from trainer.command import TimedReport, plan_document, run_planned
from trainer.data import DataRefused
from trainer.language import LanguageModel, load_language_model
from trainer.lm_nats import document_nats
from trainer.spec import SpecRefused
from trainer.text_baselines import compressed_sizes, stream_sizes, unigram_nats

HELD_OUT = "held_out"
MEASURED = b"headway.measured"

_COLUMNS = ("document", "group", "split", "content")
_NAMES = {"artifact", "code_root", "documents", "learned", "stride", "baselines", "samples"}
_SAMPLES = {"prompts", "tokens", "temperature", "seed"}


@dataclass(frozen=True)
class Samples:
    """Prompts, and how to go on from each."""

    prompts: tuple[str, ...]
    tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Plan:
    """What is evaluated; see the module."""

    artifact: Path
    code_root: Path
    documents: Path
    learned: Path
    stride: int
    baselines: bool
    samples: Samples


@dataclass(frozen=True)
class Documents:
    """The held-out documents, in the order of the file."""

    names: tuple[str, ...]
    groups: tuple[str, ...]
    contents: tuple[bytes, ...]


@dataclass
class Report(TimedReport):
    """What `report.json` says."""

    documents: int = 0
    bytes: int = 0


def evaluate(plan: Plan, output: Path) -> None:
    """Measure the documents of `plan` and write both files.

    Raises:
        ArtifactRefused, CodeRefused: the artifact cannot be used.
        DataRefused: the files are not what the module says, or a document is not held out.
    """
    documents, learned = read_documents(plan.documents), _read(plan.learned, ("group", "content"))
    check_held_out(documents, learned)
    model = load_language_model(plan.artifact, plan.code_root)
    stride = plan.stride or max(1, model.context // 2)
    report = Report(documents=len(documents.names), bytes=sum(map(len, documents.contents)))
    tokens = report.timed("tokens", lambda: encode_documents(documents, model))
    nats = report.timed("model", lambda: document_nats(model.module, tokens, model.end_token, model.context, stride))
    columns: dict[str, Any] = {
        "document": list(documents.names),
        "group": list(documents.groups),
        "bytes": np.array([len(text) for text in documents.contents], np.int64),
        "bits_model": nats / math.log(2),
    }
    streams: dict[str, int] = {}
    if plan.baselines:
        measured, streams = report.timed("baselines", lambda: _baselines(documents, learned))
        columns |= measured
    made: dict[str, Json] = {
        "context": model.context,
        "stride": stride,
        "tokens": sum(map(len, tokens)),
        "streams": dict(streams),
        "samples": report.timed("samples", lambda: _draw(model, plan.samples)),
    }
    report.write(pa.table(columns).replace_schema_metadata({MEASURED: canonical_json(made)}), output)


def read_documents(path: Path) -> Documents:
    """The documents of a Parquet file, all of them marked as held out.

    Raises:
        DataRefused: no such file or columns, a value is missing, no document, or one of another split.
    """
    table = _read(path, _COLUMNS)
    found = sorted({str(split) for split in table.column("split").to_pylist()} - {HELD_OUT})
    if found:
        raise DataRefused(str(path), f"holds documents of the splits {found}; only those of {HELD_OUT!r} judge a model")
    if not table.num_rows:
        raise DataRefused(str(path), "holds no document")
    return Documents(
        names=tuple(table.column("document").to_pylist()),
        groups=tuple(table.column("group").to_pylist()),
        contents=tuple(table.column("content").to_pylist()),
    )


def check_held_out(documents: Documents, learned: pa.Table) -> None:
    """Refuse documents whose group, or whose very text, is among what was learned from.

    Raises:
        DataRefused: names the first of them.
    """
    groups = set(learned.column("group").to_pylist())
    texts = {digest_bytes(text) for text in learned.column("content").to_pylist()}
    for name, group, content in zip(documents.names, documents.groups, documents.contents, strict=True):
        if group in groups or digest_bytes(content) in texts:
            raise DataRefused(f"document {name!r}", f"or a near duplicate of it (group {group}) was learned from")


def encode_documents(documents: Documents, model: LanguageModel) -> list[NDArray[np.int64]]:
    """The tokens of each document.

    Raises:
        DataRefused: a tokenizer that loses something, so that its tokens would be too cheap.
    """
    found: list[NDArray[np.int64]] = []
    for name, content in zip(documents.names, documents.contents, strict=True):
        tokens = model.tokenizer.encode(content)
        if model.tokenizer.decode(tokens) != content:
            raise DataRefused(f"document {name!r}", "the artifact's tokenizer does not give its bytes back")
        found.append(np.asarray(tokens, np.int64))
    return found


def parse_plan(content: bytes) -> Plan:
    """Read a plan.

    Raises:
        SpecRefused: names the field and what is wrong with it.
    """
    plan = _object(plan_document(content), "plan", _NAMES)
    samples = _object(plan["samples"], "samples", _SAMPLES)
    stride, baselines = plan["stride"], plan["baselines"]
    if type(stride) is not int or stride < 0 or type(baselines) is not bool:
        raise SpecRefused("stride", f"{stride!r}, baselines {baselines!r}; expected a whole number, and true or false")
    return Plan(
        artifact=Path(plan["artifact"]),
        code_root=Path(plan["code_root"]),
        documents=Path(plan["documents"]),
        learned=Path(plan["learned"]),
        stride=stride,
        baselines=baselines,
        samples=Samples(
            prompts=tuple(str(prompt) for prompt in samples["prompts"]),
            tokens=int(samples["tokens"]),
            temperature=float(samples["temperature"]),
            seed=int(samples["seed"]),
        ),
    )


def _baselines(documents: Documents, learned: pa.Table) -> tuple[dict[str, NDArray[Any]], dict[str, int]]:
    sizes = compressed_sizes(documents.contents)
    nats = unigram_nats(learned.column("content").to_pylist(), documents.contents)
    bits = {f"bits_{name}": 8.0 * found for name, found in sizes.items()}
    return {**bits, "bits_unigram_bytes": nats / math.log(2)}, stream_sizes(documents.contents)


def _draw(model: LanguageModel, samples: Samples) -> list[dict[str, Json]]:
    return [
        {"prompt": prompt, "text": model.write_on(prompt, samples.tokens, samples.temperature, samples.seed + index)}
        for index, prompt in enumerate(samples.prompts)
    ]


def _read(path: Path, columns: tuple[str, ...]) -> pa.Table:
    try:
        table = pq.read_table(path)
    except (FileNotFoundError, pa.ArrowInvalid) as error:
        raise DataRefused(str(path), f"no Parquet file: {error}") from error
    for name in columns:
        if table.column_names.count(name) != 1 or table.column(name).null_count:
            raise DataRefused(str(path), f"column {name!r} is not there once, or has missing values")
    return table.select(list(columns))


def _object(raw: object, place: str, names: set[str]) -> dict[str, Any]:
    document = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
    if set(document) != names:
        raise SpecRefused(place, f"has fields {sorted(document)}, expected {sorted(names)}")
    return document


def main() -> int:
    """Read the arguments and evaluate."""
    return run_planned(
        "trainer.lm_evaluate", "Measure a language model.", lambda plan, output: evaluate(parse_plan(plan), output)
    )


if __name__ == "__main__":
    sys.exit(main())
