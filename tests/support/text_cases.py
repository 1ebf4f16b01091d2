"""Small evaluations of language models for tests of the registry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headway.registry.evaluation import SCORES_FILE
from headway.registry.text_evaluation import MEASURED, ScoredDocuments

TEXT_GATES = (
    "bits_per_byte_over_gzip",
    "bits_per_byte_over_champion",
    "finite_outputs",
    "contract",
    "leakage_proof",
    "weights_only",
)


def text_policy(*gates: str, margin: float = 0.0, **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    """A policy document of a language model that lists these gates (default: all of text)."""
    document: dict[str, Any] = {
        "format": "headway.policy/1",
        "gates": [{"gate": name, "margin": margin, "unless": ""} for name in gates or TEXT_GATES],
        "segments": {},
        "historical_rate": [],
        "resamples": 200,
        "confidence": 0.95,
        "allow_immediate": True,
        "evidence_max_age": "30d",
    }
    return document | changes


def documents(
    count: int = 30,
    rates: Mapping[str, float] | None = None,
    seed: int = 1,
    **changes: Any,  # noqa: ANN401
) -> ScoredDocuments:
    """Documents that each coder needs about `rates` bits per byte for. Champion only when named."""
    generator = np.random.default_rng(seed)
    size = generator.integers(500, 20_000, count).astype(np.int64)
    hardness = generator.normal(1.0, 0.1, count)
    hardness /= np.average(hardness, weights=size)
    wanted = {"candidate": 1.8, "gzip": 2.2, "lzma": 2.1} | dict(rates or {})
    values: dict[str, Any] = {
        "digest": "sha256:" + "cd" * 32,
        "unit": np.arange(count, dtype=np.int64),
        "size": size,
        "scores": {name: rate * size * (hardness + generator.normal(0, 0.01, count)) for name, rate in wanted.items()},
        "streams": {"gzip": int(size.sum() * 2.1 / 8), "lzma": int(size.sum() * 1.9 / 8)},
    }
    return ScoredDocuments(**values | changes)


def write_documents(folder: Path, scored: ScoredDocuments) -> Path:
    """The documents as `trainer.lm_evaluate` writes them."""
    columns: dict[str, Any] = {
        "document": [f"d{i}" for i in range(len(scored.size))],
        "group": [f"g{unit}" for unit in scored.unit],
        "bytes": scored.size,
    }
    columns |= {f"bits_{name}": bits for name, bits in scored.scores.items()}
    measured = json.dumps({**scored.measured, "streams": dict(scored.streams)})
    table = pa.table(columns).replace_schema_metadata({MEASURED: measured})
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / SCORES_FILE)
    return folder
