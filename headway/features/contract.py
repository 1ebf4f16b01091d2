"""Digests that pin what a feature set means (its contract) and the code that computes it."""

from __future__ import annotations

from pathlib import Path

from headway.loading import Pipeline, tree_digest
from trainer.blobs import Json, digest_json

_ROOT = Path(__file__).resolve().parent
# What decides a cell. Orchestration, storage and the proof are left out: changing them makes no other features.
_DECISIVE = ("clocks.py", "labels.py", "plan.py", "reach.py", "assemble.py")


def contract(pipeline: Pipeline) -> dict[str, Json]:
    """What the features mean: label, views and the time and key declarations of the sources they read."""
    spec = pipeline.spec
    used = {v.source for v in spec.features.views.values()} | {c.source for c in spec.features.custom.values()}
    fields = {"columns", "row_id", "keys", "event_time", "available_time", "sequence", "deleted", "partition"}
    sources = {n: spec.sources[n].model_dump(mode="json", include=fields) for n in sorted(used | {spec.label.source})}
    return {
        "label": spec.label.model_dump(mode="json"),
        "features": spec.features.model_dump(mode="json"),
        "sources": sources,
    }


def contract_digest(pipeline: Pipeline) -> str:
    """Digest of the contract's canonical JSON."""
    return digest_json(contract(pipeline))


def code_digest(pipeline: Pipeline) -> str:
    """Digest of the code that computes features: the pipeline's functions and what of the platform decides a cell."""
    functions = [d.function for d in pipeline.spec.features.derived.values()]
    functions += [c.function for c in pipeline.spec.features.custom.values()]
    modules = sorted({f.partition(".")[0] for f in functions})
    files = {m: (pipeline.folder / f"{m}.py").read_text(encoding="utf-8") for m in modules}
    platform = {name: (_ROOT / name).read_text(encoding="utf-8") for name in _DECISIVE}
    return digest_json({"kernel": tree_digest(_ROOT / "kernel"), "platform": platform, "functions": files})
