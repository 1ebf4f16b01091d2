"""What the trainer's commands share: a refusal is one line on stderr and exit code 64; anything else is a stack."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from trainer.blobs import BlobError, Json, canonical_json
from trainer.data import DataRefused
from trainer.encoders import EncodingRefused
from trainer.models.factory import CodeRefused
from trainer.predictor import ArtifactRefused
from trainer.spec import ExitCode, SpecRefused

T = TypeVar("T")
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


def run_planned(module: str, description: str, work: Callable[[bytes, Path], None]) -> int:
    """Run `python -m <module> --plan FILE --output DIR`: `work` gets the plan's bytes and the folder."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    return run(lambda: work(given.plan.read_bytes(), given.output))


def plan_document(content: bytes) -> object:
    """The JSON value of a plan.

    Raises:
        SpecRefused: it is no JSON.
    """
    try:
        return json.loads(content)
    except ValueError as error:
        raise SpecRefused("plan", f"not JSON: {error}") from error


@dataclass
class TimedReport:
    """A report that says how many seconds each part of the work took."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def timed(self, part: str, work: Callable[[], T]) -> T:
        """Do one part of the work and note how long it took."""
        start = time.monotonic()
        done = work()
        self.seconds[part] = round(time.monotonic() - start, 3)
        return done

    def write(self, table: pa.Table, output: Path) -> None:
        """Write `scores.parquet`, and this report as `report.json` beside it."""
        output.mkdir(parents=True, exist_ok=True)
        write_table(table, output / "scores.parquet")
        (output / "report.json").write_bytes(canonical_json(cast("dict[str, Json]", vars(self))))


def write_table(table: pa.Table, path: Path) -> None:
    """Write a Parquet file that appears whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    pq.write_table(table, partial, compression="zstd")
    partial.rename(path)
