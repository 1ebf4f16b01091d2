"""The demo killed with -9 at random moments, on three days, ends as if it had never been killed."""

import random
import subprocess
import sys
import time
from pathlib import Path

from support.serving import ROOT, WAIT_SECONDS, environment, living, wait_until_none

from headway.catalog.invariants import check
from headway.home import load_settings
from headway.services import Services, open_services

KILLS = 10
SLICE = ["--first", "2013-01-01", "--last", "2013-01-03"]
DAYS = ["2013-01-01", "2013-01-02", "2013-01-03"]


def _start(home: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "assets.demo", *SLICE]
    return subprocess.Popen(command, cwd=ROOT, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _finish(home: Path) -> str:
    process = _start(home)
    output = process.communicate(timeout=WAIT_SECONDS)[0].decode()
    assert process.returncode == 0, output
    return output


def _settled(services: Services) -> dict[str, list[tuple[int, str]]]:
    """Every version of every dataset by partition, and the snapshots."""
    found: dict[str, list[tuple[int, str]]] = {}
    for source in ("flights", "weather", "planes", "airports", "airlines"):
        for v in services.catalog.versions(services.principal, f"flight_delay/{source}"):
            found.setdefault(f"{source} {v.partition}", []).append((v.version, f"{v.status} {v.content_digest}"))
    for partition, state in services.catalog.current_snapshots(services.principal, "flight_delay").items():
        assert state.snapshot is not None
        found[f"snapshot {partition}"] = [(1, state.snapshot.content_digest)]
    return found


def test_killed_at_ten_random_moments(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    moments = random.Random(seed)
    home = tmp_path / "home"
    for _ in range(KILLS):
        process = _start(home)
        time.sleep(moments.uniform(0.5, 25.0))
        process.kill()
        process.communicate()
        assert wait_until_none(home) == {}, f"orphans, seed {seed}"
    assert "done after" in _finish(home) or "up to date" in _finish(home), f"seed {seed}"
    assert living(home) == {}
    with open_services(load_settings({"HEADWAY_HOME": str(home)})) as services:
        settled = _settled(services)
        findings = [f for f in check(services.catalog, services.principal, services.store) if not f.ok]
    assert findings == [], f"seed {seed}"
    assert {len(v) for v in settled.values()} == {1}, f"one version each, seed {seed}"
    assert len(settled) == 3 + 3 * len(DAYS)
    left = [p for p in (home / "store").rglob("*") if p.is_file() and "tmp" in p.relative_to(home).as_posix()]
    assert left == [], f"temporary files, seed {seed}"
    assert "everything is up to date" in _finish(home)
