"""Evaluates a language model on the documents that its own snapshot held out, beside compressors and the champion.

The held-out text is read back from the snapshot's token files: what the tokenizer gives back has to have the digest
that the snapshot recorded of each document. Every model is judged on the original bytes by its own tokenizer and by
the code of its own run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from headway.artifacts.digests import Json
from headway.artifacts.manifest import Manifest, read_manifest
from headway.catalog import FeatureSnapshot
from headway.errors import HeadwayError
from headway.loading import Pipeline
from headway.registry.evaluation import SCORES_FILE
from headway.registry.text_evaluation import MEASURED
from headway.registry.trial import copy_artifact
from headway.registry.verdicts import ArtifactCheck
from headway.registry.workbench import DEADLINE_S, Workbench
from headway.services import Services
from headway.training.minutes import Judged, judged_losses
from headway.training.trainer_process import run_trainer
from trainer.blobs import digest_bytes
from trainer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from headway.catalog.registry_facts import ModelVersion
    from headway.catalog.run_facts import TrainingRun

HELD_OUT, VALID = "held_out", "valid"
TOKENIZER_ENTRY = "tokenizer.json"
DOCUMENTS_ENTRY = "documents.parquet"

_THREADS = 2
_SAMPLE_TOKENS = 96
_TEMPERATURE = 0.8
_SEED = 1
_PROMPTS = (
    '"""A small server that answers requests over HTTP."""\n\nimport ',
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    "def read_lines(path):\n    ",
)


class TextDamaged(HeadwayError):
    """Documents of a snapshot that are not what it recorded of them."""


@dataclass(frozen=True)
class Text:
    """The documents of a snapshot: `table` has `document`, `group`, `split`, `bytes`, `tokens` and `content`."""

    table: pa.Table

    def part(self, split: str, *, others: bool = False) -> pa.Table:
        """The documents of a split, or those of all other splits."""
        chosen = [(found == split) != others for found in self.table.column("split").to_pylist()]
        return self.table.filter(pa.array(chosen))


class TextEvaluationRun:
    """Bits of the held-out documents, made when first asked for and kept until the judgement is over."""

    def __init__(
        self,
        services: Services,
        pipeline: Pipeline,
        run: TrainingRun,
        bench: Workbench,
        progress: Callable[[str], None],
    ) -> None:
        self.pipeline = pipeline
        self.snapshot_ids = list(run.facts.inputs)
        self.left_out: Mapping[str, str] = {}
        self._services = services
        self._run = run
        self._bench = bench
        self._progress = progress

    def try_artifact(self, folder: Path) -> ArtifactCheck:
        """See `Workbench.try_artifact`."""
        return self._bench.try_artifact(folder)

    def scores(self, version: ModelVersion, champion: ModelVersion | None) -> Path:
        """A folder with the bits of every document by `version`, by compressors, and by the champion if there is one.

        Raises:
            TextDamaged: the snapshot's text is not what it recorded.
            TrainerFailed: an evaluation ended badly.
        """
        text = read_text(
            self._services, self._services.catalog.snapshot(self._services.principal, self._run.facts.inputs[0])
        )
        held_out, learned = text.part(HELD_OUT), text.part(HELD_OUT, others=True)
        self._progress(
            f"evaluating on {held_out.num_rows} held-out documents, {sum(held_out.column('bytes').to_pylist()):,} bytes"
        )
        table = self._measure(version, self._bench, held_out, learned, baselines=True)
        measured = json.loads((table.schema.metadata or {})[MEASURED])
        measured["minutes"] = list(bits_by_minute(judged_losses(self._services, self._run), text.part(VALID)))
        table = table.rename_columns(["bits_candidate" if n == "bits_model" else n for n in table.column_names])
        if champion is not None:
            self._progress(f"evaluating the champion, version {champion.version}, on the same documents")
            table = table.append_column("bits_champion", self._champion_bits(champion, table, held_out, learned))
        target = self._bench.folder / f"scores-{version.version}"
        target.mkdir()
        table = table.replace_schema_metadata({MEASURED: json.dumps(measured, sort_keys=True)})
        pq.write_table(table, target / SCORES_FILE)
        return target

    def _champion_bits(
        self, champion: ModelVersion, table: pa.Table, held_out: pa.Table, learned: pa.Table
    ) -> pa.ChunkedArray:
        run = self._services.catalog.run(self._services.principal, champion.run_id)
        with Workbench(self._services, run) as bench:
            found = self._measure(champion, bench, held_out, learned, baselines=False)
        assert found.column("document").equals(table.column("document")), "documents are measured in their order"
        return found.column("bits_model")

    def _measure(
        self, version: ModelVersion, bench: Workbench, held_out: pa.Table, learned: pa.Table, *, baselines: bool
    ) -> pa.Table:
        folder = bench.folder / f"text-{version.version}"
        folder.mkdir()
        copy_artifact(self._services.store, version.manifest_digest, folder / "artifact")
        pq.write_table(held_out.select(["document", "group", "split", "content"]), folder / "held_out.parquet")
        pq.write_table(learned.select(["group", "content"]), folder / "learned.parquet")
        prompts: tuple[str, ...] = _PROMPTS if baselines else ()
        plan: dict[str, Json] = {
            "artifact": str(folder / "artifact"),
            "code_root": str(bench.code()),
            "documents": str(folder / "held_out.parquet"),
            "learned": str(folder / "learned.parquet"),
            "stride": 0,
            "baselines": baselines,
            "samples": {
                "prompts": list(prompts),
                "tokens": _SAMPLE_TOKENS,
                "temperature": _TEMPERATURE,
                "seed": _SEED,
            },
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        output = folder / "evaluation"
        arguments = ["--plan", str(folder / "plan.json"), "--output", str(output)]
        run_trainer("trainer.lm_evaluate", arguments, bench.code(), DEADLINE_S, _THREADS)
        report = json.loads((output / "report.json").read_text())
        self._progress(
            f"evaluated version {version.version}; seconds "
            + ", ".join(f"{part} {seconds:.1f}" for part, seconds in report["seconds"].items())
        )
        return pq.read_table(output / SCORES_FILE)


def bits_by_minute(judged: list[Judged], valid: pa.Table) -> Iterator[dict[str, Json]]:
    """Validation losses as bits per original byte of the validation documents, by minute of training.

    A loss is the mean in nats over the split's tokens, whose windows do not overlap: less context than where a model
    is judged, so the figures lie somewhat higher.
    """
    tokens, size = sum(valid.column("tokens").to_pylist()), sum(valid.column("bytes").to_pylist())
    for one in judged:
        bits = one.valid_loss * tokens / (math.log(2) * size)
        yield {"minute": round(one.minute, 2), "step": one.step, "bits_per_byte": round(bits, 4)}


def read_text(services: Services, snapshot: FeatureSnapshot) -> Text:
    """The documents of a snapshot with their text, in the order of its table.

    Raises:
        TextDamaged: a document's text has not the digest that the snapshot recorded.
        StoreError: the store does not hold what the manifest lists.
    """
    manifest = read_manifest(services.store, snapshot.manifest_digest)
    table = read_documents_table(services, snapshot)
    tokenizer = Tokenizer.parse(services.store.get_bytes(manifest.entry(TOKENIZER_ENTRY).sha256))
    contents = list(_contents(services, manifest, tokenizer, table))
    return Text(table.append_column("content", pa.array(contents, pa.binary())))


def read_documents_table(services: Services, snapshot: FeatureSnapshot) -> pa.Table:
    """The table of a snapshot's documents, without their text."""
    manifest = read_manifest(services.store, snapshot.manifest_digest)
    with services.store.open(manifest.entry(DOCUMENTS_ENTRY).sha256) as source:
        return pq.read_table(source)


def _contents(services: Services, manifest: Manifest, tokenizer: Tokenizer, table: pa.Table) -> Iterator[bytes]:
    import numpy as np

    shards: dict[str, memoryview] = {}
    for row in table.to_pylist():
        if row["shard"] not in shards:
            shards[row["shard"]] = memoryview(services.store.get_bytes(manifest.entry(row["shard"]).sha256))
        # The end token behind the text is no part of it.
        first, last = row["offset"], row["offset"] + row["tokens"] - 1
        text = tokenizer.decode(np.frombuffer(shards[row["shard"]][2 * first : 2 * last], "<u2").tolist())
        if digest_bytes(text).removeprefix("sha256:") != row["sha256"].removeprefix("sha256:"):
            raise TextDamaged(
                f"document {row['document']!r} of the snapshot is not the text whose digest it recorded",
                "materialize feature_snapshot again",
            )
        yield text
