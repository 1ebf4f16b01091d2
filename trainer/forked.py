"""Ranks forked from one parent that has torch imported: a start costs milliseconds instead of seconds.

The parent never runs autograd, collectives or threads: what a child inherits of those does not work. `fork_ranks` is
for a process that is such a parent itself. `Warm` starts one from a process that has no torch, and asks it to call
functions by name. Each rank leads a process group of its own, dies with the parent, and has ended when `fork_ranks`
returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

WAIT_S = 300.0
GROUP_TIMEOUT_S = 120.0
_PR_SET_PDEATHSIG = 1
_SETTLE_S = 0.5

RankFunction: TypeAlias = Callable[..., Any]
"""Called as `function(group, **arguments)` on each rank, with its `trainer.process_group.Group`; answers JSON."""


class RankFailed(RuntimeError):
    """A rank raised or died; the message has its number and its traceback, or how it died."""


class RanksLate(RuntimeError):
    """Ranks did not answer within the deadline, and were killed; the message names them."""


class CallFailed(RuntimeError):
    """A function that a warmed parent was asked to call raised; the message has its traceback."""


def fork_ranks(
    function: RankFunction, world: int, arguments: Mapping[str, Any], *, deadline_s: float = WAIT_S
) -> list[Any]:
    """What `function(group, **arguments)` answers on each of `world` ranks that share a gloo group, in rank order.

    Raises:
        RankFailed: the first rank that raised or died; the others are killed.
        RanksLate: ranks did not answer within `deadline_s`; all are killed.
    """
    ranks: list[tuple[int, int]] = []
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        try:
            for rank in range(world):
                start, end = os.pipe()
                child = _fork(function, rank, world, arguments, meeting, end, [s for _, s in ranks])
                os.close(end)
                ranks.append((child, start))
            return _collect(ranks, time.monotonic() + deadline_s)
        finally:
            for child, start in ranks:
                os.close(start)
                # Its group may not be made yet; the rank itself is there until it is waited for.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def run_ranks(function: str, world: int, arguments: Mapping[str, Any], deadline_s: float = WAIT_S) -> list[Any]:
    """`fork_ranks` of a function by name, "module:function"; to be called through `Warm`."""
    return fork_ranks(_named(function), world, arguments, deadline_s=deadline_s)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when process `parent`, which started it, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class Warm:
    """A parent process with `modules` imported, for callers that have no torch.

    Args:
        modules: What it imports before it takes calls; torch is among what they import.
        path: Folders beside this tree that it imports from.
    """

    def __init__(self, modules: Sequence[str], path: Sequence[Path] = ()) -> None:
        tree = Path(__file__).parents[1]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainer.forked", str(os.getpid()), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, (tree, *path))),
                "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu",
            },
        )

    def call(self, function: str, /, **arguments: object) -> Any:  # noqa: ANN401 - any JSON
        """What "module:function" answers to keyword `arguments` in the parent; both are JSON.

        Raises:
            CallFailed: it raised, or the parent ended.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        request = {"function": function, "arguments": arguments}
        stdin.write(json.dumps(request).encode() + b"\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise CallFailed(f"the warmed parent ended with {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise CallFailed(answer["error"])
        return answer["value"]

    def close(self) -> None:
        """End the parent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def _fork(
    function: RankFunction,
    rank: int,
    world: int,
    arguments: Mapping[str, Any],
    meeting: socket.socket,
    end: int,
    others: Sequence[int],
) -> int:
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    # A rank that came back from here would go on as a second parent.
    try:
        os.setpgid(0, 0)
        die_with_parent(parent)
        for start in others:
            os.close(start)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        answer = {"value": _run(function, rank, world, arguments, meeting)}
    except BaseException:  # noqa: BLE001 - it goes to the parent, which raises it
        answer = {"error": traceback.format_exc()}
    _answer(end, answer)


def _run(function: RankFunction, rank: int, world: int, arguments: Mapping[str, Any], meeting: socket.socket) -> object:
    import torch

    from trainer.process_group import Identity, join

    torch.set_num_threads(1)
    host, port = meeting.getsockname()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    environ = dict(os.environ)
    if rank == 0:
        # The store closes what it is given.
        environ["TRAINER_STORE_FD"] = str(os.dup(meeting.fileno()))
    meeting.close()
    group = join(environ, Identity(f"forked-{port}", 1, 1, ""), timeout_s=GROUP_TIMEOUT_S)
    return function(group, **arguments)


def _answer(end: int, answer: Mapping[str, object]) -> NoReturn:
    try:
        text = json.dumps(answer)
    except (TypeError, ValueError):
        text = json.dumps({"error": traceback.format_exc()})
    with os.fdopen(end, "wb", closefd=False) as pipe:
        pipe.write(text.encode() + b"\n")
    # An early end would look like a lost peer to the others: the parent ends it when it has heard all.
    while True:
        signal.pause()


def _collect(ranks: Sequence[tuple[int, int]], until: float) -> list[Any]:
    heard = {start: b"" for _, start in ranks}
    waiting = set(heard)
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, until - time.monotonic()))
        if not ready:
            late = [rank for rank, (_, start) in enumerate(ranks) if start in waiting]
            raise RanksLate(f"ranks {late} of {len(ranks)} did not answer in time")
        for start in ready:
            more = os.read(start, 1 << 16)
            heard[start] += more
            if not more or more.endswith(b"\n"):
                waiting.discard(start)
            if not more or (more.endswith(b"\n") and heard[start].startswith(b'{"error"')):
                raise _failure(ranks, heard, start)
    return [json.loads(heard[start])["value"] for _, start in ranks]


def _failure(ranks: Sequence[tuple[int, int]], heard: Mapping[int, bytes], first: int) -> RankFailed:
    """The cause: a rank that died without a word before one that raised, which its death may have made."""
    until = time.monotonic() + _SETTLE_S
    while time.monotonic() < until:
        for rank, (child, _) in enumerate(ranks):
            ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                how = "was killed by signal" if ended.si_code != os.CLD_EXITED else "ended with"
                return RankFailed(f"rank {rank} of {len(ranks)} {how} {ended.si_status}")
        time.sleep(0.02)
    rank = [start for _, start in ranks].index(first)
    return RankFailed(f"rank {rank} of {len(ranks)}: {json.loads(heard[first])['error']}")


def _named(function: str) -> RankFunction:
    module, _, name = function.partition(":")
    found: RankFunction = getattr(importlib.import_module(module), name)
    return found


def _serve(parent: int, modules: Sequence[str]) -> None:
    """Import, then answer one JSON line per call, until the input ends."""
    die_with_parent(parent)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = json.dumps({"value": _named(request["function"])(**request["arguments"])})
        except Exception:  # noqa: BLE001 - it goes to the caller, which raises it
            answer = json.dumps({"error": traceback.format_exc()})
        out.write(answer.encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2:])
