"""The catalog's public face: commands that change it, and reads that see one consistent state."""

from collections.abc import Callable, Mapping, Sequence

import sqlalchemy as sa

from headway.artifacts.digests import Json
from headway.catalog import datasets, lineage, snapshots
from headway.catalog.commands import Command, Document, Step, load
from headway.catalog.documents import (
    facts_document,
    feature_set_of,
    snapshot_facts_document,
    snapshot_of,
    state_of,
    version_of,
)
from headway.catalog.errors import InvalidFact
from headway.catalog.facts import (
    AuditRow,
    BlobRow,
    DatasetEvent,
    DatasetVersion,
    DatasetVersionFacts,
    Direction,
    Evidence,
    FeatureSetFacts,
    FeatureSetVersion,
    FeatureSnapshot,
    LineageEdge,
    OutboxRow,
    Principal,
    SnapshotFacts,
    SnapshotState,
    check_name,
)
from headway.catalog.monitoring_commands import MonitoringCommands
from headway.catalog.registry_commands import RegistryCommands
from headway.catalog.run_commands import RunCommands
from headway.catalog.tables import audit, outbox
from headway.catalog.tables import tenant as tenant_table


class Catalog(RunCommands, RegistryCommands, MonitoringCommands):
    """One catalog for several tenants. Safe for several threads; several processes may open the same database.

    Every command takes the principal and an idempotency key. The same key with the same arguments gives the stored
    answer; with other arguments it is an `IdempotencyConflict`. With `key=None` a key is derived: a repeat of the
    command gives its answer again, and the same command after something else happened takes effect anew.
    A stored answer is the record as it was then: read the version again where its state now matters.

    Every method may raise `CatalogBusy` (a lock did not come in time) and `CatalogUnavailable` (no connection); the
    remedy of both is to repeat the same call.
    """

    def ensure_tenant(self, principal: Principal) -> None:
        """Make the principal's tenant unless it exists; nothing waits for a writer when it does."""
        with self.database.read(principal.tenant) as connection:
            known = sa.select(tenant_table.c.epoch).where(tenant_table.c.tenant_id == principal.tenant)
            if connection.execute(known).first() is not None:
                return

        def effect(step: Step) -> Document:
            step.insert_once(tenant_table, created_at=step.now, created_by=principal.actor, epoch=1)
            return {"tenant": principal.tenant}

        command = Command("tenant.ensure", f"tenant:{principal.tenant}", {})
        self._runner.run(principal, None, command, effect, _once)

    def register_version(
        self, principal: Principal, key: str | None, facts: DatasetVersionFacts, expected_epoch: int | None = None
    ) -> DatasetVersion:
        """Make a delivery current in its partition.

        New content becomes the dataset's next version. Content that the partition had before is that version again
        (an event `redelivered` is kept; the epoch moves when another version was current), with the facts of its first
        delivery. The blobs must be durable in the store.

        Args:
            principal: who acts.
            key: the idempotency key, None to derive one.
            facts: the delivery.
            expected_epoch: `partition_epoch` as the caller read it before it began, so that a slow reader of an old
                delivery cannot overtake a newer one; None to follow whatever is current.

        Raises:
            StaleEpoch: the partition moved since.
            Nondeterminism: the same content came with another row count or schema.
            BlobSizeConflict: a blob is known with another size.
            UnknownTenant, IdempotencyConflict: see the class.
        """
        arguments: dict[str, Json] = {"facts": facts_document(facts), "expected_epoch": expected_epoch}
        command = Command("dataset.register", datasets.aggregate(facts.dataset), arguments)
        answer = self._runner.run(
            principal,
            key,
            command,
            lambda step: datasets.register(step, facts, expected_epoch),
            lambda connection: datasets.registered_at(connection, principal.tenant, facts),
        )
        return version_of(answer)

    def start_validation(
        self, principal: Principal, key: str | None, dataset: str, version: int, suite_digest: str
    ) -> DatasetVersion:
        """Begin a validation of a registered or quarantined version under a suite; nothing when it has begun already.

        Raises:
            UnknownVersion: there is no such version.
            IllegalTransition: it is released, retired or erased.
        """
        arguments: dict[str, Json] = {"version": version, "suite_digest": suite_digest}
        return self._step(
            principal,
            key,
            "dataset.start_validation",
            dataset,
            arguments,
            lambda step: datasets.start_validation(step, dataset, version, suite_digest),
            lambda connection: datasets.reached_at(
                connection, principal.tenant, dataset, version, "validating", suite_digest
            ),
        )

    def release_version(
        self, principal: Principal, key: str | None, dataset: str, version: int, evidence: Evidence
    ) -> DatasetVersion:
        """End a validation well: the version may feed snapshots.

        Raises:
            UnknownVersion: there is no such version.
            IllegalTransition: it is not being validated.
            EvidenceRefused: another suite than the validation began with, or nothing was evaluated (which only an
                empty version with reason `no_data_published` may say).
        """
        arguments: dict[str, Json] = {"version": version, "evidence": evidence.document()}
        return self._step(
            principal,
            key,
            "dataset.release",
            dataset,
            arguments,
            lambda step: datasets.conclude(step, dataset, version, "released", evidence),
            lambda connection: datasets.reached_at(
                connection, principal.tenant, dataset, version, "released", evidence.digest
            ),
        )

    def quarantine_version(
        self, principal: Principal, key: str | None, dataset: str, version: int, evidence: Evidence
    ) -> DatasetVersion:
        """End a validation badly: the version exists, and nothing may read it. Raises as `release_version`."""
        arguments: dict[str, Json] = {"version": version, "evidence": evidence.document()}
        return self._step(
            principal,
            key,
            "dataset.quarantine",
            dataset,
            arguments,
            lambda step: datasets.conclude(step, dataset, version, "quarantined", evidence),
            lambda connection: datasets.reached_at(
                connection, principal.tenant, dataset, version, "quarantined", evidence.digest
            ),
        )

    def retire_version(
        self,
        principal: Principal,
        key: str | None,
        dataset: str,
        version: int,
        reason: str,
        evidence: Evidence | None = None,
    ) -> DatasetVersion:
        """Take a released version out of use, on new evidence when there is some. Its blobs stay.

        Raises:
            UnknownVersion: there is no such version.
            IllegalTransition: it is not released.
        """
        digest = None if evidence is None else evidence.digest
        document = None if evidence is None else evidence.document()
        arguments: dict[str, Json] = {"version": version, "reason": reason, "evidence": document}
        return self._step(
            principal,
            key,
            "dataset.retire",
            dataset,
            arguments,
            lambda step: datasets.retire(step, dataset, version, reason, evidence),
            lambda connection: datasets.reached_at(connection, principal.tenant, dataset, version, "retired", digest),
        )

    def record_validation(
        self, principal: Principal, key: str | None, dataset: str, version: int, evidence: Evidence
    ) -> DatasetVersion:
        """Keep a released version released on new evidence (another suite found it good).

        Raises:
            UnknownVersion: there is no such version.
            IllegalTransition: it is not released.
            EvidenceRefused: nothing was evaluated.
        """
        arguments: dict[str, Json] = {"version": version, "evidence": evidence.document()}
        return self._step(
            principal,
            key,
            "dataset.record_validation",
            dataset,
            arguments,
            lambda step: datasets.revalidate(step, dataset, version, evidence),
            lambda connection: datasets.reached_at(
                connection, principal.tenant, dataset, version, "released", evidence.digest
            ),
        )

    def register_feature_set(self, principal: Principal, key: str | None, facts: FeatureSetFacts) -> FeatureSetVersion:
        """Return the version of this contract and code, made when there is none.

        Raises:
            Nondeterminism: the same digests came with another contract.
        """
        arguments: dict[str, Json] = {
            "contract_digest": facts.contract_digest,
            "code_digest": facts.code_digest,
            "contract": facts.contract,
        }
        command = Command("feature_set.register", snapshots.feature_set_aggregate(facts.feature_set), arguments)
        answer = self._runner.run(
            principal,
            key,
            command,
            lambda step: snapshots.register_feature_set(step, facts),
            lambda connection: snapshots.feature_set_at(connection, principal.tenant, facts),
        )
        return feature_set_of(answer)

    def publish_snapshot(self, principal: Principal, key: str | None, facts: SnapshotFacts) -> FeatureSnapshot:
        """Publish the snapshot of these inputs as its partition's state, with its lineage.

        The identity follows from the inputs: published before, the stored snapshot comes back.

        Raises:
            ProofMissing: the leakage proof did not pass.
            UnknownFeatureSet, UnknownVersion: an input that was never registered.
            InputNotReleased: an input is not released, on other evidence, or has other content.
            Nondeterminism: the same inputs gave other content before.
        """
        _check_pipeline(facts.pipeline)
        arguments = snapshot_facts_document(facts)
        command = Command("snapshot.publish", snapshots.snapshot_aggregate(facts.pipeline, facts.partition), arguments)
        answer = self._runner.run(
            principal,
            key,
            command,
            lambda step: snapshots.publish(step, facts),
            lambda connection: snapshots.published_at(connection, principal.tenant, facts),
        )
        return snapshot_of(answer)

    def refuse_snapshot(
        self,
        principal: Principal,
        key: str | None,
        pipeline: str,
        partition: str,
        reason: str,
        blocking: tuple[str, ...],
        evidence_digest: str | None = None,
    ) -> SnapshotState:
        """Record that a partition has no snapshot now, why, and what blocks it by name."""
        _check_pipeline(pipeline)
        check_name("partition", partition, empty=True)
        arguments: dict[str, Json] = {
            "reason": reason,
            "blocking": list(blocking),
            "evidence_digest": evidence_digest,
        }
        command = Command("snapshot.refuse", snapshots.snapshot_aggregate(pipeline, partition), arguments)
        subject = (pipeline, partition, reason, blocking, evidence_digest)
        answer = self._runner.run(
            principal,
            key,
            command,
            lambda step: snapshots.refuse(step, *subject),
            lambda connection: snapshots.refused_at(connection, principal.tenant, *subject)[0],
        )
        return state_of(answer)

    def version(self, principal: Principal, dataset: str, version: int) -> DatasetVersion:
        """Return one version with its state.

        Raises:
            UnknownVersion: there is no such version.
        """
        with self.reading(principal) as connection:
            return datasets.read_version(connection, principal.tenant, dataset, version)

    def current(self, principal: Principal, dataset: str, partition: str) -> DatasetVersion | None:
        """Return the version that a partition's last delivery made current, whatever its status; None when none."""
        return self.current_many(principal, dataset, [partition]).get(partition)

    def current_many(
        self, principal: Principal, dataset: str, partitions: Sequence[str] | None = None
    ) -> dict[str, DatasetVersion]:
        """Return the current version of each partition that has one (of those asked for), in order of partition."""
        with self.reading(principal) as connection:
            return datasets.read_current(connection, principal.tenant, dataset, partitions)

    def versions(self, principal: Principal, dataset: str, partition: str | None = None) -> list[DatasetVersion]:
        """Return the versions of a dataset, or of one partition of it, in order of their number."""
        with self.reading(principal) as connection:
            return datasets.read_versions(connection, principal.tenant, dataset, partition)

    def partition_epoch(self, principal: Principal, dataset: str, partition: str) -> int:
        """Return how often a partition's current version was set; 0 when never."""
        with self.reading(principal) as connection:
            return datasets.epoch_of(connection, principal.tenant, dataset, partition)

    def dataset_events(self, principal: Principal, dataset: str, version: int | None = None) -> list[DatasetEvent]:
        """Return the events of a dataset, or of one version, in order of version and number."""
        with self.reading(principal) as connection:
            return datasets.read_events(connection, principal.tenant, dataset, version)

    def feature_set(self, principal: Principal, feature_set: str, version: int) -> FeatureSetVersion:
        """Return one version of a feature set.

        Raises:
            UnknownFeatureSet: there is no such version.
        """
        with self.reading(principal) as connection:
            return snapshots.read_feature_set(connection, principal.tenant, feature_set, version)

    def snapshot(self, principal: Principal, snapshot_id: str) -> FeatureSnapshot:
        """Return one snapshot.

        Raises:
            UnknownSnapshot: there is no such snapshot.
        """
        with self.reading(principal) as connection:
            return snapshots.read_snapshot(connection, principal.tenant, snapshot_id)

    def snapshot_ids(self, principal: Principal, prefix: str) -> list[str]:
        """Return the identities of the tenant's snapshots that begin with a text, in order."""
        with self.reading(principal) as connection:
            return snapshots.read_ids(connection, principal.tenant, prefix)

    def current_snapshots(
        self, principal: Principal, pipeline: str, partitions: Sequence[str] | None = None
    ) -> dict[str, SnapshotState]:
        """Return the state of each partition that has one (of those asked for), in order of partition."""
        with self.reading(principal) as connection:
            return snapshots.read_states(connection, principal.tenant, pipeline, partitions)

    def lineage(self, principal: Principal, node: str, direction: Direction) -> list[LineageEdge]:
        """Return every edge upstream of a node (what it came from) or downstream of it (what came of it)."""
        with self.reading(principal) as connection:
            return lineage.read_lineage(connection, principal.tenant, node, direction)

    def blobs(self, principal: Principal) -> list[BlobRow]:
        """Return the tenant's blobs with their state and owners, in order of digest."""
        with self.reading(principal) as connection:
            return lineage.read_blobs(connection, principal.tenant)

    def outbox(self, principal: Principal, after_seq: int = 0, limit: int = 1_000) -> list[OutboxRow]:
        """Return committed changes after `after_seq`, in commit order per aggregate. No row ever appears before it."""
        # Waiting for writers in flight is what makes a plain number a safe cursor.
        with self.database.write(principal.tenant, "outbox") as connection:
            self.database.lock(connection, principal.tenant, "outbox")
            columns = outbox.c
            statement = (
                sa.select(outbox)
                .where(columns.tenant_id == principal.tenant, columns.seq > after_seq)
                .order_by(columns.seq)
                .limit(limit)
            )
            return [
                OutboxRow(
                    row.seq, row.aggregate, row.aggregate_seq, row.topic, load(row.payload), row.command_key, row.at
                )
                for row in connection.execute(statement)
            ]

    def audit_rows(self, principal: Principal, after_seq: int = 0, limit: int = 1_000) -> list[AuditRow]:
        """Return executed commands after `after_seq`, in order of their number."""
        columns = audit.c
        statement = (
            sa.select(
                columns.seq,
                columns.actor,
                columns.action,
                columns.resource,
                columns.outcome,
                columns.command_key,
                columns.fingerprint,
                columns.at,
            )
            .where(columns.tenant_id == principal.tenant, columns.seq > after_seq)
            .order_by(columns.seq)
            .limit(limit)
        )
        with self.reading(principal) as connection:
            return [AuditRow(*row) for row in connection.execute(statement)]

    def _step(
        self,
        principal: Principal,
        key: str | None,
        operation: str,
        dataset: str,
        arguments: Mapping[str, Json],
        effect: Callable[[Step], Document],
        position: Callable[[sa.Connection], int],
    ) -> DatasetVersion:
        command = Command(operation, datasets.aggregate(dataset), arguments)
        return version_of(self._runner.run(principal, key, command, effect, position))


def _once(connection: sa.Connection) -> int:
    del connection
    return 1


def _check_pipeline(pipeline: str) -> None:
    check_name("pipeline", pipeline)
    if "/" in pipeline:
        raise InvalidFact("pipeline", pipeline, "a name without a slash, which ends it in the names of its partitions")
