"""Stands in for `trainer.worker` like `toy_rank`, and leaves a logistic regression that can be evaluated and served.

Its weights are written, not learned: later shops sell more often, which the rows say too. While the file `worse` lies
in the folder of all runs it says the opposite, so that the gates refuse what comes out.
"""

import json
import sys
from pathlib import Path

import numpy as np
import safetensors.numpy

from trainer import toy_rank  # pyright: ignore[reportAttributeAccessIssue] - laid beside it in the test's code tree
from trainer.blobs import Json, Manifest, ManifestEntry, canonical_json, digest_bytes
from trainer.events import EventSink

SHOPS = ("s0", "s1", "s2", "s3")
NUMERIC = ("by_person__count_9d", "by_person__mean_9d", "by_person__share_9d", "by_shop__share_9d")


def finish(sink: EventSink, run_dir: Path, folder: Path, seed: int, run_id: str) -> None:
    sink.emit("epoch", {"epoch": 1, "train_loss": 0.5, "valid_loss": 0.6, "valid_auc": 0.7, "best": True})
    target = folder / "artifact" / "logistic"
    target.mkdir(parents=True)
    sign = -1.0 if (run_dir.parent / "worse").exists() else 1.0
    entries: list[ManifestEntry] = []
    for name, data in _files(sign, run_id).items():
        (target / name).write_bytes(data)
        entries.append(ManifestEntry(name, len(data), digest_bytes(data)))
    manifest = Manifest(tuple(sorted(entries, key=lambda e: e.name)), {"kind": "logistic"})
    (target / "manifest.json").write_bytes(manifest.canonical())
    sink.emit("metrics", {"valid_loss": 0.6, "valid_auc": 0.7})
    sink.emit("artifact", {"name": "logistic", "manifest": manifest.digest, "path": str(target)})


def _files(sign: float, run_id: str) -> dict[str, bytes]:
    shop: dict[str, Json] = {"name": "shop", "type": "string", "values": list(SHOPS)}
    contract: dict[str, Json] = {
        "format": "headway.contract/1",
        "inputs": [
            {**shop, "required": True, "nullable": True},
            *({"name": n, "type": "float64", "required": True, "nullable": True} for n in NUMERIC),
        ],
        "output": {"name": "probability", "type": "float64", "range": [0, 1]},
        "feature_set": None,
        "semantics_version": 1,
    }
    numbers: list[Json] = [{"name": n, "type": "float64", "mean": 0.0, "std": 1.0, "missing": True} for n in NUMERIC]
    model: dict[str, Json] = {
        "format": "headway.model/1",
        "kind": "logistic",
        "factory": None,
        "inputs": {"categorical": [shop], "numeric": numbers},
        "output": {"name": "probability"},
    }
    # The first two rows stand for a missing and an unknown shop.
    by_shop = np.array([0, 0, *range(len(SHOPS))], np.float32)[:, None] * np.float32(sign)
    weights = {
        "linear.weight": np.zeros((1, 2 * len(NUMERIC)), np.float32),
        "linear.bias": np.full(1, -1.0, np.float32),
        "categories.0.weight": by_shop,
    }
    return {
        "weights.safetensors": safetensors.numpy.save(weights),
        "model.json": canonical_json(model),
        "contract.json": canonical_json(contract),
        "reference.json": canonical_json({"format": "headway.reference/1", "features": _histograms()}),
        "metrics.json": json.dumps({"run": run_id}).encode(),
    }


def _histograms() -> dict[str, Json]:
    counts: list[Json] = [50, 50, 50, 50]
    found: dict[str, Json] = {
        "shop": {"kind": "categorical", "values": list(SHOPS), "counts": counts, "other": 0, "missing": 0}
    }
    for name in NUMERIC:
        found[name] = {"kind": "numeric", "edges": [0.2, 0.4, 0.6], "counts": counts, "missing": 0}
    return found


if __name__ == "__main__":
    toy_rank.finish = finish
    sys.exit(toy_rank.main())
