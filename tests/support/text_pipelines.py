"""A small pipeline that learns from text: files in its folder, or a slice of the interpreter's library."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

Change = Callable[[dict[str, Any]], None]

SUITE = {
    "name": "pages",
    "expectations": [
        {
            "type": "expect_column_values_to_match_regex",
            "kwargs": {"column": "path", "regex": "^docs/"},
            "severity": "critical",
        }
    ],
}

STATIC = {"static_from": "2020-01-01T00:00:00Z", "reason": "the files were there before"}


def declaration() -> dict[str, Any]:
    """The attributes of a text pipeline `pages` over the files below `docs/`."""
    columns = {name: {"type": "string", "required": True} for name in ("path", "content", "sha256")}
    return {
        "name": "pages",
        "owner": "team:test",
        "sources": {
            "pages": {
                "files": {"paths": ["docs/**/*.txt"]},
                "format": {"type": "text"},
                "columns": columns | {"bytes": {"type": "int64", "required": True}},
                "row_id": ["path"],
                "keys": ["path"],
                "event_time": STATIC,
                "available_time": STATIC,
                "privacy": {"disposition": "open"},
                "quality": {"suite": "pages.suite.json", "max_quarantined_share": 0.1},
            }
        },
        "text": {
            "source": "pages",
            "document": "path",
            "content": "content",
            "tokenizer": {"kind": "bpe", "vocab": 300},
            "split": {"held_out": 0.3, "valid": 0.2, "near_duplicates": 0.8},
            "context": 32,
        },
        "training": {
            "factory": "model.build",
            "options": {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 32},
            "engine": "ddp",
            "nodes": 1,
            "batch": 4,
            "steps": 6,
            "judge_every": 3,
        },
        "evaluation": {"resamples": 200},
        "promotion": {"gates": [{"gate": "bits_per_byte_over_gzip", "margin": 0.0}, {"gate": "finite_outputs"}]},
    }


def pages(count: int = 12) -> dict[str, str]:
    """Texts by path below the folder, each of a few hundred words of its own."""
    texts: dict[str, str] = {}
    for number in range(count):
        names = [f"name_{number * j % 23}" for j in range(1, 30)]
        texts[f"docs/p{number:02d}.txt"] = "\n".join(
            f"{n} of value {i}, and {n} once more" for i, n in enumerate(names)
        )
    return texts


def write_text_pipeline(
    folder: Path, texts: Mapping[str, str | bytes] | None = None, change: Change | None = None
) -> Path:
    """Write defs.yaml, the suite, a model file and the texts (`pages()` by default); return the folder."""
    attributes = declaration()
    if change is not None:
        change(attributes)
    folder.mkdir(parents=True, exist_ok=True)
    document = {"type": "assets.component.ModelPipeline", "attributes": attributes}
    (folder / "defs.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    (folder / "pages.suite.json").write_text(json.dumps(SUITE), encoding="utf-8")
    (folder / "model.py").write_text("def build(inputs, options):\n    raise NotImplementedError\n", encoding="utf-8")
    for name, text in (pages() if texts is None else texts).items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder
