"""`python -m trainer.score --artifact DIR --input IN.parquet --output OUT.parquet`: probabilities of rows.

The output has one row per input row, in order: `score`, a float64 probability, and `logit`, the float32 that it comes
from. Only the model's input columns are read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.command import run, write_table
from trainer.encoders import EncodingRefused
from trainer.predictor import load_artifact


def score_file(artifact: Path, source: Path, target: Path) -> None:
    """Score the rows of one Parquet file.

    Raises:
        ArtifactRefused, CodeRefused: as `load_artifact`.
        EncodingRefused: the file is no Parquet, or an input column is missing or of another kind.
    """
    predictor = load_artifact(artifact)
    scores = predictor.score(read_columns(source, predictor.inputs.columns))
    write_table(pa.table({"score": scores.probability, "logit": scores.logit}), target)


def read_columns(source: Path, columns: tuple[str, ...]) -> pa.Table:
    """These columns of a Parquet file.

    Raises:
        EncodingRefused: the file is absent or no Parquet, or has no such column.
    """
    try:
        with pq.ParquetFile(source) as file:
            names = file.schema_arrow.names
            for name in columns:
                if names.count(name) != 1:
                    raise EncodingRefused(name, f"stands {names.count(name)} times in {source}")
            return file.read(columns=list(columns), use_threads=False)
    except (FileNotFoundError, pa.ArrowInvalid) as error:
        raise EncodingRefused(str(source), f"no Parquet file: {error}") from error


def main() -> int:
    """Read the arguments and score."""
    parser = argparse.ArgumentParser(prog="python -m trainer.score", description="Score the rows of a Parquet file.")
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    return run(lambda: score_file(given.artifact, given.input, given.output))


if __name__ == "__main__":
    sys.exit(main())
