"""docs/tutorial.md does what it says: its own blocks, one after the other, in a copy of the tree."""

import json
import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from support.markdown import Block, blocks

import headway

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
PARTS = ("assets", "headway", "resources", "trainer")


@dataclass(frozen=True)
class Tried:
    """The tree after the page was followed, and what each of its blocks printed, by the block's first line."""

    tree: Path
    printed: dict[str, str]

    def of(self, command: str) -> str:
        """What the block printed in which a command stands."""
        (found,) = [text for block, text in self.printed.items() if command in block]
        return found


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Tried:
    """Whoever follows the page has this: the tree without pipelines, and nothing else."""
    tree = tmp_path_factory.mktemp("tutorial") / "tree"
    for part in PARTS:
        shutil.copytree(ROOT / part, tree / part)
    for name in ("pyproject.toml", "workspace.yaml"):
        shutil.copy(ROOT / name, tree / name)
    (tree / "pipelines").mkdir()
    (tree / ".venv").symlink_to(ROOT / ".venv")
    page = [block for block in blocks(PAGE) if block.language in ("sh", "python", "json", "yaml")]
    outputs = tree / "outputs"
    outputs.mkdir()
    (tree / "follow.sh").write_text("set -eu\n" + "".join(_step(outputs, i, b) for i, b in enumerate(page)))
    # A user's tree is installed in its environment; this copy stands before the one that is.
    settings = {"PYTHONPATH": str(tree), "COLUMNS": "200", "DAGSTER_DISABLE_TELEMETRY": "yes"}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HEADWAY_", "DAGSTER_"))}
    done = subprocess.run(
        ["bash", "follow.sh"],
        cwd=tree,
        env=inherited | settings | {"DAGSTER_DG_UPDATE_CHECK_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=1600,
        check=False,
    )
    printed = {b.text: (outputs / f"{i}").read_text() for i, b in enumerate(page) if (outputs / f"{i}").exists()}
    last = list(printed.items())[-1:]
    assert done.returncode == 0, f"{done.stderr}\nthe last block: {last}"
    return Tried(tree, printed)


def _step(outputs: Path, number: int, block: Block) -> str:
    """A block with a file's name is saved there; any other is typed."""
    if block.language == "sh":
        return f"{{\n{block.text}}} > {shlex.quote(str(outputs / str(number)))} 2>&1\n"
    text = outputs / f"{number}.file"
    text.write_text(block.text)
    target = shlex.quote(block.title)
    return f'mkdir -p "$(dirname {target})" && cp {shlex.quote(str(text))} {target}\n'


@pytest.mark.timeout(1700)
def test_the_page_leads_to_an_explained_prediction(tried: Tried) -> None:
    listed = tried.of("dg scaffold defs")
    assert "All component YAML validated successfully" in listed
    assert "churn/feature_snapshot:leakage_proof" in listed
    assert "nothing wrong" in tried.of("headway check churn")
    assert tried.of("headway snapshots list").count("  published  ") == 6
    assert "churn serves churn@1" in tried.of("headway promote")
    answers = tried.of("headway predict --file")
    assert answers.count("all features fresh") == 2
    with headway.open(tried.tree / ".headway") as home:
        said = home.predictions("churn")
        assert list(said.model) == ["churn", "churn"]
        assert list(home.versions("churn").standing) == ["eligible"]
    walk = tried.of("headway explain")
    assert said.prediction_id.iloc[-1] in walk
    assert "churn/sessions" in walk


@pytest.mark.timeout(1700)
def test_dagster_code_beside_the_declaration_follows_the_snapshots(tried: Tried) -> None:
    """A plain asset with its own check, downstream of `feature_snapshot`, in the same graph and history."""
    with dg.DagsterInstance.from_config(str(tried.tree / ".headway" / "dagster")) as instance:
        key = dg.AssetKey(["churn", "coverage"])
        assert instance.get_materialized_partitions(key) == {f"2025-0{month}-01" for month in range(1, 7)}
        checked = instance.event_log_storage.get_asset_check_execution_history(
            dg.AssetCheckKey(key, "plans_known"), limit=10
        )
        # One check is planned for each partition of the range, and answered once for all of them.
        assert {record.status.value for record in checked} - {"PLANNED"} == {"SUCCEEDED"}


@pytest.mark.timeout(1700)
def test_labels_that_were_not_settled_were_left_out(tried: Tried) -> None:
    """Reviews of the last two weeks of May settle in June: they are no training rows as of June."""
    with headway.open(tried.tree / ".headway") as home:
        (run,) = home.runs("churn").to_dict("records")
        labels = home.snapshots("churn").to_pandas([f"2025-0{month}-01" for month in range(1, 6)])
    late = int((labels.settled_at >= "2025-06-01").sum())
    assert late > 0
    assert run["metric.rows_immature"] == late
    assert run["metric.rows_train"] + run["metric.rows_valid"] + late == len(labels)


@pytest.mark.timeout(1700)
def test_the_notebook_reads_what_the_page_made(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code cells in their order, in one namespace: all of it is plain Python, so no kernel is needed for that."""
    monkeypatch.setenv("HEADWAY_HOME", str(tried.tree / ".headway"))
    notebook = json.loads((ROOT / "docs" / "notebooks" / "reading.ipynb").read_text())
    assert all(cell.get("outputs", []) == [] for cell in notebook["cells"]), "clear the outputs before committing"
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert len(names["frame"]) == 708 + 567
    assert list(names["curve"].epoch) == list(range(1, len(names["curve"]) + 1))
    assert names["versions"].serves.tolist() == ["churn: stable"]
    sessions = names["features"].groupby("churned").usage__count_28d.mean().to_dict()
    assert sessions[True] < sessions[False]


def test_the_fault_that_the_page_shows_is_the_one_that_is_told(tmp_path: Path) -> None:
    declared = {b.title: b.text for b in blocks(PAGE) if b.title.startswith("pipelines/churn/")}
    (shown,) = [b.text.strip() for b in blocks(PAGE) if b.language == "text"]
    for name, text in declared.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("engine: ddp", "engine: ddq"))
    from headway.loading import DeclarationInvalid, load_pipeline

    with pytest.raises(DeclarationInvalid) as caught:
        load_pipeline(tmp_path / "pipelines" / "churn")
    (problem,) = caught.value.problems
    assert str(problem).removeprefix(f"{tmp_path}/") == shown


def test_suites_of_the_page_are_json() -> None:
    assert [json.loads(b.text) for b in blocks(PAGE) if b.language == "json"]
