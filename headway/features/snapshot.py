"""Builds, proves and publishes the feature snapshot of a partition."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.artifacts.manifest import manifest_entry, put_manifest
from headway.artifacts.store import Blob
from headway.catalog import FeatureSetFacts, FeatureSetVersion, FeatureSnapshot, SnapshotFacts
from headway.datasets.arrow import compute as pc
from headway.datasets.partitions import PartitionScheme
from headway.declaration import PipelineSpec, duration_us
from headway.errors import HeadwayError
from headway.features.assemble import details_table, null_shares, parquet_bytes, table_digest, values_table
from headway.features.clocks import Clock, instants
from headway.features.contract import code_digest, contract, contract_digest
from headway.features.inputs import InputMissing, PinnedInputs, RowReader, pin_inputs
from headway.features.labels import LabelRows, label_rows
from headway.features.plan import Cells, FeaturePlan, compile_plan
from headway.features.proof import Proof, prove
from headway.features.reach import Interval, event_interval, memory, partitions_in_reach
from headway.features.refusal import QUARANTINED, record_refusal
from headway.loading import Pipeline
from headway.services import Services
from trainer.blobs import Json, Manifest, canonical_json

# Tables kept between neighbouring partitions of a range: a few days of every source.
_TABLES_KEPT = 24


@dataclass(frozen=True)
class SnapshotCheck:
    """One blocking check of a snapshot: its name, whether it held, and counts for people."""

    name: str
    passed: bool
    detail: Mapping[str, Json]


@dataclass(frozen=True)
class SnapshotOutcome:
    """What became of one partition: `published`, `up_to_date`, `refused` (by name, recorded) or `failed`."""

    partition: str
    status: str
    reason: str
    snapshot: FeatureSnapshot | None
    checks: tuple[SnapshotCheck, ...] = ()
    rows: int = 0
    excluded: Mapping[str, int] = field(default_factory=dict[str, int])
    seconds: float = 0.0


@dataclass(frozen=True)
class Computed:
    """Label rows and feature cells of one partition with the inputs that they rest on."""

    labels: LabelRows
    inputs: PinnedInputs
    cells: Mapping[str, Cells]
    incomplete: Mapping[str, NDArray[np.bool_]]
    table: pa.Table
    digest: str


class SnapshotBuilder:
    """Builds snapshots of one pipeline, partition by partition, in any order."""

    def __init__(self, services: Services, pipeline: Pipeline, plan: FeaturePlan | None = None) -> None:
        self._services = services
        self._pipeline = pipeline
        self._spec = pipeline.spec
        self._given = plan
        self._plan = plan or compile_plan(pipeline)
        self._reader = RowReader(services, keep=_TABLES_KEPT)
        self._feature_set: FeatureSetVersion | None = None
        declared = self._spec.sources[self._spec.label.source].partition
        assert declared is not None
        self._scheme = PartitionScheme.from_spec(declared)

    def build(self, partition: str, run_id: str | None = None) -> SnapshotOutcome:
        """Publish the partition's snapshot, or record by name why it is refused.

        Raises `InputMissing` when a source partition in reach was never materialized.
        """
        started = perf_counter()
        outcome = self._build(partition, run_id)
        return _timed(outcome, perf_counter() - started)

    def _build(self, partition: str, run_id: str | None) -> SnapshotOutcome:
        self._scheme.require_closed([partition], self._services.catalog.clock)
        labels, inputs = self._pin(partition)
        blocking = self._blocking(partition, inputs)
        if blocking:
            return self._refuse(partition, QUARANTINED, blocking, None, ())
        assert labels is not None
        known = self._published(partition, inputs)
        if known is not None:
            return SnapshotOutcome(partition, "up_to_date", "same inputs and features", known, rows=known.rows)
        computed = self.compute(labels, inputs)
        # Functions are loaded anew for the proof: what they remembered while computing must not answer for them.
        plan = self._given or compile_plan(self._pipeline, fresh=True)
        proof = prove(self._spec, plan, labels.inputs, self._reread(inputs), computed.cells)
        checks = tuple(self._checks(computed, proof))
        failed = [c.name for c in checks if not c.passed]
        report = self._services.store.put_bytes(canonical_json(_json(proof.to_json())), "application/json")
        if failed:
            names = sorted({f.feature for f in proof.findings})
            reason = "; ".join(_why(c) for c in checks if not c.passed)
            return self._refuse(partition, reason, tuple(names or failed), report, checks)
        snapshot = self._publish(partition, computed, proof, report, run_id)
        return SnapshotOutcome(partition, "published", "proved", snapshot, checks, len(labels), dict(labels.excluded))

    def is_up_to_date(self, partition: str) -> bool:
        """Whether the partition's published snapshot rests on its current inputs and the features in force.

        Raises `InputMissing` when a source partition in reach was never materialized.
        """
        labels, inputs = self._pin(partition)
        return labels is not None and self._published(partition, inputs) is not None

    def computed(self, partition: str) -> Computed:
        """Feature cells of a partition from its current inputs; nothing is proved, stored or published.

        Raises `InputMissing` when the label rows' own partition is not released.
        """
        labels, inputs = self._pin(partition)
        if labels is None:
            raise InputMissing(f"{self._spec.label.source} {partition} is quarantined", "mend and ingest it again")
        return self.compute(labels, inputs)

    def compute(self, labels: LabelRows, inputs: PinnedInputs) -> Computed:
        """Feature cells for label rows from pinned inputs."""
        sources = {s: self._rows(inputs, s) for s in inputs.released}
        cells = self._plan.execute(labels.inputs, sources)
        incomplete = incomplete_flags(self._spec, labels, inputs)
        table = values_table(self._spec, labels, cells, incomplete)
        return Computed(labels, inputs, cells, incomplete, table, table_digest(table))

    def _rows(self, inputs: PinnedInputs, source: str) -> pa.Table:
        rows = self._reader.rows(self._spec, source, inputs.released[source])
        seen = inputs.seen.get(source)
        if seen is None:
            return rows
        clocks = [v.clock for v in self._plan.views.values() if v.spec.source == source]
        clocks += [c.clock for c in self._plan.custom.values() if c.source == source]
        return as_seen(rows, dict.fromkeys(clocks), seen.until)

    def _pin(self, partition: str) -> tuple[LabelRows | None, PinnedInputs]:
        """Label rows (none when their own partition is not released) and every version in reach."""
        own = pin_inputs(self._services, self._spec, {}, partition)
        versions = own.released[self._spec.label.source]
        if not versions:
            return None, own
        labels = label_rows(self._spec, self._reader.rows(self._spec, self._spec.label.source, versions))
        reach = partitions_in_reach(self._spec, observed_interval(self._spec, labels))
        return labels, pin_inputs(self._services, self._spec, reach, partition)

    def _blocking(self, partition: str, inputs: PinnedInputs) -> tuple[str, ...]:
        """Quarantined inputs that forbid this snapshot, by name."""
        strict = self._spec.features.on_quarantined_input == "refuse"
        own = self._spec.label.source
        return tuple(
            f"{source} {p}".rstrip()
            for source, partitions in inputs.skipped.items()
            for p in partitions
            if strict or (source == own and p == partition) or p == ""
        )

    def _published(self, partition: str, inputs: PinnedInputs) -> FeatureSnapshot | None:
        state = self._services.catalog.current_snapshots(self._services.principal, self._spec.name, [partition])
        snapshot = state[partition].snapshot if partition in state else None
        if snapshot is None or state[partition].status != "published":
            return None
        same = snapshot.feature_set_version == self._version().version
        read = {i.rows_read for i in snapshot.inputs}
        return snapshot if same and read == {i.rows_read for i in inputs.references()} else None

    def _version(self) -> FeatureSetVersion:
        if self._feature_set is None:
            facts = FeatureSetFacts(
                self._spec.name, contract_digest(self._pipeline), code_digest(self._pipeline), contract(self._pipeline)
            )
            self._feature_set = self._services.catalog.register_feature_set(self._services.principal, None, facts)
        return self._feature_set

    def _reread(self, inputs: PinnedInputs) -> dict[str, pa.Table]:
        """Source rows read again from the store, never from what the snapshot was computed with."""
        fresh = RowReader(self._services)
        return {s: fresh.rows(self._spec, s, v) for s, v in inputs.released.items()}

    def _checks(self, computed: Computed, proof: Proof) -> Iterator[SnapshotCheck]:
        yield SnapshotCheck(
            "leakage_proof",
            proof.passed,
            {
                "labels": proof.labels,
                "cells_constructive": proof.constructive_cells,
                "cells_adversarial": proof.adversarial_cells,
                "rows_altered": sum(t.rows_altered for t in proof.trials),
                "worlds": sum(t.worlds for t in proof.trials),
                "findings": "; ".join(f.sentence() for f in proof.findings),
            },
        )
        behind = {v: int(flags.sum()) for v, flags in computed.incomplete.items()}
        strict = self._spec.features.strict_watermark
        yield SnapshotCheck(
            "watermark", not (strict and any(behind.values())), {"incomplete": behind, "strict": strict}
        )
        rows, wanted = computed.table.num_rows, len(computed.labels)
        yield SnapshotCheck("row_count", rows == wanted, {"rows": rows, "label_rows": wanted})
        shares = null_shares(self._spec, computed.cells)
        budget = self._spec.features.null_budget
        over = {f: s for f, s in shares.items() if s > budget.features.get(f, budget.default)}
        yield SnapshotCheck("null_budget", not over, {"over_budget": over, "features": len(shares)})

    def _refuse(
        self,
        partition: str,
        reason: str,
        blocking: tuple[str, ...],
        report: Blob | None,
        checks: tuple[SnapshotCheck, ...],
    ) -> SnapshotOutcome:
        evidence = None if report is None else report.digest
        record_refusal(self._services, self._spec, partition, reason, blocking, evidence)
        return SnapshotOutcome(partition, "refused", f"{reason}: {', '.join(blocking)}", None, checks)

    def _publish(
        self, partition: str, computed: Computed, proof: Proof, report: Blob, run_id: str | None
    ) -> FeatureSnapshot:
        store = self._services.store
        version = self._version()
        details = details_table(self._spec, computed.labels, computed.cells)
        values = store.put_bytes(parquet_bytes(computed.table), "application/vnd.apache.parquet")
        detail = store.put_bytes(parquet_bytes(details), "application/vnd.apache.parquet")
        entries = (
            manifest_entry("values.parquet", values),
            manifest_entry("details.parquet", detail),
            manifest_entry("proof.json", report),
        )
        facts: dict[str, Json] = {"pipeline": self._spec.name, "partition": partition, "content": computed.digest}
        manifest = put_manifest(store, Manifest(entries, facts))
        observed = observed_interval(self._spec, computed.labels)
        return self._services.catalog.publish_snapshot(
            self._services.principal,
            None,
            SnapshotFacts(
                pipeline=self._spec.name,
                partition=partition,
                feature_set=version.feature_set,
                feature_set_version=version.version,
                inputs=computed.inputs.references(),
                content_digest=computed.digest,
                manifest_digest=manifest.digest,
                rows=computed.table.num_rows,
                as_of_min=observed.first if observed else None,
                as_of_max=observed.last if observed else None,
                source_watermarks=computed.inputs.watermarks(),
                proof_digest=report.digest,
                proof_passed=proof.passed,
                excluded=dict(computed.labels.excluded),
                run_id=run_id,
                blobs=(values, detail, report, manifest),
                metadata={
                    "window": list(self._scheme.window(partition)),
                    "skipped_inputs": {s: list(p) for s, p in computed.inputs.skipped.items()},
                    "incomplete": {v: int(f.sum()) for v, f in computed.incomplete.items()},
                    "null_shares": null_shares(self._spec, computed.cells),
                },
            ),
        )


def build_range(
    builder: SnapshotBuilder,
    partitions: Sequence[str],
    run_id: str | None = None,
    progress: Callable[[SnapshotOutcome], None] | None = None,
) -> list[SnapshotOutcome]:
    """Build several partitions; one that fails by a known error is reported and never stops its neighbours."""
    outcomes: list[SnapshotOutcome] = []
    for partition in partitions:
        try:
            outcome = builder.build(partition, run_id)
        except HeadwayError as error:
            outcome = SnapshotOutcome(partition, "failed", error.message, None)
        outcomes.append(outcome)
        if progress is not None:
            progress(outcome)
    return outcomes


def as_seen(rows: pa.Table, clocks: Collection[Clock], until: int) -> pa.Table:
    """The rows as they stood at an instant: what became available later has no time yet, and so is not admitted."""
    for clock in clocks:
        column = clock.event if isinstance(clock.available, int) or clock.delay else clock.available
        if isinstance(column, int):
            continue
        later = pa.array(clock.times(rows).available > until)
        hidden = pc.if_else(later, pa.scalar(None, rows.schema.field(column).type), rows.column(column))
        rows = rows.set_column(rows.column_names.index(column), column, hidden)
    return rows


def observed_interval(spec: PipelineSpec, labels: LabelRows) -> Interval | None:
    """First and last observation time of label rows; None without any."""
    times, valid = instants(labels.inputs.column(spec.label.observation_time), spec.label.observation_time)
    return Interval(int(times[valid].min()), int(times[valid].max())) if valid.any() else None


def incomplete_flags(spec: PipelineSpec, labels: LabelRows, inputs: PinnedInputs) -> dict[str, NDArray[np.bool_]]:
    """Per view and label row: the source is behind the observation, or a partition in reach was not read."""
    times, _ = instants(labels.inputs.column(spec.label.observation_time), spec.label.observation_time)
    watermarks = inputs.watermarks()
    flags: dict[str, NDArray[np.bool_]] = {}
    for name, view in spec.features.views.items():
        source = spec.sources[view.source]
        behind = np.zeros(len(times), dtype=np.bool_)
        if view.allowed_lateness is not None:
            watermark = watermarks.get(view.source)
            late = duration_us(view.allowed_lateness)
            behind |= True if watermark is None else watermark < times - late
        for partition in (*inputs.skipped.get(view.source, ()), *inputs.absent.get(view.source, ())):
            assert source.partition is not None
            hidden = event_interval(source, PartitionScheme.from_spec(source.partition).window(partition))
            behind |= (times >= hidden.first) & (times - memory(view) <= hidden.last)
        flags[name] = behind
    return flags


def _why(check: SnapshotCheck) -> str:
    if check.name == "leakage_proof":
        return f"leakage proof failed: {check.detail['findings']}"
    if check.name == "null_budget":
        return f"null budget exceeded: {check.detail['over_budget']}"
    return f"{check.name} failed: {dict(check.detail)}"


def _timed(outcome: SnapshotOutcome, seconds: float) -> SnapshotOutcome:
    return replace(outcome, seconds=seconds)


def _json(value: object) -> Json:
    """Tuples as lists, for canonical JSON."""
    if isinstance(value, Mapping):
        return {str(k): _json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json(v) for v in value]
    assert value is None or isinstance(value, bool | int | float | str)
    return value
