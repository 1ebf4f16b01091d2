"""The program of one rank: `python -m trainer.worker` under torchrun's environment contract and `TRAINER_ATTEMPT`.

Signals: SIGTERM, SIGUSR1 and a first SIGINT ask for an orderly stop (all ranks save after the same step, exit 75); a
second SIGINT ends at once; SIGHUP is ignored; SIGUSR2 writes the stacks of all threads and goes on. The rank dies with
the process that started it.

Exit status: 0 done, 64 run spec, data or code refused, 65 an error of the code (a loss that is not finite too, and user
code that ends the process itself, with whatever status), 75 stopped and saved, 77 a peer, the storage or the right to
publish was lost. Before a status other than 0 the rank writes `rank-R.error.json`: kind, message, stack, code.
"""

import ctypes
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from trainer.blobs import canonical_json
from trainer.events import EventSink, node_folder, storable
from trainer.spec import AttemptSpec, ExitCode, RunSpec, SpecRefused, parse_attempt, parse_run

if TYPE_CHECKING:
    from trainer.rank import Parts

STEP_EVENT_EVERY_S = 2.0

_PR_SET_PDEATHSIG = 1
_IMPORTS_MAY_TAKE_S = 180.0


class StopRequest:
    """Whether this process was asked to stop, by which signal."""

    def __init__(self, cancel_file: Path) -> None:
        self._cancel_file = cancel_file
        self._signal: signal.Signals | None = None

    @property
    def reason(self) -> str | None:
        """`preempt` for SIGUSR1; `cancel` when the attempt was cancelled, else `sigterm`; None while nobody asked."""
        if self._signal is None:
            return None
        if self._signal == signal.SIGUSR1:
            return "preempt"
        return "cancel" if self._cancel_file.exists() else "sigterm"

    def install(self) -> None:
        """Handle the signals that this process obeys."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal == signal.SIGINT:
            os._exit(128 + signal.SIGINT)
        self._signal = signal.Signals(number)


def main() -> int:
    """Run the rank that the environment describes; returns its exit status."""
    attempt_file = Path(os.environ["TRAINER_ATTEMPT"])
    stop = StopRequest(attempt_file.parent / "cancel")
    stop.install()
    # The node sets it too; torchrun does not.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sink = EventSink.from_environment()
    sink.emit("phase", {"name": "imports", "may_take_s": _IMPORTS_MAY_TAKE_S})
    try:
        attempt, spec = _read_specs(attempt_file)
    except (OSError, SpecRefused) as error:
        return report(sink, error, ExitCode.REFUSED_SPEC)
    return run(attempt, spec, sink, stop, float(os.environ.get("TRAINER_STEP_EVENT_EVERY_S", STEP_EVENT_EVERY_S)))


def run(
    attempt: AttemptSpec,
    spec: RunSpec,
    sink: EventSink,
    stop: StopRequest,
    step_event_every_s: float = STEP_EVENT_EVERY_S,
    parts: "Parts | None" = None,
) -> int:
    """Import what a rank needs, do its work, say how it ended; `parts` and `step_event_every_s` as for `Rank`."""
    os.environ.setdefault("OMP_NUM_THREADS", str(spec.threads))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from trainer.rank import Rank, exit_code

        for module in _imports(spec):
            importlib.import_module(module)
    except BaseException as error:  # noqa: BLE001 - whatever keeps torch from being imported is reported
        return report(sink, error, ExitCode.USER_CODE)
    try:
        Rank(os.environ, attempt, spec, sink, stop, step_event_every_s, parts).run()
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, and the status has to tell
        return report(sink, error, exit_code(error))
    return ExitCode.DONE


def report(sink: EventSink, error: BaseException, code: ExitCode) -> int:
    """Write the error file, send the error event unless it is an orderly stop, and return `code`."""
    rank, node = int(os.environ["RANK"]), int(os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0")))
    stack = "".join(traceback.format_exception(error))
    told = {"kind": type(error).__name__, "message": _message(error), "stack": stack}
    told = {key: storable(text) for key, text in told.items()}
    print(stack, file=sys.stderr)
    folder = node_folder(Path(os.environ["TRAINER_ATTEMPT"]), node)
    try:
        (folder / f"rank-{rank}.error.json").write_bytes(canonical_json({**told, "code": int(code)}))
        if code != ExitCode.PREEMPTED:
            sink.emit("error", {"rank": rank, **told})
    except OSError as failure:
        # A full disk, or a node that is gone: the status still says what happened.
        print(f"the error could not be told: {failure}", file=sys.stderr)
    return code


def _imports(spec: RunSpec) -> list[str]:
    """What costs seconds to import, and only some layouts need."""
    modules = {"deepspeed": ["trainer.engines.zero"], "fsdp2": ["trainer.engines.fsdp2"]}.get(spec.layout.engine, [])
    return modules + (["trainer.engines.pipeline"] if spec.layout.pp > 1 else [])


def _read_specs(attempt_file: Path) -> tuple[AttemptSpec, RunSpec]:
    attempt = parse_attempt(attempt_file.read_bytes())
    return attempt, parse_run((Path(attempt.run_dir) / "spec.json").read_bytes())


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"the code ended the process itself: sys.exit({error.code!r})"
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001 - the error is user code, its text too
        return f"its text cannot be made: {type(second).__name__}"


def _leave(code: int) -> NoReturn:
    # Without the interpreter's tear-down: threads of a group whose peer is gone would hold it up.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
