"""A tiny language model's artifact, and held-out documents for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from trainer.artifact import write_language
from trainer.blobs import code_tree_digest
from trainer.models.factory import build_model, code_parts
from trainer.models.inputs import TokenInputs
from trainer.spec import BatchSpec, ModelSpec, RunSpec, TokenDataSpec, TokenFile
from trainer.tokenizer import Tokenizer
from trainer.tokens import TokenDataset, TokenExamples

ROOT = Path(__file__).resolve().parents[2]
FILE = "pipelines/stdlib_lm/model.py"
CONTEXT = 16
OPTIONS: dict[str, Any] = {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 16}
TOKENIZER = Tokenizer(((32, 32), (101, 108), (257, 257)))
TEXTS = {"a.py": b"import os\n\n\ndef first():\n    return os.name\n", "b.py": "x = '\u00e9l'\n".encode(), "c.py": b""}
LEARNED = {"d.py": b"import sys\n\n\ndef second():\n    return sys.path\n" * 3}


def language_spec(tokenizer: Tokenizer = TOKENIZER) -> RunSpec:
    """A run spec whose token files are named and not there."""
    files = tuple(TokenFile(split, "sha256:" + "ab" * 32, 200, 100) for split in ("train", "valid", "held_out"))
    return RunSpec(
        pipeline="stdlib_lm",
        data=TokenDataSpec(files, tokenizer.digest, tokenizer.vocab, CONTEXT, tokenizer.end_token),
        model=ModelSpec(
            FILE,
            "build",
            code_tree_digest(ROOT, code_parts("stdlib_lm")),
            options={**OPTIONS, "vocab": tokenizer.vocab, "sequence": CONTEXT},
        ),
        seed=3,
        batch=BatchSpec(4),
    )


def write_model(folder: Path, *, overflows: bool = False, tokenizer: Tokenizer = TOKENIZER) -> Path:
    """The artifact of an untrained model; one that `overflows` has finite weights that give infinite logits."""
    spec = language_spec(tokenizer)
    inputs = TokenInputs(tokenizer.vocab, CONTEXT, tokenizer.end_token, tokenizer.digest)
    torch.manual_seed(3)
    state = build_model(spec, inputs, ROOT).state_dict()
    if overflows:
        state["norm.weight"] = torch.full_like(state["norm.weight"], 3e38)
        state["head.weight"] = torch.full_like(state["head.weight"], 3e38)
    nothing = TokenExamples([], CONTEXT)
    dataset = TokenDataset(nothing, nothing, inputs, {"tokens_train": 0}, tokenizer.dump())
    write_language(state, spec, dataset, {"valid_loss": 1.0}, folder, run_id="r1", code_root=ROOT)
    return folder


def write_plan(folder: Path, artifact: Path, **changes: Any) -> Path:  # noqa: ANN401
    """A plan of `trainer.lm_evaluate` over `TEXTS`; `split`, `groups` and `texts` change the documents."""
    texts: dict[str, bytes] = changes.pop("texts", TEXTS)
    split = changes.pop("split", "held_out")
    groups = changes.pop("groups", list(texts))
    folder.mkdir(parents=True, exist_ok=True)
    documents = {
        "document": list(texts),
        "group": groups,
        "split": [split] * len(texts),
        "content": list(texts.values()),
    }
    pq.write_table(pa.table(documents), folder / "held_out.parquet")
    learned = {"group": list(LEARNED), "content": list(LEARNED.values())}
    pq.write_table(pa.table(learned), folder / "learned.parquet")
    plan: dict[str, Any] = {
        "artifact": str(artifact),
        "code_root": str(ROOT),
        "documents": str(folder / "held_out.parquet"),
        "learned": str(folder / "learned.parquet"),
        "stride": 0,
        "baselines": True,
        "samples": {"prompts": ["def "], "tokens": 5, "temperature": 0.8, "seed": 1},
    }
    (folder / "plan.json").write_text(json.dumps(plan | changes))
    return folder / "plan.json"
