"""Builds, proves and publishes the token snapshot of a pipeline that learns from text.

It is the pipeline's feature snapshot: the same row of the catalog, the same lineage and refusals. Its manifest names
the token files, `tokenizer.json`, `documents.parquet` and `proof.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import trainer.tokenizer
from headway.artifacts.manifest import manifest_entry, put_manifest, read_manifest
from headway.catalog import FeatureSetFacts, FeatureSetVersion, FeatureSnapshot, SnapshotFacts
from headway.declaration_text import TextSpec
from headway.errors import HeadwayError
from headway.features.assemble import parquet_bytes
from headway.features.inputs import PinnedInputs, PinnedVersion, RowReader, pin_inputs
from headway.features.reading import read_values
from headway.features.refusal import QUARANTINED, record_refusal
from headway.features.snapshot import SnapshotCheck, SnapshotOutcome
from headway.loading import Pipeline
from headway.services import Services
from headway.text.layout import DOCUMENTS_ENTRY, PROOF_ENTRY, SPLITS, TOKENIZER_ENTRY, part_of_shard
from headway.text.proof import TextProof, build, prove_text
from headway.text.shards import Shard, TokenFiles
from headway.text.split import Document, split_documents
from headway.training.window import WHOLE
from trainer.blobs import Json, Manifest, canonical_json, digest_bytes, digest_json
from trainer.tokenizer import Tokenizer

_ROOT = Path(__file__).resolve().parent
# What decides a token. Storage and the proof are left out: changing them makes no other tokens.
_DECISIVE = ("bpe.py", "near.py", "shards.py", "split.py")


class NoText(HeadwayError):
    """A token snapshot of a pipeline that declares no text."""


class TextCodeDiffers(HeadwayError):
    """The snapshot was made by other code or another declaration than the tree holds."""


@dataclass(frozen=True)
class Built:
    """A snapshot before it is stored: documents with their parts, tokenizer, files, and the digest of them all."""

    documents: list[Document]
    tokenizer: Tokenizer
    files: TokenFiles
    digest: str


@dataclass(frozen=True)
class TextVerification:
    """What recomputation found: digests as recorded, as stored and as recomputed, and a new proof."""

    snapshot: FeatureSnapshot
    stored_digest: str
    recomputed_digest: str
    proof: TextProof

    @property
    def problems(self) -> tuple[str, ...]:
        """Everything that does not hold, by name; empty means verified."""
        recorded = self.snapshot.content_digest
        found = [
            f"{what} tokens have digest {digest}, the catalog says {recorded}"
            for what, digest in (("stored", self.stored_digest), ("recomputed", self.recomputed_digest))
            if digest != recorded
        ]
        return (*found, *(f"leaks: {finding}" for finding in self.proof.findings))


def declared_text(pipeline: Pipeline) -> TextSpec:
    """The pipeline's text.

    Raises:
        NoText: it declares none.
    """
    if pipeline.spec.text is None:
        raise NoText(f"pipeline {pipeline.name!r} declares no text", "declare `text` in place of label and features")
    return pipeline.spec.text


def text_contract(pipeline: Pipeline) -> dict[str, Json]:
    """What the tokens mean: source, columns, tokenizer and split. How many of them a sample spans is for the model."""
    text = declared_text(pipeline)
    fields = {"columns", "row_id", "keys", "event_time", "available_time"}
    return {
        "text": text.model_dump(mode="json", exclude={"context"}),
        "sources": {text.source: pipeline.spec.sources[text.source].model_dump(mode="json", include=fields)},
    }


def text_code_digest() -> str:
    """The digest of the code that decides a token."""
    files = {name: (_ROOT / name).read_text(encoding="utf-8") for name in _DECISIVE}
    return digest_json({**files, "tokenizer": Path(trainer.tokenizer.__file__).read_text(encoding="utf-8")})


class TextSnapshotBuilder:
    """Builds the one snapshot of a pipeline that learns from text."""

    def __init__(self, services: Services, pipeline: Pipeline) -> None:
        self._services = services
        self._pipeline = pipeline
        self._spec = pipeline.spec
        self._text = declared_text(pipeline)

    def build(self, partition: str = WHOLE, run_id: str | None = None) -> SnapshotOutcome:
        """Publish the snapshot of the source's current version, or record by name why it is refused.

        Raises:
            InputMissing: the source was never materialized.
            SplitEmpty, TooLittleText: the documents are too few for what is declared.
        """
        started = perf_counter()
        outcome = self._build(partition, run_id)
        return replace(outcome, seconds=perf_counter() - started)

    def _build(self, partition: str, run_id: str | None) -> SnapshotOutcome:
        inputs = pin_inputs(self._services, self._spec, {}, partition)
        if not inputs.released[self._text.source]:
            blocking = (self._text.source,)
            record_refusal(self._services, self._spec, partition, QUARANTINED, blocking, None)
            return SnapshotOutcome(partition, "refused", f"{QUARANTINED}: {blocking[0]}", None)
        known = self._published(partition, inputs)
        if known is not None:
            return SnapshotOutcome(partition, "up_to_date", "same documents and text rules", known, rows=known.rows)
        built = build_text(self._text, self.texts(inputs))
        # The proof gets texts that were read again, never those that the snapshot was made of.
        proof = self.prove(built, self.texts(inputs))
        checks = _checks(built, proof)
        report = self._services.store.put_bytes(canonical_json(proof.to_json()), "application/json")
        if not all(c.passed for c in checks):
            record_refusal(self._services, self._spec, partition, proof.sentence(), ("leakage_proof",), report.digest)
            return SnapshotOutcome(partition, "refused", proof.sentence(), None, checks)
        snapshot = self._publish(partition, inputs, built, proof, run_id)
        return SnapshotOutcome(partition, "published", "proved", snapshot, checks, len(built.documents))

    def texts(self, inputs: PinnedInputs) -> dict[str, bytes]:
        """The documents' texts in UTF-8 by name, read from the store."""
        rows = RowReader(self._services).rows(self._spec, self._text.source, inputs.released[self._text.source])
        names, contents = rows.column(self._text.document), rows.column(self._text.content)
        return {n: c.encode() for n, c in zip(names.to_pylist(), contents.to_pylist(), strict=True)}

    def prove(self, built: Built, texts: Mapping[str, bytes]) -> TextProof:
        """Prove a built snapshot against texts."""
        return prove_text(built.documents, built.tokenizer, built.files, texts, self._text.split.near_duplicates)

    def _published(self, partition: str, inputs: PinnedInputs) -> FeatureSnapshot | None:
        states = self._services.catalog.current_snapshots(self._services.principal, self._spec.name, [partition])
        snapshot = states[partition].snapshot if partition in states else None
        if snapshot is None:
            return None
        same = snapshot.feature_set_version == self._version().version
        read = {i.rows_read for i in snapshot.inputs}
        return snapshot if same and read == {i.rows_read for i in inputs.references()} else None

    def _version(self) -> FeatureSetVersion:
        stated = text_contract(self._pipeline)
        facts = FeatureSetFacts(self._spec.name, digest_json(stated), text_code_digest(), stated)
        return self._services.catalog.register_feature_set(self._services.principal, None, facts)

    def _publish(
        self, partition: str, inputs: PinnedInputs, built: Built, proof: TextProof, run_id: str | None
    ) -> FeatureSnapshot:
        store, version = self._services.store, self._version()
        blobs = {shard.name: store.put_bytes(shard.data, "application/octet-stream") for shard in built.files.shards}
        blobs[TOKENIZER_ENTRY] = store.put_bytes(built.tokenizer.dump(), "application/json")
        blobs[DOCUMENTS_ENTRY] = store.put_bytes(parquet_bytes(built.files.documents), "application/vnd.apache.parquet")
        report = blobs[PROOF_ENTRY] = store.put_bytes(canonical_json(proof.to_json()), "application/json")
        entries = tuple(manifest_entry(name, blob) for name, blob in blobs.items())
        stated: dict[str, Json] = {"pipeline": self._spec.name, "partition": partition, "content": built.digest}
        manifest = put_manifest(store, Manifest(entries, stated))
        return self._services.catalog.publish_snapshot(
            self._services.principal,
            None,
            SnapshotFacts(
                pipeline=self._spec.name,
                partition=partition,
                feature_set=version.feature_set,
                feature_set_version=version.version,
                inputs=inputs.references(),
                content_digest=built.digest,
                manifest_digest=manifest.digest,
                rows=len(built.documents),
                as_of_min=None,
                as_of_max=None,
                source_watermarks=inputs.watermarks(),
                proof_digest=report.digest,
                proof_passed=proof.passed,
                excluded={},
                run_id=run_id,
                blobs=(*dict.fromkeys(blobs.values()), manifest),
                metadata={"text": _figures(built), "proof": proof.to_json()},
            ),
        )


