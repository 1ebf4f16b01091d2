"""Stands in for `trainer.worker` like `toy_rank`, and leaves a logistic regression that can be evaluated and served.

Its weights are written, not learned: later shops sell more often, which the rows say too. While the file `worse` lies
in the folder of all runs it says the opposite, so that the gates refuse what comes out. Its reference is counted on the
run's own rows, as a real rank counts it.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import safetensors.numpy

from trainer import toy_rank  # pyright: ignore[reportAttributeAccessIssue] - laid beside it in the test's code tree
from trainer.blobs import Json, Manifest, ManifestEntry, canonical_json, digest_bytes
from trainer.data import load_rows
from trainer.encoders import CategoricalInput, InputEncoding, NumericInput
from trainer.events import EventSink
from trainer.reference import feature_histograms, reference_document
from trainer.spec import parse_attempt, parse_run

SHOPS = ("s0", "s1", "s2", "s3")
NUMERIC = ("by_person__count_9d", "by_person__mean_9d", "by_person__share_9d", "by_shop__share_9d")
INPUTS = InputEncoding(
    (CategoricalInput("shop", "string", SHOPS),),
    tuple(NumericInput(n, "float64", 0.0, 1.0, missing=True) for n in NUMERIC),
)
BIAS = -1.0


def finish(sink: EventSink, run_dir: Path, folder: Path, seed: int, run_id: str) -> None:
    sink.emit("epoch", {"epoch": 1, "train_loss": 0.5, "valid_loss": 0.6, "valid_auc": 0.7, "best": True})
    target = folder / "artifact" / "logistic"
    target.mkdir(parents=True)
    sign = -1.0 if (run_dir.parent / "worse").exists() else 1.0
    entries: list[ManifestEntry] = []
    for name, data in _files(sign, run_id, _reference(sink, run_dir, sign)).items():
        (target / name).write_bytes(data)
        entries.append(ManifestEntry(name, len(data), digest_bytes(data)))
    manifest = Manifest(tuple(sorted(entries, key=lambda e: e.name)), {"kind": "logistic"})
    (target / "manifest.json").write_bytes(manifest.canonical())
    sink.emit("metrics", {"valid_loss": 0.6, "valid_auc": 0.7})
    sink.emit("artifact", {"name": "logistic", "manifest": manifest.digest, "path": str(target)})


def _files(sign: float, run_id: str, reference: dict[str, Json]) -> dict[str, bytes]:
    contract: dict[str, Json] = {
        "format": "headway.contract/1",
        "inputs": [
            {"name": "shop", "type": "string", "values": list(SHOPS), "required": True, "nullable": True},
            *({"name": n, "type": "float64", "required": True, "nullable": True} for n in NUMERIC),
        ],
        "output": {"name": "probability", "type": "float64", "range": [0, 1]},
        "feature_set": None,
        "semantics_version": 1,
    }
    model: dict[str, Json] = {
        "format": "headway.model/1",
        "kind": "logistic",
        "factory": None,
        "inputs": INPUTS.to_json(),
        "output": {"name": "probability"},
    }
    # The first two rows stand for a missing and an unknown shop.
    by_shop = np.array([0, 0, *range(len(SHOPS))], np.float32)[:, None] * np.float32(sign)
    weights = {
        "linear.weight": np.zeros((1, 2 * len(NUMERIC)), np.float32),
        "linear.bias": np.full(1, BIAS, np.float32),
        "categories.0.weight": by_shop,
    }
    return {
        "weights.safetensors": safetensors.numpy.save(weights),
        "model.json": canonical_json(model),
        "contract.json": canonical_json(contract),
        "reference.json": canonical_json(reference),
        "metrics.json": json.dumps({"run": run_id}).encode(),
    }


def _reference(sink: EventSink, run_dir: Path, sign: float) -> dict[str, Json]:
    attempt = parse_attempt(Path(os.environ["TRAINER_ATTEMPT"]).read_bytes())
    data = parse_run((run_dir / "spec.json").read_bytes()).rows
    rows = load_rows(data, Path(attempt.store_root), sink.beat)
    places = {shop: place for place, shop in enumerate(SHOPS)}
    logits = BIAS + sign * np.array([places[shop] for shop in rows.valid.column("shop").to_pylist()], np.float64)
    scores = 1 / (1 + np.exp(-logits))
    return reference_document(feature_histograms(rows.train, INPUTS), rows.train.num_rows, scores, "valid")


if __name__ == "__main__":
    toy_rank.finish = finish
    sys.exit(toy_rank.main())
