"""A real PostgreSQL for tests, from Debian's programs, run by another user than root (initdb refuses root)."""

import fcntl
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

INSTALL = "apt-get install -y postgresql"
ROLE = "headway"


class PostgresMissing(Exception):
    """PostgreSQL's programs are not on this machine; the message is the line to type."""


@dataclass(frozen=True)
class Postgres:
    """A running server. `socket` is the folder of its socket, `data` its data folder."""

    socket: Path
    data: Path
    process: subprocess.Popen[bytes]

    def fresh_database(self, template_url: str | None = None) -> str:
        """Make a database owned by an ordinary role, which row security binds; return its URL.

        It is empty, or a copy of the database at `template_url` (to which nobody may be connected).
        """
        name = f"test_{secrets.token_hex(6)}"
        template = "template1" if template_url is None else _name(template_url)
        with psycopg.connect(host=str(self.socket), user="postgres", dbname="postgres", autocommit=True) as admin:
            statement = sql.SQL("CREATE DATABASE {} OWNER {} TEMPLATE {}")
            names = (sql.Identifier(word) for word in (name, ROLE, template))
            admin.execute(statement.format(*names))
        return f"postgresql://{ROLE}@/{name}?host={self.socket}"

    def drop_database(self, url: str) -> None:
        """Drop a database that `fresh_database` made, with whatever is still connected to it."""
        with psycopg.connect(host=str(self.socket), user="postgres", dbname="postgres", autocommit=True) as admin:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(_name(url))))


def _name(url: str) -> str:
    return url.partition("@/")[2].partition("?")[0]


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """Start a server of our own with fsync on; stop it and remove its files at the end.

    Every test worker has its own: the socket lies in a new short folder (a socket's path must stay under 107 bytes)
    and no port is opened. The server dies with this process, even when it is killed.

    Raises:
        PostgresMissing: the programs are not installed.
    """
    programs = _programs()
    _remove_abandoned()
    base = Path(tempfile.mkdtemp(prefix="hwpg", dir="/tmp"))
    lock = _lock(base)
    process: subprocess.Popen[bytes] | None = None
    try:
        user = _other_user()
        if user is not None:
            os.chown(base, user.pw_uid, user.pw_gid)
        data = base / "d"
        _run(
            user,
            [str(programs / "initdb"), "-D", str(data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C"],
        )
        process = _start(user, programs, base, data)
        server = Postgres(base, data, process)
        _wait_ready(server)
        with psycopg.connect(host=str(base), user="postgres", dbname="postgres", autocommit=True) as admin:
            admin.execute(sql.SQL("CREATE ROLE {} LOGIN NOSUPERUSER NOBYPASSRLS").format(sql.Identifier(ROLE)))
        yield server
    finally:
        if process is not None:
            _stop(process)
        os.close(lock)
        shutil.rmtree(base)


def _programs() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not found:
        raise PostgresMissing(f"PostgreSQL's programs are missing; type: {INSTALL}")
    return found[-1].parent


def _other_user() -> pwd.struct_passwd | None:
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


def _as_user(user: pwd.struct_passwd | None, *, die_with_us: bool) -> list[str]:
    dying = ["--pdeathsig", "QUIT"] if die_with_us else []
    if user is None:
        return ["setpriv", *dying] if dying else []
    return ["setpriv", "--reuid", str(user.pw_uid), "--regid", str(user.pw_gid), "--clear-groups", *dying]


def _run(user: pwd.struct_passwd | None, command: list[str]) -> None:
    subprocess.run([*_as_user(user, die_with_us=False), *command], check=True, capture_output=True, cwd="/")


def _start(user: pwd.struct_passwd | None, programs: Path, base: Path, data: Path) -> subprocess.Popen[bytes]:
    settings = {
        "unix_socket_directories": str(base),
        "listen_addresses": "",
        "fsync": "on",
        "max_connections": "60",
        "shared_buffers": "32MB",
        "dynamic_shared_memory_type": "mmap",
    }
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    command = [*_as_user(user, die_with_us=True), str(programs / "postgres"), "-D", str(data), *options]
    with (base / "log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd="/")


def _wait_ready(server: Postgres) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(host=str(server.socket), user="postgres", dbname="postgres", connect_timeout=5).close()
        except psycopg.OperationalError as error:
            if server.process.poll() is not None or time.monotonic() > deadline:
                log = (server.socket / "log").read_text(errors="replace")
                raise RuntimeError(f"PostgreSQL did not start: {log[-2000:]}") from error
            time.sleep(0.05)
        else:
            return


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGQUIT)
        process.wait(30)


def _lock(base: Path) -> int:
    descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def _remove_abandoned() -> None:
    # A killed test run leaves its folder; nobody holds its lock any more.
    for base in Path("/tmp").glob("hwpg*"):
        try:
            descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - base.stat().st_mtime > 600:
                shutil.rmtree(base, ignore_errors=True)
        except (BlockingIOError, FileNotFoundError):
            continue
        finally:
            os.close(descriptor)


def copied_catalog(request: pytest.FixtureRequest, folder: Path, sqlite: str, postgres: str) -> Iterator[str]:
    """The URL of a copy of a catalog: on SQLite of the file that a fixture names, on PostgreSQL of the database.

    Args:
        request: of a fixture with the parameters `sqlite` and `postgresql`.
        folder: for the copied file.
        sqlite: name of the fixture with the SQLite file.
        postgres: name of the fixture with the PostgreSQL URL.
    """
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue(sqlite), folder / "catalog.db")
        yield f"sqlite:///{folder / 'catalog.db'}"
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = server.fresh_database(request.getfixturevalue(postgres))
    yield url
    server.drop_database(url)
