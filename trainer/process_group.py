"""How the ranks of one attempt find each other, agree, and notice that one of them is gone.

Ranks meet in a TCPStore. Every key of an attempt lies under a prefix of its own, and before a rank takes part it
compares its identity (run, attempt, token, run spec, torch version) with that of rank 0: a rank of another attempt is
refused. What the ranks have to agree on beside the training step itself goes through the store with a deadline: a
collective waits as long as its group's timeout for a peer that is stopped, the store does not.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    distributed_c10d,
)

from trainer.blobs import Json, canonical_json

Keep: TypeAlias = Callable[[], None]
"""Called while waiting; it may raise to give up."""

_IDENTITY = "headway/identity"
_POLL_FIRST_S, _POLL_MOST_S = 0.001, 0.05
_CONNECT_TRY_S = 0.5


class PeerLost(RuntimeError):
    """Another rank is gone, stopped or too slow: a collective failed or a deadline passed."""


class WrongAttempt(PeerLost):
    """This rank met the ranks of another attempt, or its place is taken; it takes no part."""


@dataclass(frozen=True)
class Identity:
    """What all ranks of a group must have in common."""

    run_id: str
    attempt: int
    token: int
    spec: str
    torch: str = torch.__version__


class Group:
    """The ranks of one attempt, joined.

    `store` holds this attempt's keys only; `timeout_s` is the deadline of agreements that state none.
    """

    def __init__(self, rank: int, world_size: int, store: Store, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._timeout_s = timeout_s

    def agree(
        self, name: str, mine: Json, judge: Callable[[list[Json]], Json], *, deadline_s: float | None = None
    ) -> Json:
        """Give `mine` to rank 0, which answers all ranks with `judge(values in rank order)`. `name` is used once.

        When this returns, every rank has arrived.

        Raises:
            PeerLost: a rank did not arrive within `deadline_s` (default: the group's timeout); the message names it.
        """
        until = time.monotonic() + (self._timeout_s if deadline_s is None else deadline_s)
        with peers():
            if self.rank != 0:
                self._put(f"{name}/{self.rank}", mine)
                return self._take(f"{name}/answer", until, f"rank 0 about {name!r}")
            others = [self._take(f"{name}/{r}", until, f"rank {r} at {name!r}") for r in range(1, self.world_size)]
        answer = judge([mine, *others])
        with peers():
            self._put(f"{name}/answer", answer)
        return answer

    def post(self, name: str, mine: Json) -> None:
        """Leave `mine` for whoever looks, in the place of what this rank left under `name` before; nobody waits."""
        with peers():
            self._put(f"{name}/{self.rank}", mine)

    def posted(self, name: str) -> list[Json] | None:
        """What each rank left newest under `name`, in rank order; None while one has not left anything yet."""
        keys = [f"{name}/{r}" for r in range(self.world_size)]
        with peers():
            return [json.loads(value) for value in self._store.multi_get(keys)] if self._store.check(keys) else None

    def stop_step(self, step: int, reason: str | None) -> tuple[int, str] | None:
        """The step after which all ranks stop, and why; None while nobody asked. Call it after every step.

        The first rank with a `reason` proposes the next step. No rank can be further: it takes all ranks to finish a
        step, so each one finds the proposal in the store when it arrives there.
        """
        with peers():
            if reason is not None:
                self._store.compare_set("stop", "", canonical_json([step + 1, reason]).decode())
            if not self._store.check(["stop"]):
                return None
            found = json.loads(self._store.get("stop"))
        return int(found[0]), str(found[1])

    def sum(self, value: float) -> float:
        """The sum of `value` over the ranks, in float64, the same bits on each."""
        total = torch.tensor([value], dtype=torch.float64)
        with peers():
            dist.all_reduce(total)
        return total.item()

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The parts [n] of all ranks, one shape, in rank order: [world_size * n]."""
        whole = torch.empty(self.world_size * part.numel(), dtype=part.dtype)
        with peers():
            dist.all_gather_single(whole, part.contiguous())
        return whole

    def allow(self, seconds: float) -> None:
        """Let collectives of every group of this process, and agreements, take `seconds` from now on."""
        self._timeout_s = seconds
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def leave(self) -> None:
        """Part in order: the group is taken down when every rank is here. Rank 0 goes last, it holds the store."""
        self.agree("leave", None, lambda _: None)
        dist.destroy_process_group()
        with peers():
            if self.rank != 0:
                self._put(f"left/{self.rank}", None)
                return
            until = time.monotonic() + self._timeout_s
            for r in range(1, self.world_size):
                self._take(f"left/{r}", until, f"rank {r} at leaving")

    def _put(self, key: str, value: Json) -> None:
        self._store.set(key, canonical_json(value).decode())

    def _take(self, key: str, until: float, whom: str) -> Json:
        wait(lambda: self._store.check([key]), until, whom)
        return json.loads(self._store.get(key))


def join(environ: Mapping[str, str], identity: Identity, *, timeout_s: float, keep: Keep = lambda: None) -> Group:
    """Meet the other ranks under torchrun's environment contract and form the gloo group.

    Rank 0 serves the store, on the inherited socket `TRAINER_STORE_FD` when there is one, unless an agent serves it
    already (`TORCHELASTIC_USE_AGENT_STORE`). `keep` is called while waiting.

    Raises:
        WrongAttempt: rank 0 is of another attempt, or another process has this rank.
        PeerLost: the ranks did not meet within `timeout_s`.
    """
    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    until = time.monotonic() + timeout_s
    with peers():
        base = _open_store(environ, rank, until, timeout_s, keep)
        _compare_identities(base, rank, identity, until, keep)
        generation = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"{identity.run_id}/{identity.attempt}/{identity.token}/{generation}"
        store = PrefixStore(prefix, base)
        _take_place(store, rank)
        group = Group(rank, world_size, store, timeout_s)
        wait(lambda: store.check([f"place/{r}" for r in range(world_size)]), until, "all ranks at the start", keep)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
        )
    return group


