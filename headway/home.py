"""Where Headway keeps its state, and the settings that it takes from the environment.

Everything lives below one folder, `HEADWAY_HOME`: `catalog.db`, `store/` (artifacts), `dagster/` (Dagster's instance).
A variable that is present counts as set whatever its value: `0`, `false` and the empty string are values.
"""

import difflib
import fcntl
import json
import logging
import os
import pwd
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import urlsplit

from headway.errors import HeadwayError
from headway.files import replace_file

PREFIX = "HEADWAY_"
DEFAULT_HOME = Path(__file__).resolve().parent.parent / ".headway"
DAGSTER_URL_SCHEME = "postgresql+psycopg2"

Origin = Literal["default", "environment"]
V = TypeVar("V", str, int, bool, Path)

logger = logging.getLogger(__name__)


class SettingError(HeadwayError):
    """A `HEADWAY_` variable holds a value that cannot be used."""


@dataclass(frozen=True, slots=True)
class Effective:
    """One setting in force: its environment variable, its value as shown to people, and where the value comes from."""

    variable: str
    value: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings in force, read once from the environment by `load_settings`.

    `dagster_database_url` is empty when Dagster keeps its instance in SQLite; port 0 takes any free one.
    `platform_file` describes the cluster that the profile `cluster` trains on. `local_nodes` is how many nodes this
    machine carries for the next attempt of an elastic run, 0 for as many as are asked for.
    """

    home: Path
    profile: str
    tenant: str
    actor: str
    database_url: str
    dagster_database_url: str
    ui_port: int
    online_url: str
    serve_port: int
    platform_file: Path | None
    local_nodes: int
    debug: bool
    effective: tuple[Effective, ...]
    unknown: tuple[str, ...]

    @property
    def store_root(self) -> Path:
        """Folder of the content-addressed store."""
        return self.home / "store"

    @property
    def keys_folder(self) -> Path:
        """Folder of the role keys."""
        return self.home / "keys"

    @property
    def clock_file(self) -> Path:
        """The file that holds the world's clock while a replay moves it; absent: the machine's clock."""
        return self.home / "clock.json"

    @property
    def serving_folder(self) -> Path:
        """Folder of the servers: their last pointer, their verified copies and their spools."""
        return self.home / "serving"

    @property
    def dagster_home(self) -> Path:
        """Folder of Dagster's instance (`DAGSTER_HOME`); absolute, because Dagster refuses anything else."""
        return self.home / "dagster"


