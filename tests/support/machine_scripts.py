"""Fixed sequences of the state machines' rules: each mutant of a command is met by one of their steps.

Random examples find what nobody thought of, and which of them they find changes with what is drawn. A sequence is there
for what somebody did think of. Run as a program (`python -m support.machine_scripts MACHINE URL FOLDER`) it exits 0
when no step contradicts the model, else it ends with the step that did.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support import catalog_machine, registry_machine, retrain_machine
from support.catalog_facts import Ticker
from support.registry_facts import GATES

from headway.artifacts.store import LocalStore
from headway.catalog import open_catalog

Step = tuple[str, Mapping[str, Any]]

_FLIGHTS: dict[str, Any] = {"dataset": "flights", "partition": "", "keyed": True}
_AGAIN: dict[str, Any] = {"person": True, "retry": False, "again": False}
_PROMOTE: dict[str, Any] = {"spoil": "", "but": "", "fresh": True, "keyed": True}
_OPEN: dict[str, Any] = {"pipeline": "one", "first": "ready", "keyed": True}

DATA: Sequence[Step] = (
    ("deliver", {**_FLIGHTS, "content": 1, "stale": None}),
    ("misuse_key", {"pick": 0}),
    ("rewrite_history", {"name": "dataset_event", "delete": False}),
    ("deliver", {**_FLIGHTS, "content": 2, "stale": None}),
    # The first move of a partition has a check of its own; this one is refused by its epoch.
    ("deliver", {**_FLIGHTS, "content": 3, "stale": -1}),
)

REGISTRY: Sequence[Step] = (
    ("register", {"seed": 12, "kind": "logistic", "lie": True, "keyed": True}),
    ("submit", {**_AGAIN, "seed": 1}),
    # One attempt holds its reservation: what is left is too little for another.
    ("submit_with_too_little_left", {"seed": 2}),
    ("read_events", {"seed": 1, "node": 0, "first": 2, "size": 1}),
    ("finish", {"seed": 1, "ending": "succeeded", "seconds": 9.5, "keyed": True}),
    ("finish_stale", {"seed": 1, "pick": 0, "wrong_token": False, "ending": "hung"}),
    ("set_budget", {"left": registry_machine.LIMIT}),
    # Cancelled and lost: the attempt ended in another way than by the wish.
    ("submit", {**_AGAIN, "seed": 2}),
    ("cancel", {"seed": 2, "keyed": True}),
    ("finish", {"seed": 2, "ending": "lost", "seconds": 9.5, "keyed": True}),
    ("submit", {**_AGAIN, "seed": 2, "person": False}),
    # One loss counts and a preemption does not, so there is an attempt left.
    ("submit", {**_AGAIN, "seed": 2}),
    ("finish", {"seed": 2, "ending": "preempted", "seconds": 9.5, "keyed": True}),
    ("submit", {**_AGAIN, "seed": 2}),
    ("promote", {**_PROMOTE, "pick": 0, "but": GATES[0]}),
    ("ship_after_a_new_policy", {"pick": 0, "immediate": False, "fresh": True}),
    ("ship_after_a_new_policy", {"pick": 0, "immediate": True, "fresh": False}),
    ("ship_two", {"pick": 0}),
    ("promote", {**_PROMOTE, "pick": 0, "spoil": "stale epoch"}),
    ("predict", {"pick": 0, "wrong": True}),
    ("roll_back", {"keyed": False, "stale": False}),
    ("retire", {"pick": 0, "named": 1, "seldom": 1, "keyed": True}),
)

RETRAIN: Sequence[Step] = (
    ("open_request", {**_OPEN, "cause": 1, "cost": 400}),
    ("move", {"pick": 0, "state": "rejected", "stale": 0, "used": None, "keyed": True}),
    ("open_request", {**_OPEN, "cause": 2, "cost": 100}),
    ("open_request", {**_OPEN, "cause": 3, "cost": 100}),
    ("move", {"pick": 0, "state": "running", "stale": 1, "used": None, "keyed": True}),
)

# A world, a machine over it, the invariants that hold after each step, and the steps.
SCRIPTS: Mapping[str, tuple[Any, Sequence[str], Sequence[Step], int]] = {
    "data": (catalog_machine, ("catalog_equals_model", "snapshots_equal_model"), DATA, 0),
    "registry": (registry_machine, ("catalog_equals_model",), REGISTRY, 1_370_100_000_000_000),
    "retrain": (retrain_machine, ("same",), RETRAIN, 0),
}


class StepFailed(Exception):
    """A step that contradicted the model; its cause says how."""


def play(name: str, url: str, folder: Path) -> int:
    """Play a machine's sequence; return how many steps it has.

    Raises:
        StepFailed: names the step.
    """
    module, invariants, steps, now = SCRIPTS[name]
    world = module.World(open_catalog(url, Ticker(now=now) if now else Ticker()), LocalStore(folder))
    try:
        state = module.machine(world)()
        # What an invariant looks at changes with the number of steps taken; three in a row look at everything.
        looks: list[Step] = [(look, {}) for look in invariants] * 3
        for step, arguments in (("begin", {}), *steps):
            for called, given in ((step, arguments), *looks):
                _call(state, called, given)
        _call(state, "teardown", {})
    finally:
        world.catalog.close()
    return len(steps)


def _call(state: Any, step: str, arguments: Mapping[str, Any]) -> None:  # noqa: ANN401 - one of three machines
    try:
        getattr(state, step)(**arguments)
    except Exception as error:
        told = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise StepFailed(f"state.{step}({told})") from error


if __name__ == "__main__":
    sys.stdout.write(f"{play(sys.argv[1], sys.argv[2], Path(sys.argv[3]))} steps\n")
