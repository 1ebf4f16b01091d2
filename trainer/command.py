"""What the trainer's commands share: a refusal is one line on stderr and exit code 64; anything else is a stack."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from trainer.blobs import BlobError
from trainer.data import DataRefused
from trainer.encoders import EncodingRefused
from trainer.models.factory import CodeRefused
from trainer.predictor import ArtifactRefused
from trainer.spec import ExitCode, SpecRefused

REFUSALS = (ArtifactRefused, BlobError, CodeRefused, DataRefused, EncodingRefused, SpecRefused)


def run(command: Callable[[], None]) -> int:
    """Run a command with one torch thread and deterministic kernels, and return its exit code."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        command()
    except REFUSALS as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.REFUSED_SPEC
    return ExitCode.DONE


def write_table(table: pa.Table, path: Path) -> None:
    """Write a Parquet file that appears whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    pq.write_table(table, partial, compression="zstd")
    partial.rename(path)
