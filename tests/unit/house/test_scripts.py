"""What the Makefile starts fails with the line to type."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run_script(name: str, *arguments: str, path: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["/bin/sh", str(ROOT / "scripts" / name), *arguments], env={"PATH": path}, capture_output=True, text=True
    )


def program(folder: Path, name: str, body: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


def test_a_missing_interpreter_is_named_with_the_way_out() -> None:
    done = run_script("check_python.sh", "/nowhere/python9", path="/usr/bin:/bin")
    assert done.returncode == 2
    assert done.stderr.startswith("error: '/nowhere/python9' does not run; ")
    assert "make PYTHON=" in done.stderr


def test_an_old_interpreter_is_refused_with_its_version(tmp_path: Path) -> None:
    program(tmp_path, "python3", 'case "$2" in *print*) echo 3.9;; *) exit 1;; esac')
    done = run_script("check_python.sh", "python3", path=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == 2
    assert "is Python 3.9, Headway needs 3.11 or newer" in done.stderr


@pytest.mark.parametrize(("user", "has_apt"), [("1000", True), ("0", False)])
def test_missing_programs_fail_with_the_line_to_type(tmp_path: Path, user: str, has_apt: bool) -> None:
    program(tmp_path, "id", f"echo {user}")
    program(tmp_path, "ls", "exit 2")
    if has_apt:
        program(tmp_path, "apt-get", "echo must not be called >&2; exit 1")
    done = run_script("ensure_system.sh", path=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == (
        "error: the tests need postgresql chromium chromium-driver; type (as root): apt-get update && "
        "apt-get install -y --no-install-recommends postgresql chromium chromium-driver\n"
    )


def test_missing_programs_are_installed_where_that_is_allowed(tmp_path: Path) -> None:
    program(tmp_path, "id", "echo 0")
    program(tmp_path, "ls", "exit 0")
    program(tmp_path, "chromium", "exit 0")
    program(tmp_path, "apt-get", f'echo "$@" >> {tmp_path}/calls')
    (tmp_path / "sh").symlink_to("/bin/sh")
    done = run_script("ensure_system.sh", path=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "calls").read_text().splitlines() == [
        "update",
        "install -y --no-install-recommends chromium-driver",
    ]
