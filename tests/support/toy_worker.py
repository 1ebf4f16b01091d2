"""A worker without torch: a double at the boundary of user code, named by `AttemptSpec.worker`.

It keeps the worker's side of the protocol (heartbeats, events, signals, error file, exit codes), steps in lockstep with
its peers over the store's port when told to, and misbehaves as the environment variable TOY says:
`{"steps": 5, "step_s": 0.01, "group": false, "ranks": {"1": {"at": 2, "do": "exit", "code": 65}}}`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from trainer.events import EventSink, node_folder

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TOY: dict[str, Any] = json.loads(os.environ.get("TOY", "{}"))
MINE: dict[str, Any] = TOY.get("ranks", {}).get(str(RANK), {})
NAME = f"{os.environ['HEADWAY_ATTEMPT']}\n".encode()


class PeerLost(Exception):
    """A peer closed its connection."""


class Group:
    """Ranks that step together: rank 0 hears every peer, then tells all whether to stop."""

    def __init__(self) -> None:
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.peers: list[socket.socket] = []
        if RANK == 0:
            with socket.socket(fileno=int(os.environ["TRAINER_STORE_FD"])) as listener:
                while len(self.peers) < WORLD - 1:
                    peer, _ = listener.accept()
                    if peer.recv(len(NAME)) == NAME:
                        self.peers.append(peer)
                    else:
                        peer.close()
        else:
            self.peers.append(socket.create_connection(address))
            self.peers[0].sendall(NAME)

    def step(self, stop: bool) -> bool:
        """Meet the peers; whether any of all wants to stop."""
        if RANK != 0:
            self.say(self.peers[0], stop)
            return self.hear(self.peers[0])
        stop = any([stop, *(self.hear(peer) for peer in self.peers)])
        for peer in self.peers:
            self.say(peer, stop)
        return stop

    def say(self, peer: socket.socket, stop: bool) -> None:
        try:
            peer.sendall(b"x" if stop else b".")
        except OSError as error:
            raise PeerLost from error

    def hear(self, peer: socket.socket) -> bool:
        try:
            heard = peer.recv(1)
        except OSError as error:
            raise PeerLost from error
        if not heard:
            raise PeerLost
        return heard == b"x"


def error_file() -> Path:
    """Where this rank tells of its failure."""
    folder = node_folder(Path(os.environ["TRAINER_ATTEMPT"]), int(os.environ["NODE_RANK"]))
    return folder / f"rank-{RANK}.error.json"


def fail(sink: EventSink, code: int, message: str) -> None:
    """Leave an error file, tell it as TOY says, and go."""
    error = {"kind": "ToyError", "message": message, "stack": "toy stack", "code": code}
    error_file().write_text(json.dumps(error))
    if MINE.get("tells"):
        sink.emit("error", {"rank": RANK, **{key: error[key] for key in ("kind", "message", "stack")}})
    sys.exit(code)


def misbehave(sink: EventSink) -> None:
    """Do what TOY asks of this rank now."""
    match MINE["do"]:
        case "exit":
            fail(sink, MINE["code"], MINE.get("words", f"told to exit with {MINE['code']}"))
        case "spoil":
            error_file().write_bytes(bytes.fromhex(MINE["hex"]))
            sys.exit(65)
        case "checkpoint":
            sink.emit("checkpoint", {"step": 1, "kind": "last", "manifest": "sha256:0", "path": "checkpoints/1"})
        case "shout":
            for _ in range(MINE["mebibytes"]):
                os.write(1, b"x" * 1_048_575 + b"\n")
            print("the last words", flush=True)
        case "raise":
            raise RuntimeError("told to raise")
        case "hang":
            print("hanging", flush=True)
            time.sleep(600)
        case "quiet":
            time.sleep(MINE["seconds"])
        case "slow":
            sink.emit("phase", {"name": "save", "may_take_s": 60.0})
            time.sleep(MINE["seconds"])
            sink.emit("phase", {"name": "train", "may_take_s": None})
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "unhandled":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        case "garbage":
            os.write(int(os.environ["TRAINER_EVENT_FD"]), b"no event\n")
        case "grandchild":
            # In a session of its own, so that no signal to a process group finds it.
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            sink.emit("metrics", {"grandchild": child.pid, "rank": RANK})
        case "flood":
            for number in range(MINE["events"]):
                sink.emit("metrics", {"number": number})
        case other:
            raise ValueError(other)


def main() -> None:
    """Step until done, stopped or broken."""
    if MINE.get("do") == "never_begin":
        time.sleep(600)
    wishes: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda got, _: wishes.append(got))
    sink = EventSink.from_environment()
    sink.emit("phase", {"name": "train", "may_take_s": None})
    sink.emit("metrics", {"rank": RANK, "pid": os.getpid(), "secret": os.environ.get("HEADWAY_DATABASE_URL")})
    group = Group() if TOY.get("group") and WORLD > 1 else None
    for step in range(1, TOY.get("steps", 5) + 1):
        if step == MINE.get("at"):
            misbehave(sink)
        time.sleep(TOY.get("step_s", 0.01))
        try:
            stop = group.step(bool(wishes)) if group else bool(wishes)
        except PeerLost:
            fail(sink, 77, "connection reset by peer")
            return
        sink.beat()
        if RANK == 0:
            sink.emit("step", {"step": step, "loss": 1.0 / step})
        if stop:
            sink.emit("metrics", {"rank": RANK, "saved": step})
            sys.exit(75)
    sink.emit("phase", {"name": "done", "may_take_s": None})


if __name__ == "__main__":
    main()
