"""`headway ui`: Dagster's webserver and daemon on loopback, over the instance below `HEADWAY_HOME`.

The two are started as processes of our own rather than through a development command, because then nothing of the
development extra is needed, and what was started can be stopped to the last process.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

import click

from headway.errors import HeadwayError
from headway.home import Settings, write_dagster_instance
from headway.processes import die_with_parent

ROOT = Path(__file__).resolve().parent.parent.parent
HOST = "127.0.0.1"
READY_SECONDS = 180
STOP_SECONDS = 20
POLL_SECONDS = 0.2
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class PortTaken(HeadwayError):
    """Another process listens on the port that the UI should use."""


class AlreadyRunning(HeadwayError):
    """Another `headway ui` serves the same home; two daemons on one instance would fight over its schedules."""


class ProcessEnded(HeadwayError):
    """The webserver or the daemon ended by itself."""


@click.command("ui")
@click.option("--port", type=click.IntRange(0, 65535), help="Port on loopback; 0 takes any free one [HEADWAY_UI_PORT].")
@click.pass_obj
def command(settings: Settings, port: int | None) -> None:
    """Serve Dagster's UI and run its daemon on loopback until Ctrl-C."""
    # A starter that ignores a signal hands that down, so each is set here.
    for signum in STOP_SIGNALS:
        signal.signal(signum, _interrupt)
    try:
        serve(settings, free_port(settings.ui_port if port is None else port))
    except KeyboardInterrupt:
        click.echo("stopped")


def serve(settings: Settings, port: int) -> None:
    """Run webserver and daemon until one ends or the process is interrupted; both are gone when this returns.

    Raises:
        AlreadyRunning: another process serves this home.
        ProcessEnded: one of the two ended by itself, or the webserver did not answer in time.
    """
    home = write_dagster_instance(settings)
    environ = {**os.environ, "DAGSTER_HOME": str(home), "HEADWAY_HOME": str(settings.home)}
    workspace = ["-w", str(ROOT / "workspace.yaml")]
    with ExitStack() as stack:
        stack.enter_context(_only_one(home / "ui.lock"))
        click.echo(f"starting Dagster with the state in {settings.home}")
        url = f"http://{HOST}:{port}"
        webserver = stack.enter_context(
            _running(["dagster-webserver", "-h", HOST, "-p", str(port), "--log-level", "warning", *workspace], environ)
        )
        # In turn: on a new home both would create Dagster's tables, and one of them would fail.
        _wait_until_ready(url, webserver)
        daemon = stack.enter_context(_running(["dagster-daemon", "run", "--log-level", "warning", *workspace], environ))
        click.echo(f"Dagster UI: {url} (Ctrl-C stops it)")
        while True:
            _refuse_ended(webserver)
            _refuse_ended(daemon)
            time.sleep(POLL_SECONDS)


def free_port(port: int) -> int:
    """Return `port` when nothing listens on it, or a free one for 0.

    Raises:
        PortTaken: something listens on it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            remedy = "choose another with --port (make ui ARGS='--port 3001') or take any free one with --port 0"
            raise PortTaken(f"port {port} on {HOST} is not free ({error.strerror})", remedy) from error
        return int(probe.getsockname()[1])


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    with lock.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AlreadyRunning(f"another process serves {lock.parent.parent}", "stop it, or use its page") from error
        yield


@contextmanager
def _running(command: Sequence[str], environ: Mapping[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """The command in a session of its own, so that Ctrl-C reaches only us and we can end its whole group."""
    program = str(Path(sys.executable).parent / command[0])
    us = os.getpid()
    process = subprocess.Popen(
        [program, *command[1:]],
        cwd=ROOT,
        env=environ,
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(us, signal.SIGTERM),
    )
    try:
        yield process
    finally:
        _stop(process)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """SIGTERM, a while to end in order, then SIGKILL to whatever is left of the group."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        click.echo(f"process {process.pid} did not end within {STOP_SECONDS} s and is killed", err=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_until_ready(url: str, webserver: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        _refuse_ended(webserver)
        try:
            with urllib.request.urlopen(f"{url}/server_info", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(POLL_SECONDS)
    raise ProcessEnded(f"the webserver did not answer on {url} within {READY_SECONDS} s", "read its messages above")


def _refuse_ended(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is not None:
        name = Path(str(process.args[0])).name if isinstance(process.args, list) else str(process.args)
        raise ProcessEnded(f"{name} ended with code {process.returncode}", "read its messages above")


def _interrupt(signum: int, frame: FrameType | None) -> None:
    # A second Ctrl-C must not cut the stopping short and leave a process behind.
    for other in STOP_SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt
