"""Scores rows with a registered version in a process of the trainer, which is where torch lives.

The artifact, and the code tree of the run that made it, are copied out of the store by digest into a private folder
first: what is verified is what is loaded, and an old version is run by its own code.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headway.catalog.registry_facts import ModelVersion
from headway.errors import HeadwayError
from headway.registry.trial import copy_artifact
from headway.services import Services
from headway.training.stage import stage_code
from headway.training.trainer_process import run_trainer
from trainer.spec import parse_run

# A first import of torch takes seconds on a busy machine; a month of rows takes a minute on one core.
DEADLINE_SECONDS = 1_800.0


class ContractNotMet(HeadwayError):
    """The model's contract names an input that the features do not give, or of another type."""


class ScoringFailed(HeadwayError):
    """The trainer's answer is not one finite probability per row."""


def score_rows(services: Services, version: ModelVersion, values: pa.Table) -> NDArray[np.float64]:
    """The probability of each row of a values table, float64 of shape (rows,).

    Args:
        services: the store holds the artifact and the code; the catalog names them.
        version: the registered version, whose contract names the inputs.
        values: feature values, one row per request; columns that are no inputs are kept out.

    Raises:
        ContractNotMet: an input of the contract is not there, or of another type.
        BlobMissing, BlobCorrupt, InvalidManifest, StagedCodeDiffers: the store does not hold what the registry says.
        TrainerFailed: names the exit status and the process's last words.
        ScoringFailed: the answer is not one finite probability per row.
    """
    inputs = model_inputs(version.contract, values)
    with tempfile.TemporaryDirectory(prefix="headway-score-") as private:
        folder = Path(private)
        artifact, given, said = folder / "artifact", folder / "in.parquet", folder / "out.parquet"
        copy_artifact(services.store, version.manifest_digest, artifact)
        code = stage_code(services.store, _code_manifest(services, version), folder / "code")
        pq.write_table(inputs, given)
        arguments = ["--artifact", str(artifact), "--input", str(given), "--output", str(said)]
        run_trainer("trainer.score", arguments, code, DEADLINE_SECONDS)
        return _scores(said, inputs.num_rows)


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