def build_text(text: TextSpec, texts: Mapping[str, bytes]) -> Built:
    """Split, tokenizer and token files of documents; the same documents and declaration give the same bits.

    Raises:
        SplitEmpty, TooLittleText: the documents are too few for what is declared.
    """
    documents = split_documents(texts, text.split)
    tokenizer, files = build(documents, text.tokenizer.vocab)
    return Built(documents, tokenizer, files, _digest(tokenizer, files))


def verify_text(services: Services, pipeline: Pipeline, snapshot: FeatureSnapshot) -> TextVerification:
    """Re-read the pinned version, split and encode it again, compare digests, and prove the stored files.

    Raises:
        TextCodeDiffers: the tree's code or declaration is not that of the snapshot.
        BlobMissing, BlobCorrupt: the store does not hold what the snapshot names.
    """
    version = services.catalog.feature_set(services.principal, snapshot.feature_set, snapshot.feature_set_version)
    here = (digest_json(text_contract(pipeline)), text_code_digest())
    if (version.contract_digest, version.code_digest) != here:
        raise TextCodeDiffers(
            f"snapshot {snapshot.snapshot_id} was made by version {version.version} of the text rules, and this tree "
            "has others",
            "check out the tree that made it, or build the snapshot anew",
        )
    text, builder = declared_text(pipeline), TextSnapshotBuilder(services, pipeline)
    pinned = tuple(
        PinnedVersion(services.catalog.version(services.principal, i.dataset, i.version), i.quarantine_digest)
        for i in snapshot.inputs
    )
    texts = builder.texts(PinnedInputs({text.source: pinned}, {}))
    built = build_text(text, texts)
    tokenizer, files = read_snapshot_files(services, snapshot)
    stored = replace(built, tokenizer=tokenizer, files=files, digest=_digest(tokenizer, files))
    return TextVerification(snapshot, stored.digest, built.digest, builder.prove(stored, texts))


