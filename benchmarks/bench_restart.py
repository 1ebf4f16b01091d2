"""`make bench-restart`: from the death of a node or a rank to the first new step, by phase, beside a cold start.

It trains the demo's pipeline on two nodes in a copy of the demo's home, with as many seeds as rounds, on this machine
and on a cluster (the one that HEADWAY_TEST_KUBECONFIG names, else the double that the tests use). When training has
begun and saved, node 1's process, or its rank's, is killed with SIGKILL; whoever follows the run notices, and the next
attempt goes on from the checkpoint. Times are those of the catalog's and the nodes' own events.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

import yaml

from headway.home import Settings, load_settings
from headway.loading import load_pipeline
from headway.replay.home import copy_home
from headway.services import Services, open_services
from headway.training.follow import Follower, follow
from headway.training.launch import Launcher
from headway.training.launchers import launcher_for
from headway.training.plan import Overrides, plan_run
from headway.training.process_table import environment_of, processes
from headway.training.submit import submit
from trainer.events import now_us

PIPELINE, AS_OF = "flight_delay", "2013-04-01"
ROOT = Path(__file__).resolve().parents[1]
NAMESPACE = "headway-bench"
_WAIT_S = 600.0
PROFILES = ("local", "cluster")
Victim = Literal["node", "rank"]
# What an attempt goes through, as its events name it, and what lies between one and the next.
PHASES = ("noticed", "nodes started", "imports", "data", "group", "checkpoint and first step")


@dataclass(frozen=True)
class Start:
    """One start of an attempt: seconds of each of `PHASES`, from the wish or the death to the first step."""

    seconds: tuple[float, ...]

    @property
    def whole(self) -> float:
        """Seconds from end to end."""
        return sum(self.seconds)


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_restart", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs per launcher (default 3)")
    parser.add_argument("--profile", choices=PROFILES, action="append", help="only this launcher (default: both)")
    parser.add_argument("--victim", choices=get_args(Victim), default="node", help="what is killed (default: node)")
    asked = parser.parse_args()
    print_table(measure(asked.rounds, tuple(asked.profile or PROFILES), asked.victim))
    return 0


def measure(rounds: int, profiles: Sequence[str], victim: Victim) -> dict[str, list[tuple[Start, Start]]]:
    """Cold starts and restarts by launcher, one of each per round."""
    source = load_settings()
    with (
        tempfile.TemporaryDirectory(prefix="bench-restart-", dir="/var/tmp") as folder,
        _cluster(Path(folder)) if "cluster" in profiles else nullcontext(Path(folder) / "none") as kubeconfig,
    ):
        home = Path(folder) / "home"
        copy_home(source, home, untrained=True)
        found: dict[str, list[tuple[Start, Start]]] = {}
        for number in range(rounds):
            for profile in profiles:
                settings = _settings(home, profile, kubeconfig)
                seed = 1_000 * (profile == "cluster") + number
                found.setdefault(profile, []).append(_round(settings, seed, victim))
                print(f"round {number + 1} of {rounds}, {profile}: {_line(found[profile][-1])}", flush=True)
    return found


@contextmanager
def _cluster(folder: Path) -> Iterator[Path]:
    """A kubeconfig with the namespace of the benchmark in its cluster."""
    given = os.environ.get("HEADWAY_TEST_KUBECONFIG")
    if given:
        _make_namespace(Path(given))
        yield Path(given)
        return
    kubeconfig = folder / "kubeconfig"
    command = [sys.executable, "-m", "tests.cluster.double", "--kubeconfig", str(kubeconfig)]
    with (folder / "double.log").open("wb") as log:
        double = subprocess.Popen(
            [*command, "--state", str(folder / "double")], stdout=subprocess.PIPE, stderr=log, cwd=ROOT
        )
    try:
        assert double.stdout is not None
        if double.stdout.readline().strip() != b"ready":
            raise SystemExit(f"the double of a cluster did not start: {(folder / 'double.log').read_text()[-2000:]}")
        _make_namespace(kubeconfig)
        yield kubeconfig
    finally:
        double.terminate()
        double.wait(60)


def _make_namespace(kubeconfig: Path) -> None:
    from kubernetes import client, config
    from kubernetes.client.exceptions import ApiException

    api = client.CoreV1Api(config.new_client_from_config(str(kubeconfig)))
    try:
        api.create_namespace({"metadata": {"name": NAMESPACE}}, _preload_content=False)
    except ApiException as error:
        if error.status != 409:
            raise


def _settings(home: Path, profile: str, kubeconfig: Path) -> Settings:
    platform = home / "platform.yaml"
    document = {
        "namespace": NAMESPACE,
        "image": os.environ.get("HEADWAY_TEST_IMAGE", "headway/trainer@sha256:" + "0" * 64),
        "volume": {"host_path": str(home), "mount_path": str(home)},
        "cpu": "1",
        "memory": "4Gi",
        "shared_memory": "256Mi",
    }
    platform.write_text(yaml.safe_dump(document))
    os.environ["KUBECONFIG"] = str(kubeconfig)
    return load_settings({"HEADWAY_HOME": str(home), "HEADWAY_PROFILE": profile, "HEADWAY_PLATFORM": str(platform)})


def _round(settings: Settings, seed: int, victim: Victim) -> tuple[Start, Start]:
    """A cold start, and a restart after the death of node 1 or its rank."""
    with open_services(settings) as services:
        launcher = launcher_for(settings)
        try:
            # Long, and so slow that validation gets better and better: it must neither end nor stop early before it was
            # killed. A rate that is too small changes nothing in the warm-up, which looks like the end of all progress.
            plan = plan_run(services, load_pipeline(PIPELINE), AS_OF, Overrides(seed=seed, epochs=2_000, lr=1e-3))
            asked = now_us()
            run_id = submit(services, launcher, plan, asker="person").run.run_id
            follower = threading.Thread(target=_follow, args=(settings, run_id), daemon=True)
            follower.start()
            for kind in ("checkpoint", "step"):
                _wait_for(services, run_id, 1, (kind,))
            killed = now_us()
            _kill(run_id, 1, 1, victim)
            _wait_for(services, run_id, 2, ("step",))
            starts = _start(services, run_id, 1, asked), _start(services, run_id, 2, killed)
            _end(services, launcher, run_id)
            follower.join(_WAIT_S)
            return starts
        finally:
            launcher.close()


def _follow(settings: Settings, run_id: str) -> None:
    with open_services(settings) as services:
        launcher = launcher_for(settings)
        try:
            follow(services, launcher, run_id, Follower(lambda _: None, lambda _: None))
        finally:
            launcher.close()


def _wait_for(services: Services, run_id: str, attempt: int, kinds: Sequence[str]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while True:
        # The run first: of one that has ended, every event is there.
        run = services.catalog.run(services.principal, run_id)
        if services.catalog.run_events(services.principal, run_id, attempt=attempt, kinds=kinds, limit=1):
            return
        if run.status != "open" or time.monotonic() > deadline:
            ends = "; ".join(f"attempt {a.attempt} {a.state}: {a.reason}" for a in run.attempts)
            raise SystemExit(f"run {run_id} is {run.status}, without {kinds} of attempt {attempt} ({ends})")
        time.sleep(0.05)


def _kill(run_id: str, attempt: int, node: int, victim: Victim) -> None:
    attempt_file = f"{run_id}/attempts/{attempt}/attempt.json"
    for process in processes():
        if _is_node(process.pid, attempt_file, node) if victim == "node" else _is_rank(process.pid, attempt_file, node):
            os.kill(process.pid, signal.SIGKILL)
            return
    raise SystemExit(f"no {victim} {node} of run {run_id} is here: it can only be killed on this machine")


def _is_node(pid: int, attempt_file: str, node: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    named = any(word.endswith(attempt_file.encode()) for word in command)
    return named and b"trainer.node" in command and command[command.index(b"--node-rank") + 1] == str(node).encode()


def _is_rank(pid: int, attempt_file: str, node: int) -> bool:
    environ = environment_of(pid)
    mine = environ.get("TRAINER_ATTEMPT", "").endswith(attempt_file) and environ.get("NODE_RANK") == str(node)
    return mine and "RANK" in environ


def _start(services: Services, run_id: str, attempt: int, since: int) -> Start:
    events = services.catalog.run_events(services.principal, run_id, limit=100_000)
    mine = [event for event in events if event.attempt == attempt]
    created = next(event.at for event in mine if event.kind == "attempt.created")
    started = max(event.at for event in mine if event.kind == "node_start")
    phase = {str(e.data["name"]): e.at for e in reversed(mine) if e.kind == "phase" and e.node == 0}
    step = next(event.at for event in mine if event.kind == "step")
    moments = (since, created, started, phase["data"], phase["group"], phase["train"], step)
    return Start(tuple((b - a) / 1e6 for a, b in pairwise(moments)))


def _end(services: Services, launcher: Launcher, run_id: str) -> None:
    services.catalog.request_cancel(services.principal, None, run_id, "measured")
    deadline = time.monotonic() + _WAIT_S
    while services.catalog.run(services.principal, run_id).status == "open" and time.monotonic() < deadline:
        time.sleep(0.2)
    launcher.kill(run_id, services.catalog.run(services.principal, run_id).last.attempt)


def _line(starts: tuple[Start, Start]) -> str:
    cold, again = starts
    return (
        f"cold start {cold.whole:.1f} s, kill to first new step {again.whole:.1f} s ({again.whole / cold.whole:.2f}x)"
    )


def print_table(found: dict[str, list[tuple[Start, Start]]]) -> None:
    """Print medians by phase as a table in Markdown."""
    print("\n| launcher | start | " + " | ".join(PHASES) + " | whole | restart over cold |")
    print("|---|---|" + "---|" * (len(PHASES) + 2))
    for profile, rounds in found.items():
        ratio = statistics.median(again.whole / cold.whole for cold, again in rounds)
        for index, name in enumerate(("cold", "after kill -9")):
            starts = [pair[index] for pair in rounds]
            phases = [statistics.median(column) for column in zip(*(s.seconds for s in starts), strict=True)]
            cells = " | ".join(f"{seconds:.2f}" for seconds in phases)
            whole = statistics.median(start.whole for start in starts)
            print(f"| {profile} | {name} | {cells} | {whole:.2f} | {f'{ratio:.2f}x' if index else ''} |")


if __name__ == "__main__":
    raise SystemExit(main())
