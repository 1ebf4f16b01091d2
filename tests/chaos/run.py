"""`make chaos SEED=n STEPS=200`: one seed to its verdict. The same seed and steps deal the same blows."""

import argparse
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chaos.processes import disk_full, kill, of_home, stop_for
from chaos.schedule import Fault, Step, schedule
from chaos.verdict import problems, settle
from chaos.workload import Workload, held_file
from chaos.world import NOW, World, chaos_world, until
from support.postgres import running_postgres
from support.retrain_bench import instant

from headway.world import move_clock, replayed_time

_SEEN_S = 180.0
_HOUR_US = 3_600_000_000
Say = Callable[[str], None]


def run_seed(workload: Workload, seed: int, steps: int, say: Say) -> Counter[str]:
    """Do the steps of a seed, let everything settle, and judge; return which faults hit something.

    Raises:
        AssertionError: names the seed, the steps, and what is wrong.
    """
    dealt = schedule(seed, steps)
    hits: Counter[str] = Counter()
    told = [f"chaos seed {seed}, {steps} steps"]
    try:
        for step in dealt:
            hit = _step(workload, seed, step)
            hits[f"{step.fault.how} {step.fault.victim}"] += hit
            told.append(step.line() + ("" if hit else " (missed)"))
            say(told[-1])
        settle(workload)
        wrong = problems(workload)
    except AssertionError as error:
        told.append(f"it did not heal: {error}")
        raise AssertionError("\n".join(told)) from error
    finally:
        held_file(workload.world).unlink(missing_ok=True)
    if wrong:
        raise AssertionError("\n".join([*told, *wrong]))
    say(f"seed {seed}: {sum(hits.values())} of {steps} blows hit ({_sum(hits)}); nothing lost, doubled or left over")
    return hits


def _sum(hits: Counter[str]) -> str:
    return ", ".join(f"{n} x {name}" for name, n in sorted(hits.items()) if n)


def _step(workload: Workload, seed: int, step: Step) -> bool:
    """The command in a thread, the blow beside it; both are over when this returns."""
    world, hold = workload.world, held_file(workload.world)
    world.keep()
    # Dagster does not notice that a run's process was killed, and two such runs would fill its queue for good.
    workload.in_flight()
    if step.operation == "train":
        hold.touch()
    with ThreadPoolExecutor(1) as beside:
        command = beside.submit(workload.perform, seed, step)
        # A training is hit while its ranks are there, not while Dagster still thinks about it.
        seen = step.operation != "train" or _seen(world, "rank")
        hit = seen and _hit(world, step.fault)
        hold.unlink(missing_ok=True)
        while not command.done():
            world.keep()
            time.sleep(0.5)
        command.result()
    return hit


def _hit(world: World, fault: Fault) -> bool:
    """Deal a blow once its victim is seen; whether there was one."""
    if fault.victim not in world.services and not _seen(world, fault.victim):
        return False
    time.sleep(fault.after_s)
    pids = world.victims(fault.victim)
    if fault.how == "kill":
        hit = kill(pids[:1])
        if hit and fault.victim in world.services:
            world.services[fault.victim].wait()
            time.sleep(fault.lasts_s)
        return hit
    if fault.how == "stop":
        return stop_for(pids, fault.lasts_s)
    if fault.how == "disk_full":
        with disk_full(pids[0]):
            time.sleep(fault.lasts_s)
        return True
    file = world.bench.settings.clock_file
    move_clock(file, (replayed_time(file) or instant(NOW)) + round(fault.lasts_s * _HOUR_US))
    return True


def _seen(world: World, victim: str) -> bool:
    try:
        until(lambda: world.victims(victim), _SEEN_S)
    except AssertionError:
        return False
    return True


def main() -> int:
    """Run one seed in a world of its own; 0 when nothing was lost, doubled or left over."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(1))
    say: Say = lambda line: print(line, flush=True)  # noqa: E731
    say(f"again: make chaos SEED={arguments.seed} STEPS={arguments.steps}")
    with tempfile.TemporaryDirectory(prefix="headway-chaos-") as folder, running_postgres() as postgres:
        try:
            with chaos_world(Path(folder), postgres) as world:
                run_seed(Workload(world), arguments.seed, arguments.steps, say)
            until(lambda: not of_home(Path(folder) / "home"))
        except AssertionError as error:
            say(str(error))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