def read_snapshot_files(services: Services, snapshot: FeatureSnapshot) -> tuple[Tokenizer, TokenFiles]:
    """The tokenizer and all token files of a published snapshot; bytes are verified on the way."""
    manifest = read_manifest(services.store, snapshot.manifest_digest)
    read = {e.name: services.store.get_bytes(e.sha256) for e in manifest.entries if e.name != DOCUMENTS_ENTRY}
    shards = [Shard(name, part, data) for name, data in read.items() if (part := part_of_shard(name)) is not None]
    return Tokenizer.parse(read[TOKENIZER_ENTRY]), TokenFiles(tuple(shards), read_values(services, snapshot))


def _digest(tokenizer: Tokenizer, files: TokenFiles) -> str:
    """What names a snapshot's content: tokenizer, files and table, never the bytes of the Parquet file."""
    return digest_json(
        {
            "tokenizer": tokenizer.digest,
            "files": {shard.name: digest_bytes(shard.data) for shard in files.shards},
            "documents": digest_json(files.documents.to_pylist()),
        }
    )


def _figures(built: Built) -> dict[str, Json]:
    rows = built.files.documents.to_pylist()
    parts: dict[str, Json] = {
        part: {
            "documents": sum(r["split"] == part for r in rows),
            "tokens": sum(r["tokens"] for r in rows if r["split"] == part),
            "bytes": sum(r["bytes"] for r in rows if r["split"] == part),
        }
        for part in SPLITS
    }
    groups = len({d.group for d in built.documents})
    return {"kind": built.tokenizer.kind, "vocab": built.tokenizer.vocab, "groups": groups, "parts": parts}


def _checks(built: Built, proof: TextProof) -> tuple[SnapshotCheck, ...]:
    rows, wanted = built.files.documents.num_rows, len(built.documents)
    detail: dict[str, Json] = {
        "documents": proof.documents,
        "pairs": proof.pairs,
        "closest": proof.closest,
        "documents_altered": proof.altered,
        "findings": "; ".join(proof.findings),
    }
    return (
        SnapshotCheck("leakage_proof", proof.passed, detail),
        SnapshotCheck("row_count", rows == wanted, {"rows": rows, "documents": wanted}),
    )
