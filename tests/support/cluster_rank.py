"""Stands in for `trainer.worker` in the cluster's contract suite: a rank without torch whose peers are in other pods.

A double at the boundary of the user's torch code. Ranks step in lockstep over the network of their pods, save the step
that they have reached, and go on from it in a later attempt. What else they do says `orders.json`, in the run's folder,
which is read again at each step:

`{"steps": 20, "step_s": 0.02, "hold": false, "every": 5, "ranks": {"1": {"at": 3, "do": "exit", "code": 65}}}`

An order of a rank may name the `attempts` that it holds for; without, it holds for all.
"""

import json
import mmap
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.blobs import Manifest, ManifestEntry, digest_bytes
from trainer.events import EventSink, node_folder
from trainer.spec import AttemptSpec, RunSpec, parse_attempt, parse_run

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
NAME = f"{os.environ['HEADWAY_ATTEMPT']}\n".encode()
MEET_S = 120.0
GO_ON, DONE, STOP = 0, 1, 2
WORD = struct.Struct("!I")
DEFAULTS: dict[str, Any] = {"steps": 6, "step_s": 0.03, "hold": False, "every": 3, "ranks": {}}


class PeerLost(Exception):
    """A peer closed its connection, or never came."""


class Orders:
    """What the test wants of the ranks of a run, as it stands now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = -1
        self._orders = DEFAULTS

    def now(self) -> Mapping[str, Any]:
        """The orders in force."""
        try:
            stamp = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return self._orders
        if stamp != self._stamp:
            self._orders = {**DEFAULTS, **json.loads(self._path.read_text())}
            self._stamp = stamp
        return self._orders

    def mine(self, attempt: int, step: int) -> Mapping[str, Any]:
        """What this rank is told to do at this step; empty when it is nothing."""
        order = self.now()["ranks"].get(str(RANK), {})
        if not order or attempt not in order.get("attempts", [attempt]) or step < order.get("at", 1):
            return {}
        return order


class Group:
    """Ranks that step together: rank 0 hears every peer, then tells all whether to stop and which step is next."""

    def __init__(self) -> None:
        self._peers: list[socket.socket] = []
        if WORLD == 1:
            return
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if RANK == 0:
            self._welcome(address[1])
        else:
            self._peers.append(_joined(address))

    def _welcome(self, port: int) -> None:
        with socket.create_server(("0.0.0.0", port)) as listener:
            listener.settimeout(MEET_S)
            while len(self._peers) < WORLD - 1:
                try:
                    peer, _ = listener.accept()
                except TimeoutError as error:
                    raise PeerLost from error
                if peer.recv(len(NAME)) == NAME:
                    peer.settimeout(None)
                    self._peers.append(peer)
                else:
                    peer.close()

    def meet(self, number: int) -> int:
        """Say a number to rank 0, which takes the greatest of all; hear what it decided."""
        try:
            if RANK != 0:
                self._peers[0].sendall(WORD.pack(number))
                return _heard(self._peers[0])
            decided = max([number, *(_heard(peer) for peer in self._peers)])
            for peer in self._peers:
                peer.sendall(WORD.pack(decided))
        except OSError as error:
            raise PeerLost from error
        return decided


def _joined(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + MEET_S
    while True:
        try:
            peer = socket.create_connection(address, timeout=5)
        except OSError as error:
            # The name of a pod that has just started is not known everywhere yet.
            if time.monotonic() > deadline:
                raise PeerLost from error
            time.sleep(0.05)
        else:
            peer.settimeout(None)
            peer.sendall(NAME)
            return peer


def _heard(peer: socket.socket) -> int:
    heard = peer.recv(WORD.size, socket.MSG_WAITALL)
    if len(heard) < WORD.size:
        raise PeerLost
    return WORD.unpack(heard)[0]


def obey(order: Mapping[str, Any]) -> None:
    """Do what the test wants of this rank."""
    match order.get("do"):
        case None | "linger":
            return
        case "exit":
            fail(order["code"], f"told to exit with {order['code']}")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "flood":
            # The node's log of what a rank prints lies beside its stream.
            for _ in range(64):
                print("x" * 1023, flush=True)
        case "wait":
            time.sleep(600)
        case "eat":
            hoard = bytearray()
            while True:
                hoard += bytes(1 << 20)
        case "fill_shm":
            with Path("/dev/shm/batch").open("w+b") as file:
                file.truncate(order["mebibytes"] << 20)
                batch = mmap.mmap(file.fileno(), 0)
                for page in range(0, len(batch), mmap.PAGESIZE):
                    batch[page] = 1
        case "sleep":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        case other:
            raise ValueError(other)


def fail(code: int, message: str) -> None:
    """Leave an error file and go."""
    folder = node_folder(Path(os.environ["TRAINER_ATTEMPT"]), int(os.environ["NODE_RANK"]))
    error = {"kind": "ToyError", "message": message, "stack": "toy stack", "code": code}
    (folder / f"rank-{RANK}.error.json").write_text(json.dumps(error))
    sys.exit(code)


def saved_step(run_dir: Path) -> int:
    """The newest step that an attempt of this run has saved; 0 when there is none."""
    return max((int(path.stem) for path in (run_dir / "checkpoints").glob("*.step")), default=0)


def save(sink: EventSink, run_dir: Path, step: int, attempt: AttemptSpec) -> None:
    """Rank 0 saves the step that all have reached."""
    if RANK != 0:
        return
    folder = run_dir / "checkpoints"
    temporary = folder / f".{step}.{attempt.attempt}"
    temporary.write_text(str(attempt.token))
    temporary.replace(folder / f"{step}.step")
    digest = digest_bytes(str(step).encode())
    sink.emit("checkpoint", {"step": step, "kind": "last", "manifest": digest, "path": f"checkpoints/{step}.step"})


def train(sink: EventSink, attempt: AttemptSpec, run_dir: Path) -> bool:
    """Step until done; False when the group agreed to stop."""
    wishes: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda got, _: wishes.append(got))
    orders = Orders(run_dir / "orders.json")
    group = Group()
    step = group.meet(saved_step(run_dir))
    if RANK == 0:
        sink.emit("metrics", {"resumed_from": step})
    decided = group.meet(_wish(orders, wishes, step))
    while decided != DONE:
        now = orders.now()
        step += 1
        print(f"rank {RANK} step {step}", flush=True)
        obey(orders.mine(attempt.attempt, step))
        time.sleep(now["step_s"])
        decided = group.meet(_wish(orders, wishes, step))
        stop = decided == STOP
        sink.beat()
        if RANK == 0:
            sink.emit("step", {"step": step, "epoch": 1, "loss": 1.0 / step})
        if stop or step % now["every"] == 0:
            save(sink, run_dir, step, attempt)
        if stop:
            return False
    return True


def _wish(orders: Orders, wishes: list[int], step: int) -> int:
    """What this rank wants after `step`. Rank 0 alone says when all are done: orders are read at different moments."""
    if wishes:
        return STOP
    now = orders.now()
    return DONE if RANK == 0 and step >= now["steps"] and not now["hold"] else GO_ON


def finish(sink: EventSink, folder: Path, run: RunSpec, run_id: str) -> None:
    """Leave the artifact, the same whichever attempt makes it."""
    target = folder / "artifact" / "network"
    target.mkdir(parents=True)
    data = json.dumps({"weights": run.seed, "run": run_id}).encode()
    (target / "weights.safetensors").write_bytes(data)
    manifest = Manifest((ManifestEntry("weights.safetensors", len(data), digest_bytes(data)),), {"kind": "network"})
    (target / "manifest.json").write_bytes(manifest.canonical())
    sink.emit("metrics", {"valid_loss": 0.6})
    sink.emit("artifact", {"name": "network", "manifest": manifest.digest, "path": str(target)})


def main() -> int:
    """Run one rank; its exit code."""
    attempt_file = Path(os.environ["TRAINER_ATTEMPT"])
    attempt = parse_attempt(attempt_file.read_bytes())
    run_dir = Path(attempt.run_dir)
    run = parse_run((run_dir / "spec.json").read_bytes())
    sink = EventSink.from_environment()
    sink.emit("phase", {"name": "train", "may_take_s": None})
    try:
        if not train(sink, attempt, run_dir):
            return 75
    except PeerLost:
        fail(77, "connection reset by peer")
    if RANK == 0:
        linger(sink, Orders(run_dir / "orders.json"))
        finish(sink, attempt_file.parent, run, attempt.run_id)
    return 0


def linger(sink: EventSink, orders: Orders) -> None:
    """Work on alone for as long as the orders say so, after the peers are done."""
    while orders.now()["ranks"].get("0", {}).get("do") == "linger":
        sink.beat()
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
