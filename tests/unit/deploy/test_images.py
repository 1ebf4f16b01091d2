"""The Dockerfiles as data."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
BASE = re.compile(r"docker\.io/library/python:3\.11-[a-z-]+@sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Instruction:
    name: str
    rest: str


def instructions(file: Path) -> list[Instruction]:
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [Instruction(name.upper(), rest) for name, rest in found]


def of(file: Path, name: str) -> list[str]:
    return [i.rest for i in instructions(file) if i.name == name]


def final_stage(file: Path) -> list[Instruction]:
    found = instructions(file)
    return found[max(n for n, i in enumerate(found) if i.name == "FROM") :]


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def file(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_there_is_an_image_for_each_part() -> None:
    assert [file.name for file in FILES] == ["code-location.Dockerfile", "serving.Dockerfile", "trainer.Dockerfile"]


def test_the_base_is_pinned_by_digest_and_all_stages_have_it(file: Path) -> None:
    assert [BASE.fullmatch(rest.removeprefix("PYTHON_IMAGE=")) is not None for rest in of(file, "ARG")] == [True]
    assert of(file, "FROM") == ["${PYTHON_IMAGE} AS build", "${PYTHON_IMAGE}"]


def test_it_ends_as_a_user_without_rights(file: Path) -> None:
    assert [i.rest for i in final_stage(file) if i.name == "USER"] == ["65532:65532"]


def test_the_final_stage_builds_and_installs_nothing(file: Path) -> None:
    """Compilers, package lists and pip's caches stay in the stage before."""
    assert {i.name for i in final_stage(file)} == {"FROM", "ENV", "COPY", "WORKDIR", "USER", "CMD"}


def test_nothing_is_fetched_from_a_url_and_nothing_copied_whole(file: Path) -> None:
    assert of(file, "ADD") == []
    for rest in of(file, "COPY"):
        sources = [word for word in rest.split()[:-1] if not word.startswith("--")]
        assert not set(sources) & {".", "./", "*"}
        assert "://" not in rest


def test_packages_come_from_the_constraints(file: Path) -> None:
    installs = [part.strip() for rest in of(file, "RUN") for part in rest.split("&&") if "pip install" in part]
    assert installs
    assert all(part.startswith("pip install -c constraints.txt ") for part in installs)
    (torch,) = {word for part in installs for word in part.split() if word.startswith("torch==")}
    assert f"'{torch}'" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_no_secret_is_an_argument_or_a_variable(file: Path) -> None:
    told = " ".join([*of(file, "ARG"), *of(file, "ENV")])
    assert re.search(r"(?i)password|token|secret|access_key|HEADWAY_DATABASE_URL", told) is None


def test_what_is_copied_is_there_and_passes_the_filter_of_the_context(file: Path) -> None:
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert next(line for line in ignore if not line.startswith("#")) == "*"
    let_in = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert all((ROOT / name).exists() for name in let_in)
    for rest in of(file, "COPY"):
        if "--from=" not in rest:
            assert set(rest.split()[:-1]) <= let_in


def test_the_trainer_image_carries_what_the_trainer_imports() -> None:
    """Third-party modules of trainer/ against the packages that the image installs by name (or torch brings)."""
    module = re.compile(r"^\s*(?:import|from) ([a-z_]+)", re.MULTILINE)
    used = {m for f in (ROOT / "trainer").rglob("*.py") for m in module.findall(f.read_text(encoding="utf-8"))}
    third_party = used & {"torch", "deepspeed", "numpy", "pyarrow", "safetensors", "sklearn", "scipy", "threadpoolctl"}
    installed = " ".join(of(ROOT / "deploy" / "docker" / "trainer.Dockerfile", "RUN"))
    package = {name: name for name in third_party} | {"sklearn": "scikit-learn", "torch": "torch=="}
    assert third_party == {"torch", "deepspeed", "numpy", "pyarrow", "safetensors", "sklearn", "scipy", "threadpoolctl"}
    assert all(package[name] in installed for name in third_party)
    assert not used & {"dagster", "headway", "sqlalchemy", "kubernetes"}
