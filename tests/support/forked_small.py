"""Ranks forked from one parent that has imported torch and nothing else has run in: `python forked_small.py`.

The parent reads one JSON line per case from its input, `{"case": ..., "world": n, "options": {...}}`, and answers with
one line: the JSON of what `parallel_cases.CASES[case](rank, world, options)` returned on each rank, or the error.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeAlias

Case: TypeAlias = Callable[[int, int, dict[str, Any]], Any]

WAIT_S = 240.0
_PR_SET_PDEATHSIG = 1


class Forks:
    """The parent process, from the side of the tests."""

    def __init__(self) -> None:
        tree = Path(__file__).parents[2]
        self._parent = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{tree}:{tree / 'tests'}", "OMP_NUM_THREADS": "1"},
        )

    def run(self, case: str, world: int, **options: object) -> list[Any]:
        stdin, stdout = self._parent.stdin, self._parent.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"case": case, "world": world, "options": options}) + "\n")
        stdin.flush()
        answer = json.loads(stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["results"]

    def close(self) -> None:
        self._parent.communicate(timeout=WAIT_S)


def serve() -> None:
    """Import, then fork the ranks of each case."""
    from support.parallel_cases import CASES

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"results": fork_ranks(CASES[asked["case"]], asked["world"], asked["options"])}
        except Exception:  # noqa: BLE001 - the tests raise it
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=out, flush=True)


def fork_ranks(function: Case, world: int, options: dict[str, Any]) -> list[Any]:
    """What `function(rank, world, options)` returns on each of `world` ranks that share a gloo group."""
    with tempfile.TemporaryDirectory(prefix="forked-small-") as folder:
        pipes = [os.pipe() for _ in range(world)]
        children = [_fork(function, rank, world, options, folder, pipes[rank][1]) for rank in range(world)]
        for _, end in pipes:
            os.close(end)
        try:
            return _collect([os.fdopen(start, "rb") for start, _ in pipes])
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _fork(function: Case, rank: int, world: int, options: dict[str, Any], folder: str, end: int) -> int:
    child = os.fork()
    if child:
        return child
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        answer = {"value": function(rank, world, options)}
    except BaseException:  # noqa: BLE001 - the parent raises it
        answer = {"error": traceback.format_exc()}
    with os.fdopen(end, "wb") as pipe:
        pipe.write(json.dumps(answer).encode() + b"\n")
    # Until the parent has heard all ranks: an early end would look like a lost peer to the others.
    time.sleep(WAIT_S)
    os._exit(0)


def _collect(pipes: list[IO[bytes]]) -> list[Any]:
    heard: dict[int, bytes] = {pipe.fileno(): b"" for pipe in pipes}
    order, waiting, until = list(heard), set(heard), time.monotonic() + WAIT_S
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, until - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {[order.index(fd) for fd in waiting]} did not answer within {WAIT_S} s")
        for fd in ready:
            more = os.read(fd, 1 << 16)
            heard[fd] += more
            # No end of file: the ranks hold each other's pipes.
            if not more or more.endswith(b"\n"):
                waiting.discard(fd)
                answer = json.loads(heard[fd] or b'{"error": "the rank died without a word"}')
                if "error" in answer:
                    raise RuntimeError(f"rank {order.index(fd)}: {answer['error']}")
    for pipe in pipes:
        pipe.close()
    return [json.loads(heard[fd])["value"] for fd in order]


if __name__ == "__main__":
    serve()
