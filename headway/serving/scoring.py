"""Scores rows with a registered version in a process of the trainer, which is where torch lives.

The artifact, and the code tree of the run that made it, are copied out of the store by digest into a private folder
first: what is verified is what is loaded, and an old version is run by its own code.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headway.artifacts.manifest import read_manifest
from headway.artifacts.store import LocalStore
from headway.catalog.registry_facts import ModelVersion
from headway.errors import HeadwayError
from headway.services import Services
from headway.training.stage import stage_code
from trainer.spec import parse_run

# A first import of torch takes seconds on a busy machine; a month of rows takes a minute on one core.
DEADLINE_SECONDS = 1_800.0
_LINES = 20


class ContractNotMet(HeadwayError):
    """The model's contract names an input that the features do not give, or of another type."""


class ScoringFailed(HeadwayError):
    """The trainer's process ended badly, or its answer is not one finite probability per row."""


def score_rows(services: Services, version: ModelVersion, values: pa.Table, python: str = "") -> NDArray[np.float64]:
    """The probability of each row of a values table, float64 of shape (rows,).

    Args:
        services: the store holds the artifact and the code; the catalog names them.
        version: the registered version, whose contract names the inputs.
        values: feature values, one row per request; columns that are no inputs are kept out.
        python: interpreter of the trainer; empty: this one.

    Raises:
        ContractNotMet: an input of the contract is not there, or of another type.
        BlobMissing, BlobCorrupt, InvalidManifest, StagedCodeDiffers: the store does not hold what the registry says.
        ScoringFailed: names the exit status and the process's last words.
    """
    inputs = model_inputs(version.contract, values)
    with tempfile.TemporaryDirectory(prefix="headway-score-") as private:
        folder = Path(private)
        copy_artifact(services.store, version.manifest_digest, folder / "artifact")
        stage_code(services.store, _code_manifest(services, version), folder / "code")
        pq.write_table(inputs, folder / "in.parquet")
        _run(folder, python or sys.executable)
        return _scores(folder / "out.parquet", inputs.num_rows)


def _code_manifest(services: Services, version: ModelVersion) -> str:
    run = services.catalog.run(services.principal, version.run_id)
    return parse_run(services.store.get_bytes(run.facts.spec_digest)).model.code_manifest


def model_inputs(contract: Mapping[str, object], values: pa.Table) -> pa.Table:
    """The columns that the contract names, in its order and its types. Raises `ContractNotMet`."""
    columns: dict[str, pa.ChunkedArray] = {}
    for declared in cast("Sequence[Mapping[str, Any]]", contract["inputs"]):
        name, kind = declared["name"], declared["type"]
        if name not in values.column_names:
            raise ContractNotMet(
                f"the model takes {name!r}, and the features have no such column", "train a version on these features"
            )
        column = values.column(name)
        found = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if str(found) != _ARROW_NAMES.get(kind, kind):
            raise ContractNotMet(
                f"the model takes {name!r} as {kind}, the features hold {found}", "train a version on these features"
            )
        if not declared.get("nullable", True) and column.null_count:
            row = column.is_null().to_pylist().index(True) + 1
            raise ContractNotMet(f"row {row}: the model requires {name!r}, and it is null", "give it in the request")
        columns[name] = column.cast(found)
    return pa.table(columns)


_ARROW_NAMES = {"float64": "double"}


def copy_artifact(store: LocalStore, manifest_digest: str, folder: Path) -> None:
    """Copy an artifact's files into a new folder that only this user may enter, each verified by its digest."""
    manifest = read_manifest(store, manifest_digest)
    folder.mkdir(mode=0o700)
    for entry in manifest.entries:
        target = folder / entry.name
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        target.write_bytes(store.get_bytes(entry.sha256))
    (folder / "manifest.json").write_bytes(manifest.canonical())


def _run(folder: Path, python: str) -> None:
    command = [python, "-m", "trainer.score", "--artifact", str(folder / "artifact")]
    command += ["--input", str(folder / "in.parquet"), "--output", str(folder / "out.parquet")]
    try:
        done = subprocess.run(
            command, cwd=folder / "code", capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ScoringFailed(
            f"scoring took longer than {DEADLINE_SECONDS:.0f} s", "ask for fewer rows at a time"
        ) from error
    if done.returncode != 0:
        words = "\n".join(done.stderr.strip().splitlines()[-_LINES:])
        raise ScoringFailed(f"the trainer ended with {done.returncode}: {words or 'it said nothing'}", "see its words")


def _scores(file: Path, rows: int) -> NDArray[np.float64]:
    try:
        scores = pq.read_table(file, columns=["score"]).column("score").to_numpy()
    except (OSError, pa.ArrowException) as error:
        raise ScoringFailed(f"the trainer left no scores: {error}", "look at the artifact") from error
    if scores.dtype != np.float64 or len(scores) != rows:
        raise ScoringFailed(f"the trainer gave {len(scores)} {scores.dtype} for {rows} rows", "look at the artifact")
    wrong = np.flatnonzero(~((scores >= 0) & (scores <= 1)))
    if len(wrong):
        raise ScoringFailed(
            f"row {int(wrong[0]) + 1} of {rows} scores {scores[wrong[0]]}, which is no probability; {len(wrong)} do",
            "the model may not serve; look at its gate finite_outputs",
        )
    return scores
