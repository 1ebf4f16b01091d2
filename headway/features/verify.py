"""Recomputes a published snapshot from its pinned inputs and proves it again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from headway.catalog import FeatureSnapshot
from headway.errors import HeadwayError
from headway.features.assemble import cells_of, table_digest
from headway.features.contract import code_digest, contract_digest
from headway.features.inputs import PinnedInputs, PinnedVersion, RowReader
from headway.features.labels import label_rows
from headway.features.plan import compile_plan
from headway.features.proof import Proof, prove
from headway.features.reading import read_values
from headway.features.snapshot import SnapshotBuilder
from headway.loading import Pipeline
from headway.services import Services


class FeatureCodeDiffers(HeadwayError):
    """The snapshot was made by other feature code or another contract than the tree holds."""


@dataclass(frozen=True)
class Verification:
    """What recomputation found: digests as recorded, as stored and as recomputed, and a new proof."""

    snapshot: FeatureSnapshot
    stored_digest: str
    recomputed_digest: str
    proof: Proof

    @property
    def problems(self) -> tuple[str, ...]:
        """Everything that does not hold, by name; empty means verified."""
        return tuple(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.stored_digest != self.snapshot.content_digest:
            yield f"stored values have digest {self.stored_digest}, the catalog says {self.snapshot.content_digest}"
        if self.recomputed_digest != self.snapshot.content_digest:
            yield f"recomputed values have digest {self.recomputed_digest}, not {self.snapshot.content_digest}"
        for finding in self.proof.findings:
            yield f"leaks: {finding.sentence()}"


def verify_snapshot(services: Services, pipeline: Pipeline, snapshot: FeatureSnapshot) -> Verification:
    """Re-read the pinned versions, recompute every cell, compare digests, and prove the stored cells.

    Raises `FeatureCodeDiffers` when the tree's features are not those of the snapshot.
    """
    _require_same_code(services, pipeline, snapshot)
    spec = pipeline.spec
    inputs = _pinned(services, snapshot)
    reader = RowReader(services)
    own = [v for v in inputs.released[spec.label.source] if v.version.partition == snapshot.partition]
    labels = label_rows(spec, reader.rows(spec, spec.label.source, own))
    computed = SnapshotBuilder(services, pipeline).compute(labels, inputs)
    stored = read_values(services, snapshot)
    sources = {s: reader.rows(spec, s, v) for s, v in inputs.released.items()}
    proof = prove(spec, compile_plan(pipeline, fresh=True), labels.inputs, sources, cells_of(spec, stored))
    return Verification(snapshot, table_digest(stored), computed.digest, proof)


def _require_same_code(services: Services, pipeline: Pipeline, snapshot: FeatureSnapshot) -> None:
    version = services.catalog.feature_set(services.principal, snapshot.feature_set, snapshot.feature_set_version)
    for what, recorded, here in (
        ("contract", version.contract_digest, contract_digest(pipeline)),
        ("code", version.code_digest, code_digest(pipeline)),
    ):
        if recorded != here:
            raise FeatureCodeDiffers(
                f"snapshot {snapshot.snapshot_id} has feature {what} {recorded}, this tree has {here}",
                f"check out the tree of feature set version {version.version}, or build the snapshot anew",
            )


def _pinned(services: Services, snapshot: FeatureSnapshot) -> PinnedInputs:
    released: dict[str, list[PinnedVersion]] = {}
    for item in snapshot.inputs:
        version = services.catalog.version(services.principal, item.dataset, item.version)
        released.setdefault(item.dataset.partition("/")[2], []).append(PinnedVersion(version, item.quarantine_digest))
    skipped = snapshot.facts.metadata.get("skipped_inputs")
    left_out = {
        source: tuple(str(p) for p in partitions)
        for source, partitions in (skipped.items() if isinstance(skipped, Mapping) else ())
        if isinstance(partitions, Sequence)
    }
    return PinnedInputs({s: tuple(v) for s, v in released.items()}, left_out)