@dataclass(slots=True)
class _Reader:
    """Reads variables one by one and remembers what it read."""

    source: Mapping[str, str]
    effective: list[Effective] = field(default_factory=list[Effective])

    def take(self, name: str, default: V, parse: Callable[[str, str], V]) -> V:
        variable = PREFIX + name
        is_set = variable in self.source
        value = parse(variable, self.source[variable]) if is_set else default
        self.effective.append(Effective(variable, _shown(value), "environment" if is_set else "default"))
        return value


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from `environ` (default: the process environment).

    Unknown variables with the prefix are logged as warnings and listed in `Settings.unknown`.

    Raises:
        SettingError: a value cannot be used; the message names the variable, the value and what is allowed.
    """
    source = os.environ if environ is None else environ
    reader = _Reader(source)
    home = reader.take("HOME", DEFAULT_HOME, _path)
    profile = reader.take("PROFILE", "local", _word)
    tenant = reader.take("TENANT", "default", _word)
    actor = reader.take("ACTOR", f"local:{_user()}", _word)
    database_url = reader.take("DATABASE_URL", f"sqlite:///{home / 'catalog.db'}", _word)
    dagster_database_url = reader.take("DAGSTER_DATABASE_URL", "", _dagster_url)
    ui_port = reader.take("UI_PORT", 3000, _port)
    online_url = reader.take("ONLINE_URL", f"sqlite:///{home / 'online.db'}", _word)
    serve_port = reader.take("SERVE_PORT", 8080, _port)
    platform_file = reader.take("PLATFORM", "", _optional_word)
    local_nodes = reader.take("LOCAL_NODES", 0, _count)
    debug = reader.take("DEBUG", False, _flag)
    known = [entry.variable for entry in reader.effective]
    unknown = tuple(sorted(name for name in source if name.startswith(PREFIX) and name not in known))
    for name in unknown:
        logger.warning(_unknown_warning(name, known))
    return Settings(
        home=home,
        profile=profile,
        tenant=tenant,
        actor=actor,
        database_url=database_url,
        dagster_database_url=dagster_database_url,
        ui_port=ui_port,
        online_url=online_url,
        serve_port=serve_port,
        platform_file=Path(platform_file).expanduser().resolve() if platform_file else None,
        local_nodes=local_nodes,
        debug=debug,
        effective=tuple(reader.effective),
        unknown=unknown,
    )


def write_dagster_instance(settings: Settings) -> Path:
    """Write `dagster.yaml` below the home if it is missing or differs, and return the folder for `DAGSTER_HOME`.

    The file is replaced in one step, so a Dagster process that starts meanwhile reads the old or the new one. The URL
    of a database is not copied: the file names the environment variable, which every Dagster process then needs.
    """
    folder = settings.dagster_home
    folder.mkdir(parents=True, exist_ok=True)
    text = _instance_text(uses_postgres=bool(settings.dagster_database_url))
    target = folder / "dagster.yaml"
    if not target.exists() or target.read_text(encoding="utf-8") != text:
        _replace(target, text)
    return folder


def _instance_text(*, uses_postgres: bool) -> str:
    """The instance file. JSON is a subset of YAML, so no YAML library is needed to write it."""
    instance: dict[str, object] = {
        "telemetry": {"enabled": False},
        # The invitation to a mailing list would cover the first page that a new user opens.
        "nux": {"enabled": False},
        "concurrency": {"pools": {"default_limit": 1, "granularity": "op"}, "runs": {"max_concurrent_runs": 2}},
        # Resuming a lost run re-executes its steps silently; the catalog adopts work, so a new run is the safe way.
        "run_monitoring": {
            "enabled": True,
            "poll_interval_seconds": 15,
            "max_resume_run_attempts": 0,
            "free_slots_after_run_end_seconds": 60,
        },
        "retention": {
            "sensor": {"purge_after_days": {"skipped": 1, "failure": 30, "success": 30}},
            "auto_materialize": {"purge_after_days": {"skipped": 1, "failure": 30, "success": 30}},
        },
    }
    if uses_postgres:
        instance["storage"] = {"postgres": {"postgres_url": {"env": PREFIX + "DAGSTER_DATABASE_URL"}}}
    return "# Written by Headway; change the HEADWAY_ settings instead.\n" + json.dumps(instance, indent=2) + "\n"


def _replace(target: Path, text: str) -> None:
    """Write the whole file or nothing, one writer at a time; what a killed writer left is overwritten by the next."""
    with (target.parent / "instance.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        replace_file(target, text.encode())


def _user() -> str:
    """Login name; a container may run under a number that no account has."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid-{os.getuid()}"


def _path(variable: str, text: str) -> Path:
    return Path(_word(variable, text)).expanduser().resolve()


def _word(variable: str, text: str) -> str:
    if not text.strip():
        raise SettingError(f"{variable} is set to {text!r}", "give it a value, or unset it to take the default")
    return text


def _optional_word(variable: str, text: str) -> str:
    del variable
    return text.strip()


def _port(variable: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise SettingError(f"{variable} is {text!r}", "a port is a whole number from 0 (any free one) to 65535")
    return int(text)


def _count(variable: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise SettingError(f"{variable} is {text!r}", "a number is whole and from 0 (no limit) to 65535")
    return int(text)


def _flag(variable: str, text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise SettingError(f"{variable} is {text!r}", "allowed: 1, true, yes, on, or 0, false, no, off, empty")


def _dagster_url(variable: str, text: str) -> str:
    # Dagster's storage speaks psycopg2 only, while SQLAlchemy 2.1 takes psycopg 3 for a URL that names no driver.
    if text and urlsplit(text).scheme != DAGSTER_URL_SCHEME:
        raise SettingError(
            f"{variable} has the scheme {urlsplit(text).scheme!r}",
            f"write {DAGSTER_URL_SCHEME}://user@host:port/database, or leave it empty for SQLite",
        )
    return text


def _shown(value: str | int | bool | Path) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _without_password(str(value))


def _without_password(text: str) -> str:
    parts = urlsplit(text)
    if parts.password is None:
        return text
    return parts._replace(netloc=parts.netloc.replace(f":{parts.password}@", ":***@")).geturl()


def _unknown_warning(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else "it has no effect; `headway status` lists the settings"
    return f"unknown setting {name}: {hint}"
