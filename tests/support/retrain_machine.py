"""A stateful machine over requests to train again and their budget, against a model of a few dictionaries.

Each example is a tenant of its own. Run as a program (`python -m support.retrain_machine URL FOLDER EXAMPLES`) it exits
0 when no step contradicts the model.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from support.catalog_facts import Ticker
from support.catalog_monitoring import PERIOD, retrain_facts, serve
from support.registry_facts import BUDGET, UNIT

from headway.artifacts.store import LocalStore
from headway.catalog import Principal, open_catalog
from headway.catalog.catalog import Catalog
from headway.catalog.errors import BudgetBelowUse, BudgetExhausted, RetrainMoved, RetrainOpen, RetrainRefused
from headway.catalog.invariants import check
from headway.catalog.run_facts import BudgetState

PIPELINES = ("one", "two")
OPEN_MOVES = {
    "waiting_for_approval": ("ready", "rejected", "expired", "waiting_for_evaluation_window"),
    "waiting_for_evaluation_window": ("ready", "rejected", "expired"),
    "ready": ("running", "rejected", "expired"),
    "running": ("promoted", "kept_old", "failed", "needs_human"),
    "needs_human": ("ready", "rejected"),
}
STATES = (*OPEN_MOVES, "promoted", "kept_old", "failed", "rejected", "expired")
keyed = st.booleans()


@dataclass
class Known:
    """What the model knows of one request."""

    pipeline: str
    state: str
    cost: int
    used: float = 0.0
    epoch: int = 1

    @property
    def is_open(self) -> bool:
        """Whether it may move."""
        return self.state in OPEN_MOVES


@dataclass
class Model:
    """What the catalog must say."""

    requests: dict[str, Known] = field(default_factory=dict)
    limit: int = 1_000
    committed: int = 0

    @property
    def reserved(self) -> int:
        """What open requests hold."""
        return sum(known.cost for known in self.requests.values() if known.is_open)


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

    class RetrainMachine(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.me = Principal(f"tenant-{next(world.tenants)}", "machine")
            self.model = Model()
            self.keys = count()
            serve(catalog, self.me)
            catalog.set_budget(self.me, None, BUDGET, PERIOD, UNIT, self.model.limit)

        @rule(
            pipeline=st.sampled_from(PIPELINES),
            cause=st.integers(1, 4),
            cost=st.sampled_from((0, 100, 400, 700)),
            first=st.sampled_from(("ready", "waiting_for_approval")),
            keyed=keyed,
        )
        def open_request(self, pipeline: str, cause: int, cost: int, first: str, keyed: bool) -> None:
            model = self.model
            facts = retrain_facts(None, cause, pipeline=pipeline, cost_seconds=cost, state=first)
            request_id = facts.request_id(self.me.tenant)
            send = lambda: catalog.open_retrain_request(self.me, self.key(keyed), facts)  # noqa: E731
            known = model.requests.get(request_id)
            if known is None and any(k.is_open and k.pipeline == pipeline for k in model.requests.values()):
                _refused(RetrainOpen, send)
            elif known is None and model.reserved + model.committed + cost > model.limit:
                _refused(BudgetExhausted, send)
            else:
                answer = send()
                known = model.requests.setdefault(request_id, Known(pipeline, first, cost))
                assert (answer.request_id, answer.state, answer.epoch) == (request_id, known.state, known.epoch)

        @rule(
            pick=st.integers(0, 100),
            state=st.sampled_from(STATES) | st.integers(0, 3),
            stale=st.sampled_from((0, 0, 0, 0, -1, 1)),
            used=st.sampled_from((None, 0.0, 10.25, 150.0)),
            keyed=keyed,
        )
        def move(self, pick: int, state: str | int, stale: int, used: float | None, keyed: bool) -> None:
            model = self.model
            # Mostly a request that may still move: the last one opened of a pipeline.
            names = sorted(model.requests, key=lambda name: (not model.requests[name].is_open, name))
            if not names:
                return
            name = names[pick % min(len(names), 3)]
            known = model.requests[name]
            ways = OPEN_MOVES.get(known.state, ())
            to: Any = state if isinstance(state, str) else ways[state % len(ways)] if ways else "ready"
            # Under a key of its own a stale move is no repeat of one that was made.
            key = self.key(keyed or stale != 0)
            more: dict[str, Any] = {"reason": "so", "as_of": "2013-10-01", "cost_seconds": used}
            epoch = known.epoch + stale
            send = lambda: catalog.move_retrain(self.me, key, name, expected_epoch=epoch, state=to, **more)  # noqa: E731
            if stale or to not in ways:
                _refused(RetrainMoved if stale else RetrainRefused, send)
                return
            answer = send()
            assert send() == answer
            known.state, known.epoch = to, known.epoch + 1
            known.used = known.used if used is None else used
            assert (answer.state, answer.epoch) == (to, known.epoch)
            if not known.is_open:
                model.committed += math.ceil(known.used)

        @rule(limit=st.sampled_from((500, 1_000, 3_000)))
        def set_budget(self, limit: int) -> None:
            send = lambda: catalog.set_budget(self.me, self.key(True), BUDGET, PERIOD, UNIT, limit)  # noqa: E731
            if limit < self.model.reserved + self.model.committed and limit != self.model.limit:
                _refused(BudgetBelowUse, send)
                return
            send()
            self.model.limit = limit

        @invariant()
        def same(self) -> None:
            if not hasattr(self, "me"):
                return
            world.steps += 1
            model = self.model
            wanted = BudgetState(model.limit, model.reserved, model.committed, UNIT)
            assert catalog.budget(self.me, BUDGET, PERIOD) == wanted
            found = {one.request_id: (one.state, one.epoch) for one in catalog.retrain_requests(self.me)}
            assert found == {name: (known.state, known.epoch) for name, known in model.requests.items()}

        def teardown(self) -> None:
            if hasattr(self, "me"):
                findings = check(catalog, self.me, world.store)
                broken = [finding for finding in findings if not finding.ok and finding.name != "stored bytes"]
                assert not broken, broken

        def key(self, keyed: bool) -> str | None:
            return f"key-{next(self.keys)}" if keyed else None

    return RetrainMachine


def run(url: str, folder: Path, examples: int, steps: int = 30) -> int:
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


def _refused(error: type[Exception], send: Callable[[], object]) -> None:
    try:
        answer = send()
    except error:
        return
    raise AssertionError(f"expected {error.__name__}, got {answer!r}")


if __name__ == "__main__":
    sys.stdout.write(f"{run(sys.argv[1], Path(sys.argv[2]), examples=int(sys.argv[3]))} steps\n")