@contextmanager
def peers() -> Iterator[None]:
    """Turn what torch raises when a peer is gone into `PeerLost`; every other error passes."""
    try:
        yield
    except PeerLost:
        raise
    except RuntimeError as error:
        if _tells_of_peers(error):
            raise PeerLost(str(error).splitlines()[0]) from error
        raise


def wait(done: Callable[[], bool], until: float, whom: str, keep: Keep = lambda: None) -> None:
    """Poll until `done()`; signals are handled meanwhile, which a blocking wait inside torch would put off.

    Raises:
        PeerLost: `until` (monotonic seconds) passed; the message names `whom`.
    """
    pause = _POLL_FIRST_S
    while not done():
        keep()
        if time.monotonic() > until:
            raise PeerLost(f"waited in vain for {whom}")
        time.sleep(pause)
        pause = min(pause * 1.5, _POLL_MOST_S)


def _tells_of_peers(error: RuntimeError) -> bool:
    # gloo's errors come out of backward() as plain RuntimeError; only their text says where they are from.
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error) or "[c10d]" in str(error)


def _open_store(environ: Mapping[str, str], rank: int, until: float, timeout_s: float, keep: Keep) -> Store:
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    timeout = timedelta(seconds=timeout_s)
    if rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        fd = environ.get("TRAINER_STORE_FD")
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=None if fd is None else int(fd),
        )
    wait(lambda: _answers(host, port), until, f"the store at {host}:{port}", keep)
    return TCPStore(host, port, is_master=False, timeout=timeout)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TRY_S).close()
    except OSError:
        return False
    return True


def _compare_identities(base: Store, rank: int, identity: Identity, until: float, keep: Keep) -> None:
    mine = canonical_json(asdict(identity)).decode()
    if rank == 0:
        base.compare_set(_IDENTITY, "", mine)
    else:
        wait(lambda: base.check([_IDENTITY]), until, "rank 0 at the start", keep)
    theirs = base.get(_IDENTITY).decode()
    if theirs != mine:
        raise WrongAttempt(f"rank {rank} is of {mine}, the store it found serves {theirs}")


def _take_place(store: Store, rank: int) -> None:
    mine = f"{socket.gethostname()} pid {os.getpid()}"
    holder = store.compare_set(f"place/{rank}", "", mine).decode()
    if holder != mine:
        raise WrongAttempt(f"rank {rank} is already taken by {holder}, this is {mine}")
