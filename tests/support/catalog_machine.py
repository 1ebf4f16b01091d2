"""A stateful machine over the catalog's public commands, against a model of a few dictionaries.

Each example is a tenant of its own in one database, so every example also shows that tenants do not see each other.
Run as a program (`python -m support.catalog_machine URL FOLDER`) it exits 0 when no step contradicts the model.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from sqlalchemy.exc import DBAPIError
from support.catalog_facts import Ticker, delivery, evidence, feature_set, payload, snapshot

from headway.artifacts.store import LocalStore
from headway.catalog import DatasetVersion, DatasetVersionFacts, Principal, SnapshotState, open_catalog, tables
from headway.catalog.catalog import Catalog
from headway.catalog.errors import (
    EvidenceRefused,
    IdempotencyConflict,
    IllegalTransition,
    InputNotReleased,
    Nondeterminism,
    ProofMissing,
    StaleEpoch,
)
from headway.catalog.invariants import check

DATASETS = ("flights", "weather")
PARTITIONS = ("", "2013-06-01")
SUITES = ("s1", "s2")
PIPELINE = "flight_delay"

datasets = st.sampled_from(DATASETS)
partitions = st.sampled_from(PARTITIONS)
contents = st.integers(1, 3)
suites = st.sampled_from(SUITES)
keyed = st.booleans()
picks = st.integers(0, 1_000)


@dataclass
class Known:
    """What the model knows of one version."""

    partition: str
    content: int
    status: str
    suite: str | None = None
    evidence_digest: str | None = None
    reason: str = ""


@dataclass
class Model:
    """What the catalog must say."""

    versions: dict[tuple[str, int], Known] = field(default_factory=dict)
    current: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    snapshots: dict[str, int] = field(default_factory=dict)
    states: dict[str, tuple[str, str | None, str]] = field(default_factory=dict)
    derived: list[tuple[DatasetVersionFacts, int | None, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Acknowledged:
    """A command that was answered under a key of ours: how to send it again, and how to send another with its key."""

    answer: Any
    again: Callable[[], Any]
    other: Callable[[], Any]


@dataclass
class World:
    """What all examples share."""

    catalog: Catalog
    store: LocalStore
    tenants: "count[int]" = field(default_factory=count)
    steps: int = 0


def machine(world: World) -> type[RuleBasedStateMachine]:
    """Return the machine over the world's catalog."""

    class CatalogMachine(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.me = Principal(f"tenant-{next(world.tenants)}", "machine")
            self.model = Model()
            self.keys = count()
            self.last_audit = 0
            self.acknowledged: list[Acknowledged] = []
            world.catalog.ensure_tenant(self.me)
            world.catalog.register_feature_set(self.me, None, feature_set())

        @rule(
            dataset=datasets, partition=partitions, content=contents, keyed=keyed, stale=st.integers(-1, 1) | st.none()
        )
        def deliver(self, dataset: str, partition: str, content: int, keyed: bool, stale: int | None) -> None:
            _, epoch = self.model.current.get((dataset, partition), (0, 0))
            expected = None if stale is None else max(0, epoch + stale)
            facts = delivery(dataset, partition, content)
            _store_all(world.store, ("manifest", dataset, partition, content))
            send = lambda key: world.catalog.register_version(self.me, key, facts, expected)  # noqa: E731
            # Without a key, the repeat of what brought the partition here is answered again, not refused.
            repeat = not keyed and (facts, expected, epoch) in self.model.derived
            if expected not in (None, epoch) and not repeat:
                _refused(StaleEpoch, lambda: send(self.key(keyed)))
                return
            other = replace(facts, rows=facts.rows + 1)
            answer = self.acknowledge(keyed, send, lambda key: world.catalog.register_version(self.me, key, other))
            number = self.deliver_to_model(dataset, partition, content, epoch)
            if not keyed:
                self.model.derived.append((facts, expected, self.model.current[dataset, partition][1]))
            assert (answer.version, answer.facts) == (number, facts)

        @rule(pick=picks, suite=suites, keyed=keyed)
        def start_validation(self, pick: int, suite: str, keyed: bool) -> None:
            chosen = self.choose(pick)
            if chosen is None:
                return
            (dataset, number), known = chosen
            digest = evidence(suite).suite_digest
            send = lambda key: world.catalog.start_validation(self.me, key, dataset, number, digest)  # noqa: E731
            if known.status not in ("registered", "quarantined", "validating", "retired"):
                _refused(IllegalTransition, lambda: send(self.key(keyed)))
                return
            self.acknowledge(
                keyed, send, lambda key: world.catalog.start_validation(self.me, key, dataset, number + 1, digest)
            )
            if (known.status, known.suite) != ("validating", suite):
                self.model.versions[dataset, number] = replace(
                    known, status="validating", suite=suite, evidence_digest=None, reason=""
                )

        @rule(
            pick=picks,
            suite=suites,
            status=st.sampled_from(("released", "quarantined")),
            empty=st.booleans(),
            keyed=keyed,
        )
        def conclude(self, pick: int, suite: str, status: str, empty: bool, keyed: bool) -> None:
            chosen = self.choose(pick)
            if chosen is None:
                return
            (dataset, number), known = chosen
            found = evidence(suite, status, evaluated=0 if empty else 4)
            _store_all(world.store, ("report", suite, status))
            command = world.catalog.release_version if status == "released" else world.catalog.quarantine_version
            send = lambda key: command(self.me, key, dataset, number, found)  # noqa: E731
            there = (known.status, known.evidence_digest) == (status, found.digest)
            if not there and known.status != "validating":
                _refused(IllegalTransition, lambda: send(self.key(keyed)))
            elif not there and (known.suite != suite or (status == "released" and empty)):
                _refused(EvidenceRefused, lambda: send(self.key(keyed)))
            else:
                changed = replace(found, failed=1)
                answer = self.acknowledge(keyed, send, lambda key: command(self.me, key, dataset, number, changed))
                assert (answer.status, answer.evidence) == (status, found)
                self.model.versions[dataset, number] = replace(
                    known, status=status, suite=suite, evidence_digest=found.digest, reason=status
                )

        @rule(pick=picks, suite=suites, keyed=keyed)
        def revalidate(self, pick: int, suite: str, keyed: bool) -> None:
            chosen = self.choose(pick)
            if chosen is None:
                return
            (dataset, number), known = chosen
            found = evidence(suite, "still good")
            _store_all(world.store, ("report", suite, "still good"))
            send = lambda key: world.catalog.record_validation(self.me, key, dataset, number, found)  # noqa: E731
            if known.status != "released":
                _refused(IllegalTransition, lambda: send(self.key(keyed)))
                return
            changed = replace(found, failed=1)
            self.acknowledge(
                keyed, send, lambda key: world.catalog.record_validation(self.me, key, dataset, number, changed)
            )
            self.model.versions[dataset, number] = replace(
                known, suite=suite, evidence_digest=found.digest, reason="still good"
            )

        @rule(pick=picks, reason=st.sampled_from(("old", "wrong")), keyed=keyed)
        def retire(self, pick: int, reason: str, keyed: bool) -> None:
            chosen = self.choose(pick)
            if chosen is None:
                return
            (dataset, number), known = chosen
            send = lambda key: world.catalog.retire_version(self.me, key, dataset, number, reason)  # noqa: E731
            if known.status != "released" and (known.status, known.reason) != ("retired", reason):
                _refused(IllegalTransition, lambda: send(self.key(keyed)))
                return
            self.acknowledge(
                keyed, send, lambda key: world.catalog.retire_version(self.me, key, dataset, number, reason + "!")
            )
            self.model.versions[dataset, number] = replace(known, status="retired", reason=reason)

        @rule(
            picked=st.lists(picks, min_size=1, max_size=2), partition=partitions, drift=st.integers(0, 9), keyed=keyed
        )
        def publish(self, picked: list[int], partition: str, drift: int, keyed: bool) -> None:
            chosen = {found[0]: found[1] for pick in picked if (found := self.choose(pick)) is not None}
            if not chosen:
                return
            inputs = tuple(world.catalog.version(self.me, *name) for name in chosen)
            content = 2 if drift == 0 else 1
            facts = snapshot(inputs, partition, content)
            _store_all(world.store, ("snapshot manifest", partition, content))
            identity = facts.snapshot_id(self.me.tenant)
            send = lambda key: world.catalog.publish_snapshot(self.me, key, facts)  # noqa: E731
            if drift == 1:
                facts = replace(facts, proof_passed=False)
                _refused(ProofMissing, lambda: send(self.key(keyed)))
            elif any(known.status != "released" for known in chosen.values()):
                _refused(InputNotReleased, lambda: send(self.key(keyed)))
            elif self.model.snapshots.get(identity, content) != content:
                _refused(Nondeterminism, lambda: send(self.key(keyed)))
            else:
                changed = replace(facts, rows=facts.rows + 1)
                answer = self.acknowledge(
                    keyed, send, lambda key: world.catalog.publish_snapshot(self.me, key, changed)
                )
                assert answer.snapshot_id == identity
                self.model.snapshots[identity] = content
                self.model.states[partition] = ("published", identity, "")

        @rule(partition=partitions, dataset=datasets, keyed=keyed)
        def refuse(self, partition: str, dataset: str, keyed: bool) -> None:
            send = lambda key: world.catalog.refuse_snapshot(self.me, key, PIPELINE, partition, "blocked", (dataset,))  # noqa: E731
            answer = self.acknowledge(
                keyed,
                send,
                lambda key: world.catalog.refuse_snapshot(self.me, key, PIPELINE, partition, "other", (dataset,)),
            )
            assert (answer.status, answer.blocking) == ("refused", (dataset,))
            self.model.states[partition] = ("refused", None, "blocked")

        @rule(pick=picks)
        def replay(self, pick: int) -> None:
            if self.acknowledged:
                command = self.acknowledged[pick % len(self.acknowledged)]
                before = self.audited()
                assert command.again() == command.answer
                assert self.audited() == before

        @rule(pick=picks)
        def misuse_key(self, pick: int) -> None:
            if self.acknowledged:
                _refused(IdempotencyConflict, self.acknowledged[pick % len(self.acknowledged)].other)

        @rule(name=st.sampled_from(sorted(_FACT_TABLES)), delete=st.booleans())
        def rewrite_history(self, name: str, delete: bool) -> None:
            table = tables.metadata.tables[name]
            mine = table.c.tenant_id == self.me.tenant
            change = sa.delete(table) if delete else sa.update(table).values(tenant_id=self.me.tenant)
            with world.catalog.reading(self.me) as connection:
                rows = connection.execute(sa.select(sa.func.count()).select_from(table).where(mine)).scalar_one()
            try:
                with world.catalog.database.write(self.me.tenant, "rewrite") as connection:
                    connection.execute(change.where(mine))
            except DBAPIError as error:
                _must_name(error, "append-only")
            else:
                # A row trigger has nothing to refuse where there is no row.
                assert rows == 0

        @invariant()
        def catalog_equals_model(self) -> None:
            world.steps += 1
            if not hasattr(self, "model"):
                return
            dataset = DATASETS[world.steps % len(DATASETS)]
            told = {version.version: version for version in world.catalog.versions(self.me, dataset)}
            assert set(told) == {number for name, number in self.model.versions if name == dataset}
            for number, version in told.items():
                _same_version(version, self.model.versions[dataset, number])
            current = {name: v.version for name, v in world.catalog.current_many(self.me, dataset).items()}
            assert current == {part: n for (name, part), (n, _) in self.model.current.items() if name == dataset}

        @invariant()
        def snapshots_equal_model(self) -> None:
            if hasattr(self, "model") and world.steps % 3 == 0:
                told = world.catalog.current_snapshots(self.me, PIPELINE)
                assert {partition: _seen(state) for partition, state in told.items()} == self.model.states

        def teardown(self) -> None:
            if hasattr(self, "me"):
                broken = [finding for finding in check(world.catalog, self.me, world.store) if not finding.ok]
                assert not broken, broken

        def key(self, keyed: bool) -> str | None:
            return f"key-{next(self.keys)}" if keyed else None

        def acknowledge(self, keyed: bool, send: Callable[[str | None], Any], other: Callable[[str], Any]) -> Any:  # noqa: ANN401
            key = self.key(keyed)
            answer = send(key)
            before = self.audited()
            assert send(key) == answer
            assert self.audited() == before
            if key is not None:
                self.acknowledged.append(Acknowledged(answer, lambda: send(key), lambda: other(key)))
            return answer

        def audited(self) -> int:
            rows = world.catalog.audit_rows(self.me, after_seq=self.last_audit)
            self.last_audit = rows[-1].seq if rows else self.last_audit
            return self.last_audit

        def choose(self, pick: int) -> tuple[tuple[str, int], Known] | None:
            names = sorted(self.model.versions)
            if not names:
                return None
            name = names[pick % len(names)]
            return name, self.model.versions[name]

        def deliver_to_model(self, dataset: str, partition: str, content: int, epoch: int) -> int:
            same = [
                number
                for (name, number), known in self.model.versions.items()
                if (name, known.partition, known.content) == (dataset, partition, content)
            ]
            number = same[0] if same else 1 + sum(1 for name, _ in self.model.versions if name == dataset)
            if not same:
                self.model.versions[dataset, number] = Known(partition, content, "registered")
            if self.model.current.get((dataset, partition), (0, 0))[0] != number:
                self.model.current[dataset, partition] = (number, epoch + 1)
            return number

    return CatalogMachine


def run(url: str, folder: Path, examples: int, steps: int = 50) -> int:
    """Run the machine; return how many steps it took.

    Raises:
        AssertionError: a step contradicted the model.
    """
    world = World(open_catalog(url, Ticker()), LocalStore(folder))
    try:
        run_state_machine_as_test(
            machine(world),
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                report_multiple_bugs=False,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
            ),
        )
    finally:
        world.catalog.close()
    return world.steps


_FACT_TABLES = frozenset(tables.APPEND_ONLY & tables.metadata.tables.keys())


def _same_version(version: DatasetVersion, known: Known) -> None:
    assert (version.partition, version.status, version.evidence_digest, version.status_reason) == (
        known.partition,
        known.status,
        known.evidence_digest,
        known.reason,
    )


def _seen(state: SnapshotState) -> tuple[str, str | None, str]:
    return (state.status, None if state.snapshot is None else state.snapshot.snapshot_id, state.reason)


def _store_all(store: LocalStore, *named: tuple[object, ...]) -> None:
    for parts in named:
        store.put_bytes(payload(*parts))


def _must_name(error: Exception, word: str) -> None:
    assert word in str(error)


def _refused(error: type[Exception], send: Callable[[], object]) -> None:
    try:
        answer = send()
    except error:
        return
    raise AssertionError(f"expected {error.__name__}, got {answer!r}")


if __name__ == "__main__":
    sys.stdout.write(f"{run(sys.argv[1], Path(sys.argv[2]), examples=int(sys.argv[3]))} steps\n")
