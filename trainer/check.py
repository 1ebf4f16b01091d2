"""`python -m trainer.check --artifact DIR`: whether an artifact loads from safetensors alone and answers every input.

Prints JSON: `weights_only` (manifest, documents and weights verify and fit the module, and `reference.json` has a
histogram of every input), `finite_outputs` (rows with missing and out-of-range values get a probability; of a language
model: any order of tokens gets finite logits), `problems`. Exit code 0 when it could be checked; 64 when this tree
holds other model code, so that nothing can be said.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from trainer.artifact import TOKENIZER
from trainer.blobs import Json
from trainer.command import run
from trainer.encoders import InputEncoding
from trainer.language import LanguageModel, load_language_model
from trainer.predictor import ArtifactRefused, load_artifact

_EXTREMES: dict[str, tuple[Any, ...]] = {
    "float64": (None, 0.0, -1e308, 1e308, float("inf"), float("-inf"), float("nan"), 5e-324, 1e18),
    "int64": (None, 0, -(2**63), 2**63 - 1, 1),
    "bool": (None, True, False),
    "string": (None, "", "never seen before", "\u0000", "x" * 10_000),
}
_ARROW = {"float64": pa.float64(), "int64": pa.int64(), "bool": pa.bool_(), "string": pa.string()}


def check_artifact(folder: Path) -> dict[str, Json]:
    """Load an artifact, score rows that no data would hold, and say what is wrong.

    Raises:
        CodeRefused: this tree holds other model code.
    """
    try:
        if (folder / TOKENIZER).exists():
            return _check_language(load_language_model(folder))
        predictor = load_artifact(folder)
    except ArtifactRefused as error:
        return {"weights_only": False, "finite_outputs": False, "problems": [str(error)]}
    rows = hostile_rows(predictor.inputs)
    scores = predictor.score(rows).probability
    wrong = np.flatnonzero(~((scores >= 0) & (scores <= 1)))
    problems = [f"row {rows.slice(int(i), 1).to_pylist()[0]!r:.300} scores {scores[i]}" for i in wrong[:10]]
    histograms = predictor.reference.get("features")
    known = set(histograms) if isinstance(histograms, dict) else set[str]()
    lost = [name for name in predictor.inputs.columns if name not in known]
    if lost:
        problems.append(f"reference.json has no histogram of {lost}")
    return {"weights_only": not lost, "finite_outputs": not len(wrong), "problems": problems}


def _check_language(model: LanguageModel) -> dict[str, Json]:
    """Give a model tokens in orders that no text has, a whole context of each."""
    problems: list[str] = []
    with torch.inference_mode():
        for name, tokens in hostile_tokens(model).items():
            logits = model.module(tokens)
            wanted = (*tokens.shape, model.tokenizer.vocab)
            if tuple(logits.shape) != wanted:
                problems.append(f"{name}: logits of the form {tuple(logits.shape)}, expected {wanted}")
            elif not bool(torch.isfinite(logits).all()):
                problems.append(f"{name}: a logit is no finite number")
    return {"weights_only": True, "finite_outputs": not problems, "problems": problems}


def hostile_tokens(model: LanguageModel) -> dict[str, Tensor]:
    """Sequences [1, context] by name: one token again and again, all tokens in order, tokens drawn alike."""
    vocab, context = model.tokenizer.vocab, model.context
    drawn = torch.randint(vocab, (1, context), generator=torch.Generator().manual_seed(0))
    return {
        "one byte": torch.zeros((1, context), dtype=torch.int64),
        "ends of documents": torch.full((1, context), model.end_token),
        "the last token": torch.full((1, context), vocab - 1),
        "tokens in order": (torch.arange(context) % vocab)[None],
        "drawn tokens": drawn,
        "one token": torch.full((1, 1), model.end_token),
    }


def hostile_rows(inputs: InputEncoding) -> pa.Table:
    """Rows in which one input is extreme and the others are ordinary, missing, or extreme too."""
    kinds = {item.name: item.type for item in (*inputs.categorical, *inputs.numeric)}
    ordinary: dict[str, Any] = {c.name: _typed(c.values[0], c.type) if c.values else None for c in inputs.categorical}
    ordinary |= {n.name: _typed(n.mean, n.type) for n in inputs.numeric}
    rows: list[dict[str, Any]] = [ordinary, dict.fromkeys(kinds)]
    for name, kind in kinds.items():
        rows += [{**ordinary, name: value} for value in _EXTREMES[kind]]
    longest = max(len(values) for values in _EXTREMES.values())
    for turn in range(longest):
        rows.append({name: _EXTREMES[kind][turn % len(_EXTREMES[kind])] for name, kind in kinds.items()})
    return _table(rows, kinds)


def _typed(value: object, kind: str) -> object:
    number = float(str(value)) if kind in ("int64", "bool") and str(value) not in ("true", "false") else 0.0
    if kind == "int64":
        return round(number)
    if kind == "bool":
        return value == "true" or number >= 0.5
    return value


def _table(rows: Sequence[dict[str, Any]], kinds: dict[str, str]) -> pa.Table:
    return pa.table({name: pa.array([row[name] for row in rows], _ARROW[kind]) for name, kind in kinds.items()})


def main() -> int:
    """Read the arguments and check."""
    parser = argparse.ArgumentParser(prog="python -m trainer.check", description="Check an artifact before it serves.")
    parser.add_argument("--artifact", type=Path, required=True)
    given = parser.parse_args()
    return run(lambda: print(json.dumps(check_artifact(given.artifact))))


if __name__ == "__main__":
    sys.exit(main())
