"""Process hygiene: no child outlives the process that needs it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux to signal this process when `parent`, which started it, is gone; at once when it is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, how)
        if os.getppid() != parent:
            os.kill(os.getpid(), how)


def step_dies_with_run() -> None:
    """End with the run's process, when a step runs in one of its own: a killed run leaves no step behind.

    A step inside its caller's process (a notebook, a test) is left alone.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)
