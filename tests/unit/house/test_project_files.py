"""The project's own files agree with each other and with what is installed."""

import re
import tomllib
from importlib.metadata import distributions, packages_distributions
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]
OURS = ("assets", "headway", "pipelines", "resources", "trainer")


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    assert len(pinned) == len(lines)
    return {normal(name): version for name, version in pinned.items()}


def test_no_dependency_claims_our_package_names() -> None:
    taken = packages_distributions()
    assert "dagster" in taken
    assert {name: taken[name] for name in OURS if set(taken.get(name, [])) - {"headway"}} == {}


def test_everything_installed_is_pinned_at_the_version_installed() -> None:
    pinned = pins()
    installed = {normal(found.name): found.version for found in distributions()}
    # torch is a worker's dependency, and comes in a build per accelerator.
    strangers = {
        name: version
        for name, version in installed.items()
        if name not in ("headway", "torch") and pinned.get(name) != version
    }
    assert strangers == {}


def test_the_location_has_one_name() -> None:
    """Dagster warns on every load when the two differ."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["dg"]["project"]
    workspace = yaml.safe_load((ROOT / "workspace.yaml").read_text())["load_from"][0]["python_module"]
    assert workspace["location_name"] == tool["code_location_name"]
    assert workspace["module_name"] == tool["code_location_target_module"]


def test_no_loose_module_and_no_package_in_tests() -> None:
    assert list(ROOT.glob("*.py")) == []
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_every_package_of_ours_is_in_the_distribution() -> None:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert sorted(found) == [f"{name}*" for name in OURS]
