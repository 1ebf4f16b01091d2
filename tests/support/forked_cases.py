"""What ranks do in the tests of forked ranks; imported in the ranks only, they have torch."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.process_group import Group


def add_up(group: Group, more: int) -> dict[str, Any]:
    total = torch.tensor([float(group.rank + more)])
    dist.all_reduce(total)
    return {"rank": group.rank, "total": total.item(), "pid": os.getpid(), "pgid": os.getpgid(0)}


def learn(group: Group) -> float:
    """Autograd, which a parent that has run it could not hand on."""
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    return x.grad.sum().item()


def fail(group: Group, rank: int) -> None:
    if group.rank == rank:
        raise ValueError(f"this is rank {rank}")
    dist.barrier()


def die(group: Group, rank: int) -> None:
    if group.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep(group: Group, pids: str) -> None:
    (Path(pids) / str(group.rank)).write_text(str(os.getpid()))
    time.sleep(1000)


def no_json(group: Group) -> object:
    return object()
