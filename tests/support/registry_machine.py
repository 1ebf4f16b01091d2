"""A stateful machine over runs, budgets, registry and endpoints, against a model of a few lists.

Each example is a tenant of its own. Run as a program (`python -m support.registry_machine URL FOLDER EXAMPLES`) it
exits 0 when no step contradicts the model.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from math import ceil
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from support.catalog_facts import Ticker, blob, digest
from support.registry_facts import (
    BUDGET,
    ENDPOINT,
    GATES,
    MODEL,
    POLICY,
    UNIT,
    ask,
    end,
    judge,
    prepare_inputs,
    run_facts,
    statement,
    version_facts,
)

from headway.artifacts.store import LocalStore
from headway.catalog import Principal, open_catalog
from headway.catalog.catalog import Catalog
from headway.catalog.errors import (
    AttemptsSpent,
    BudgetBelowUse,
    BudgetExhausted,
    EndpointMoved,
    EventGap,
    IdempotencyConflict,
    ImpossiblePrediction,
    NothingToRollBack,
    PromotionRefused,
    RunCancelled,
    RunRefused,
    StaleAttempt,
    UnknownEndpoint,
    VersionRefused,
)
from headway.catalog.invariants import check
from headway.catalog.registry_facts import PredictionBatch, PredictionFacts, PromotionEvidence
from headway.catalog.run_facts import BudgetState

MONTH = "2013-06"
LIMIT = 2_000
RESERVE = 100
MAX_ATTEMPTS = 2
ENDINGS: dict[str, tuple[str, int | None]] = {
    "succeeded": ("succeeded", 0),
    "spec refused": ("failed", 64),
    "user code": ("failed", 65),
    "preempted": ("failed", 75),
    "hung": ("failed", 76),
    "lost peer": ("failed", 77),
    "cancelled": ("cancelled", 75),
    "lost": ("lost", None),
}

# Runs that the rules start; two others succeeded before, so that there is something to judge from the first step.
seeds = st.integers(1, 2)
DONE = (11, 12)
READY = ((11, "network"), (12, "network"), (11, "logistic"))
keyed = st.booleans()
picks = st.integers(0, 1_000)
gates = st.sampled_from(GATES)


@dataclass
class Try:
    """What the model knows of one attempt."""

    state: str = "admitted"
    code: int | None = None
    cancel: bool = False
    seconds: float = 0.0
    cursors: dict[int, int] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.state in ("admitted", "running")


@dataclass
class Version:
    """What the model knows of one model version; `results` holds the newest (verdict, policy, statement) by gate."""

    seed: int
    kind: str
    retired: bool = False
    results: dict[str, tuple[str, int, str]] = field(default_factory=dict)


@dataclass
class Model:
    """What the catalog must say."""

    runs: dict[int, list[Try]] = field(default_factory=dict)
    limit: int = LIMIT
    reserved: int = 0
    committed: int = 0
    versions: list[Version] = field(default_factory=list)
    policies: list[tuple[bool, int]] = field(default_factory=list)
    # (stable, previous) at each epoch.
    moves: list[tuple[int, int | None]] = field(default_factory=list)


@dataclass(frozen=True)
class Acknowledged:
    """A command that was answered under a key of ours: how to send it again, and another with its key."""

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
    catalog = world.catalog

    class RegistryMachine(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.me = Principal(f"tenant-{next(world.tenants)}", "machine")
            self.snapshot_id = prepare_inputs(catalog, self.me)
            catalog.set_budget(self.me, None, BUDGET, MONTH, UNIT, LIMIT)
            self.model = Model()
            self.serial = count()
            self.acknowledged: list[Acknowledged] = []
            for seed in DONE:
                attempt = ask(catalog, self.facts(seed), who=self.me).attempt
                assert attempt is not None
                end(catalog, attempt, who=self.me)
                self.model.runs[seed] = [Try("succeeded", 0)]
            for seed, kind in READY:
                self.register(seed, kind, lie=False, keyed=False)

        @rule(seed=seeds)
        def submit_with_too_little_left(self, seed: int) -> None:
            self.set_budget(RESERVE - 1)
            self.submit(seed, person=True, retry=True, again=False)

        @rule(seed=seeds, person=st.booleans(), retry=st.booleans(), again=st.booleans())
        def submit(self, seed: int, person: bool, retry: bool, again: bool) -> None:
            asker = "person" if person else "machine"
            facts = self.facts(seed)
            send = lambda key: ask(  # noqa: E731
                catalog, facts, key=key, who=self.me, asker=asker, retry=retry, reserve_seconds=RESERVE
            )
            self.asked(seed, asker, retry, send, again)

        @rule(seed=seeds, again=st.booleans())
        def restart(self, seed: int, again: bool) -> None:
            if seed in self.model.runs:
                send = lambda key: catalog.restart_run(  # noqa: E731
                    self.me, key, self.run_id(seed), reserve_seconds=RESERVE
                )
                self.asked(seed, "machine", False, send, again)

        @rule(seed=seeds, endings=st.lists(st.sampled_from(("preempted", "hung", "lost")), min_size=1, max_size=2))
        def fail(self, seed: int, endings: list[str]) -> None:
            self.set_budget(LIMIT)
            for ending in endings:
                if self.expect(seed, "person", False) in ("started", "adopted"):
                    self.submit(seed, person=True, retry=False, again=False)
                    self.finish(seed, ending, 9.5, keyed=False)

        @rule(seed=seeds, keyed=keyed)
        def see_running(self, seed: int, keyed: bool) -> None:
            tries = self.model.runs.get(seed)
            if not tries:
                return
            number = len(tries)
            send = lambda key: catalog.mark_running(self.me, key, self.run_id(seed), number, number)  # noqa: E731
            if not tries[-1].is_open:
                if not keyed and tries[-1].state == "succeeded":
                    # The derived key of an earlier sight may answer; a stored answer changes nothing.
                    return
                _refused(StaleAttempt, lambda: send(f"key-{next(self.serial)}"))
                return
            self.acknowledge(keyed, send, lambda key: catalog.request_cancel(self.me, key, self.run_id(seed), "?"))
            tries[-1].state = "running"

        @rule(seed=seeds, ending=st.sampled_from(sorted(ENDINGS)), seconds=st.sampled_from((9.5, 240.0)), keyed=keyed)
        def finish(self, seed: int, ending: str, seconds: float, keyed: bool) -> None:
            tries = self.model.runs.get(seed)
            if not tries or not tries[-1].is_open:
                return
            state, code = ENDINGS[ending]
            attempt = catalog.run(self.me, self.run_id(seed)).last
            send = lambda key: end(  # noqa: E731
                catalog, attempt, state, key=key, who=self.me, code=code, worker_seconds=seconds
            )
            other = lambda key: end(catalog, attempt, "lost", key=key, who=self.me, worker_seconds=0.25)  # noqa: E731
            forged = replace(attempt, token=attempt.token + 1)
            _refused(StaleAttempt, lambda: end(catalog, forged, state, who=self.me, code=code))
            self.acknowledge(keyed, send, other)
            last = tries[-1]
            last.state, last.code, last.seconds = state, code, seconds
            self.model.reserved -= RESERVE
            self.model.committed += ceil(seconds)

        @rule(seed=seeds, pick=picks, wrong_token=st.booleans(), ending=st.sampled_from(sorted(ENDINGS)))
        def finish_stale(self, seed: int, pick: int, wrong_token: bool, ending: str) -> None:
            tries = self.model.runs.get(seed)
            if not tries:
                return
            number = pick % len(tries)
            if tries[number].is_open and not wrong_token:
                return
            attempt = catalog.run(self.me, self.run_id(seed)).attempts[number]
            token = attempt.token + 1 if wrong_token else attempt.token
            state, code = ENDINGS[ending]
            stale = replace(attempt, token=token)
            _refused(
                StaleAttempt,
                lambda: end(catalog, stale, state, who=self.me, code=code, worker_seconds=0.125),
            )

        @rule(seed=seeds, keyed=keyed)
        def cancel(self, seed: int, keyed: bool) -> None:
            tries = self.model.runs.get(seed)
            if not tries:
                return
            key = f"key-{next(self.serial)}" if keyed else None
            answer = catalog.request_cancel(self.me, key, self.run_id(seed), "enough")
            last = tries[-1]
            if last.is_open or (last.state in ("failed", "lost") and last.code not in (64, 65)):
                last.cancel = True
            assert answer.cancel_requested == last.cancel

        @rule(seed=seeds, node=st.integers(0, 1), first=st.integers(-2, 2), size=st.integers(0, 3))
        def read_events(self, seed: int, node: int, first: int, size: int) -> None:
            tries = self.model.runs.get(seed)
            if not tries:
                return
            number, cursor = len(tries), tries[-1].cursors.get(node, 0)
            start = max(1, cursor + 1 + first)
            events = [{"kind": "step", "data": {"step": n}, "at": n} for n in range(start, start + size)]
            send = lambda: catalog.append_events(self.me, self.run_id(seed), number, node, start, events)  # noqa: E731
            if start > cursor + 1:
                _refused(EventGap, send)
                return
            cursor = max(cursor, start + size - 1)
            assert send() == cursor + 1
            tries[-1].cursors[node] = cursor
            assert catalog.event_cursor(self.me, self.run_id(seed), number, node) == cursor

        @rule(left=st.sampled_from((-1, 0, RESERVE - 1, RESERVE, RESERVE, LIMIT, LIMIT)))
        def set_budget(self, left: int) -> None:
            amount = max(0, self.model.reserved + self.model.committed + left)
            send = lambda: catalog.set_budget(self.me, None, BUDGET, MONTH, UNIT, amount)  # noqa: E731
            used = self.model.reserved + self.model.committed
            if amount != self.model.limit and amount < used:
                _refused(BudgetBelowUse, send)
            else:
                assert send().limit == amount
                self.model.limit = amount

        @rule(
            seed=seeds | st.sampled_from(DONE),
            kind=st.sampled_from(("network", "logistic")),
            lie=st.booleans(),
            keyed=keyed,
        )
        def register(self, seed: int, kind: str, lie: bool, keyed: bool) -> None:
            tries = self.model.runs.get(seed)
            if not tries:
                return
            run = catalog.run(self.me, self.run_id(seed))
            if tries[-1].state != "succeeded":
                assert run.result is None
                return
            facts = version_facts(run, kind)
            known = [(v.seed, v.kind) for v in self.model.versions]
            if lie and (seed, kind) not in known:
                other = "logistic" if kind == "network" else "network"
                forged = replace(facts, kind=other)
                _refused(VersionRefused, lambda: catalog.register_model_version(self.me, None, forged))
                return
            send = lambda key: catalog.register_model_version(self.me, key, facts)  # noqa: E731
            answer = self.acknowledge(
                keyed, send, lambda key: catalog.retire_model_version(self.me, key, MODEL, 1, "misuse")
            )
            if (seed, kind) not in known:
                self.model.versions.append(Version(seed, kind))
                known.append((seed, kind))
            assert answer.version == 1 + known.index((seed, kind))
            if not self.model.policies:
                self.policy(immediate=True, note=0, keyed=False)

        @rule(immediate=st.sampled_from((True, True, True, True, False)), note=st.integers(0, 2), keyed=keyed)
        def policy(self, immediate: bool, note: int, keyed: bool) -> None:
            wanted = POLICY | {"allow_immediate": immediate, "note": note}
            send = lambda key: catalog.set_gate_policy(self.me, key, MODEL, wanted)  # noqa: E731
            answer = self.acknowledge(
                keyed, send, lambda key: catalog.set_gate_policy(self.me, key, MODEL, wanted | {"x": 1})
            )
            if self.model.policies[-1:] != [(immediate, note)]:
                self.model.policies.append((immediate, note))
            assert answer.version == len(self.model.policies)

        @rule(pick=picks, gate=gates, verdict=st.sampled_from(("pass", "pass", "fail", "undecided")), look=picks)
        def judge_one(self, pick: int, gate: str, verdict: str, look: int) -> None:
            self.judged(pick % len(self.model.versions), gate, verdict, look)

        @rule(
            pick=picks,
            spoil=st.sampled_from(
                ("", "", "", "", "", "", "", "leave one out", "stale epoch", "other policy", "old statement")
            ),
            but=st.sampled_from(("", "", "", "", "", "", *GATES)),
            fresh=st.sampled_from((True, True, False)),
            keyed=keyed,
        )
        def promote(self, pick: int, spoil: str, but: str, fresh: bool, keyed: bool) -> None:
            number = pick % len(self.model.versions)
            version, epoch = self.model.versions[number], len(self.model.moves)
            applies = [g for g in GATES if (g, version.kind) != ("auc_over_logistic", "logistic")]
            for gate in applies if fresh else ():
                self.judged(number, gate, "undecided" if gate == but else "pass", pick)
            statements = {g: version.results[g][2] for g in applies if g in version.results}
            if spoil == "leave one out":
                statements.pop(applies[pick % len(applies)], None)
            if spoil == "old statement" and statements:
                statements[next(iter(statements))] = digest("an old statement")
            in_force = len(self.model.policies)
            manifest = catalog.model_version(self.me, MODEL, number + 1).manifest_digest
            signed = catalog.add_attestation(self.me, None, statement(manifest, (epoch, "promotion"), "promoter"))
            evidence = PromotionEvidence(in_force + (spoil == "other policy"), statements, signed.statement_digest, 1)
            expected = epoch + 1 if spoil == "stale epoch" else epoch if keyed else None
            send = lambda key: catalog.promote_immediate(  # noqa: E731
                self.me, key, ENDPOINT, MODEL, number + 1, expected_epoch=expected, evidence=evidence
            )
            passed = all(version.results.get(g, ())[:2] == ("pass", in_force) for g in applies)
            complete = all(statements.get(g) == version.results.get(g, ("", 0, None))[2] for g in applies)
            allowed = self.model.policies[-1][0] and not version.retired and spoil != "other policy"
            key = f"key-{next(self.serial)}"
            serves = bool(self.model.moves) and self.model.moves[-1][0] == number + 1
            if serves and expected != epoch:
                assert send(key).epoch == epoch
            elif spoil == "stale epoch":
                _refused(EndpointMoved, lambda: send(key))
            elif not (passed and complete and allowed):
                _refused(PromotionRefused, lambda: send(key))
            else:
                answer = send(key)
                assert send(key) == answer
                # Promoted anew, the version before it stays the version before it.
                before = self.model.moves[-1][int(serves)] if self.model.moves else None
                self.model.moves.append((number + 1, before))
                other = lambda: catalog.rollback(self.me, key, ENDPOINT, reason="misuse")  # noqa: E731
                self.acknowledged.append(Acknowledged(answer, lambda: send(key), other))

        @rule(pick=picks)
        def ship_two(self, pick: int) -> None:
            for number in (pick, pick + 1):
                self.promote(number, spoil="", but="", fresh=True, keyed=True)

        @rule(pick=picks, immediate=st.booleans(), fresh=st.booleans())
        def ship_after_a_new_policy(self, pick: int, immediate: bool, fresh: bool) -> None:
            for gate in GATES:
                self.judged(pick % len(self.model.versions), gate, "pass", pick)
            self.policy(immediate, note=100 + len(self.model.policies), keyed=False)
            self.promote(pick, spoil="", but="", fresh=fresh, keyed=True)

        @rule(keyed=keyed, stale=st.sampled_from((False, False, True)))
        def roll_back(self, keyed: bool, stale: bool) -> None:
            epoch = len(self.model.moves)
            name = f"key-{next(self.serial)}"
            key = name if keyed else None
            expected = epoch + 1 if stale else epoch if keyed else None
            send = lambda: catalog.rollback(self.me, key, ENDPOINT, expected_epoch=expected, reason=name)  # noqa: E731
            if not epoch:
                _refused(UnknownEndpoint, send)
            elif stale:
                _refused(EndpointMoved, send)
            elif self.model.moves[-1][1] is None:
                _refused(NothingToRollBack, send)
            else:
                stable, previous = self.model.moves[-1]
                assert previous is not None
                answer = send()
                assert send() == answer
                self.model.moves.append((previous, stable))

        @rule(pick=picks, named=st.sampled_from((0, 1)), seldom=st.integers(0, 3), keyed=keyed)
        def retire(self, pick: int, named: int, seldom: int, keyed: bool) -> None:
            chosen = self.model.moves[-1][named] if self.model.moves and seldom else None
            if chosen is None and seldom:
                return
            number = pick % len(self.model.versions) if chosen is None else chosen - 1
            send = lambda key: catalog.retire_model_version(self.me, key, MODEL, number + 1, "old")  # noqa: E731
            if self.model.moves and number + 1 in self.model.moves[-1]:
                _refused(VersionRefused, lambda: send(f"key-{next(self.serial)}"))
                return
            answer = self.acknowledge(keyed, send, lambda key: catalog.set_budget(self.me, key, "x", "y", "z", 1))
            assert answer.retired
            self.model.versions[number].retired = True

        @rule(pick=picks, wrong=st.booleans())
        def predict(self, pick: int, wrong: bool) -> None:
            if not self.model.moves:
                return
            epoch = pick % len(self.model.moves)
            version, detail = self.model.moves[epoch][0] + wrong, blob("detail")
            answer = PredictionFacts(
                f"p{next(self.serial)}", None, "fresh", digest(1), digest(2), 0.5, "stable", "ok", 1, detail.digest, 0
            )
            batch = PredictionBatch(ENDPOINT, epoch + 1, version, (answer,), (detail,))
            send = lambda: catalog.record_predictions(self.me, None, batch)  # noqa: E731
            if wrong:
                _refused(ImpossiblePrediction, send)
            else:
                assert send() == send() == 1

        @rule(pick=picks)
        def replay(self, pick: int) -> None:
            if self.acknowledged:
                command = self.acknowledged[pick % len(self.acknowledged)]
                assert command.again() == command.answer

        @rule(pick=picks)
        def misuse_key(self, pick: int) -> None:
            if self.acknowledged:
                _refused(IdempotencyConflict, self.acknowledged[pick % len(self.acknowledged)].other)

        @invariant()
        def catalog_equals_model(self) -> None:
            world.steps += 1
            if not hasattr(self, "model"):
                return
            model = self.model
            told = catalog.budget(self.me, BUDGET, MONTH)
            assert told == BudgetState(model.limit, model.reserved, model.committed, UNIT)
            seed = 1 + world.steps % 2
            if seed in model.runs:
                run = catalog.run(self.me, self.run_id(seed))
                seen = [
                    Try(a.state, a.code, a.cancel_reason is not None, a.worker_seconds or 0.0) for a in run.attempts
                ]
                assert [_plain(t) for t in seen] == [_plain(t) for t in model.runs[seed]]
                assert (run.result is not None) == (model.runs[seed][-1].state == "succeeded")
            endpoint = catalog.endpoint(self.me, ENDPOINT)
            assert (endpoint is None) == (not model.moves)
            if endpoint is not None:
                assert (endpoint.stable, endpoint.previous) == model.moves[-1]
                assert endpoint.epoch == len(model.moves)

        def teardown(self) -> None:
            if hasattr(self, "me"):
                findings = check(catalog, self.me, world.store)
                broken = [finding for finding in findings if not finding.ok and finding.name != "stored bytes"]
                assert not broken, broken
                versions = catalog.model_versions(self.me, MODEL)
                assert [v.retired for v in versions] == [v.retired for v in self.model.versions]

        def facts(self, seed: int) -> Any:  # noqa: ANN401
            budget_id = None if seed in DONE else BUDGET
            return run_facts(self.snapshot_id, seed, budget_id=budget_id, max_attempts=MAX_ATTEMPTS)

        def run_id(self, seed: int) -> str:
            return self.facts(seed).run_id(self.me.tenant)

        def asked(self, seed: int, asker: str, retry: bool, send: Callable[[str | None], Any], again: bool) -> None:
            wanted = self.expect(seed, asker, retry)
            key = f"key-{next(self.serial)}"
            if isinstance(wanted, type):
                _refused(wanted, lambda: send(key))
                return
            answer = send(key)
            assert answer.decision == wanted
            tries = self.model.runs.setdefault(seed, [])
            if wanted == "started":
                tries.append(Try())
                self.model.reserved += RESERVE
            assert len(answer.run.attempts) == len(tries)
            if again and tries[-1].is_open:
                # Another ask, under no key of ours: whatever came of the first one is there, and no second one.
                second = send(None)
                assert (second.decision, second.attempt.attempt) == ("adopted", len(tries))
            other = lambda: catalog.set_budget(self.me, key, "x", "y", "z", 1)  # noqa: E731
            self.acknowledged.append(Acknowledged(answer, lambda: send(key), other))

        def expect(self, seed: int, asker: str, retry: bool) -> str | type[Exception]:
            tries = self.model.runs.get(seed, [])
            if tries and tries[-1].is_open:
                return "adopted"
            if tries and tries[-1].state == "succeeded":
                return "up_to_date"
            cancelled = bool(tries) and (tries[-1].state == "cancelled" or tries[-1].cancel)
            if cancelled and asker == "machine":
                return RunCancelled
            if tries and not retry:
                if tries[-1].state == "failed" and tries[-1].code in (64, 65):
                    return RunRefused
                spent = sum(t.state in ("failed", "lost") and t.code in (76, 77, None) for t in tries)
                if not cancelled and spent >= MAX_ATTEMPTS:
                    return AttemptsSpent
            if self.model.reserved + self.model.committed + RESERVE > self.model.limit:
                return BudgetExhausted
            return "started"

        def judged(self, number: int, gate: str, verdict: str, look: int) -> None:
            version = catalog.model_version(self.me, MODEL, number + 1)
            said = judge(catalog, version, gate, verdict, who=self.me, look=look)
            self.model.versions[number].results[gate] = (verdict, len(self.model.policies), said)

        def acknowledge(self, keyed: bool, send: Callable[[str | None], Any], other: Callable[[str], Any]) -> Any:  # noqa: ANN401
            key = f"key-{next(self.serial)}" if keyed else None
            answer = send(key)
            assert send(key) == answer
            if key is not None:
                self.acknowledged.append(Acknowledged(answer, lambda: send(key), lambda: other(key)))
            return answer

    return RegistryMachine


def run(url: str, folder: Path, examples: int, steps: int = 50) -> int:
    """Run the machine; return how many steps it took.

    Raises:
        AssertionError: a step contradicted the model.
    """
    world = World(open_catalog(url, Ticker(now=1_370_100_000_000_000)), LocalStore(folder))
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


def _plain(attempt: Try) -> tuple[str, int | None, bool, float]:
    return (attempt.state, attempt.code, attempt.cancel, attempt.seconds)


def _refused(error: type[Exception], send: Callable[[], object]) -> None:
    try:
        answer = send()
    except error:
        return
    raise AssertionError(f"expected {error.__name__}, got {answer!r}")


if __name__ == "__main__":
    sys.stdout.write(f"{run(sys.argv[1], Path(sys.argv[2]), examples=int(sys.argv[3]))} steps\n")
