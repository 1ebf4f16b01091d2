"""Writes a trained model: weights as safetensors, everything else as JSON, and a manifest over all of it.

The manifest's digest is the model's identity. Nothing in an artifact is code: `model.json` names the factory file and
the digest of its code, and whoever loads the artifact builds the module from a tree with that digest.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.blobs import Json, Manifest, ManifestEntry, canonical_json, digest_bytes
from trainer.data import Dataset, Split
from trainer.encoders import InputEncoding
from trainer.models.factory import build_model, factory_digest
from trainer.models.inputs import TokenInputs
from trainer.reference import reference_document
from trainer.spec import RunSpec

if TYPE_CHECKING:
    from trainer.tokens import TokenDataset

MODEL_FORMAT = "headway.model/1"
CONTRACT_FORMAT = "headway.contract/1"
SEMANTICS_VERSION = 1

MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
MODEL = "model.json"
CONTRACT = "contract.json"
REFERENCE = "reference.json"
METRICS = "metrics.json"
TOKENIZER = "tokenizer.json"

OUTPUT = "probability"
LANGUAGE_OUTPUT = "logits"

_BATCH = 4096


class ArtifactExists(ValueError):
    """The folder already holds a whole artifact; artifacts are never written over."""


def write_network(
    state: Mapping[str, Tensor],
    spec: RunSpec,
    dataset: Dataset,
    metrics: Mapping[str, Json],
    folder: Path,
    *,
    run_id: str,
    code_root: Path,
) -> Manifest:
    """Write the artifact of a trained network.

    Args:
        state: The trained weights, by the names of the module that the spec's factory builds.
        spec: The run.
        dataset: What it was trained on.
        metrics: Final metrics; a number that is not finite becomes null.
        folder: Where to; it holds no artifact yet.
        run_id: The run that trained it.
        code_root: The tree of the factory.

    Raises:
        ArtifactExists: `folder` holds a manifest.
        CodeRefused: the tree is not the one that the spec names.
    """
    module = build_model(spec, dataset.inputs, code_root)
    _load(module, state)
    return write_artifact("network", module, _factory(spec, code_root), spec, dataset, metrics, folder, run_id)


def write_language(
    state: Mapping[str, Tensor],
    spec: RunSpec,
    dataset: TokenDataset,
    metrics: Mapping[str, Json],
    folder: Path,
    *,
    run_id: str,
    code_root: Path,
) -> Manifest:
    """Write the artifact of a trained language model, its tokenizer with it; as `write_network`."""
    module = build_model(spec, dataset.inputs, code_root)
    _load(module, state)
    documents: dict[str, Json] = {
        MODEL: {
            "format": MODEL_FORMAT,
            "kind": "language",
            "factory": _factory(spec, code_root),
            "inputs": dataset.inputs.to_json(),
            "output": {"name": LANGUAGE_OUTPUT},
        },
        CONTRACT: language_contract(dataset.inputs),
        METRICS: _finite(dict(metrics)),
    }
    files = {name: canonical_json(document) for name, document in documents.items()}
    files[TOKENIZER] = dataset.tokenizer
    files[WEIGHTS] = weight_bytes(module)
    return _write_files(folder, files, _facts("language", spec, run_id))


def write_artifact(
    kind: str,
    module: nn.Module,
    factory: Mapping[str, Json] | None,
    spec: RunSpec,
    dataset: Dataset,
    metrics: Mapping[str, Json],
    folder: Path,
    run_id: str,
) -> Manifest:
    """Write the artifact of a trained module of either kind; as `write_network`."""
    documents: dict[str, Json] = {
        MODEL: model_document(kind, factory, dataset.inputs),
        CONTRACT: contract_document(dataset.inputs),
        REFERENCE: _reference(module, dataset),
        METRICS: _finite({**metrics, "rows": dict(dataset.counts)}),
    }
    files = {name: canonical_json(document) for name, document in documents.items()}
    files[WEIGHTS] = weight_bytes(module)
    return _write_files(folder, files, _facts(kind, spec, run_id))


def _load(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a module its weights. An engine may name a weight that two layers share only once."""
    own = module.state_dict()
    named = {tensor.data_ptr(): name for name, tensor in own.items() if name in state}
    shared = {n: state[named[t.data_ptr()]] for n, t in own.items() if n not in state and t.data_ptr() in named}
    module.load_state_dict({**state, **shared})


def _factory(spec: RunSpec, code_root: Path) -> dict[str, Json]:
    return {
        "file": spec.model.file,
        "function": spec.model.function,
        "code_digest": factory_digest(code_root, spec.model.file),
        "options": dict(spec.model.options),
    }


def _facts(kind: str, spec: RunSpec, run_id: str) -> dict[str, Json]:
    return {"kind": kind, "run_id": run_id, "spec_digest": spec.digest, "code_digest": spec.model.code_digest}


def model_document(kind: str, factory: Mapping[str, Json] | None, inputs: InputEncoding) -> dict[str, Json]:
    """How to rebuild the module and encode its inputs."""
    return {
        "format": MODEL_FORMAT,
        "kind": kind,
        "factory": factory,
        "inputs": inputs.to_json(),
        "output": {"name": OUTPUT},
    }


def contract_document(inputs: InputEncoding) -> dict[str, Json]:
    """What a caller has to give and gets.

    Every input column must be there and every value may be null: missing values have their encoding. `values` are the
    categories that training knew; others are accepted and count as "other".
    """
    listed: list[Json] = [
        {"name": c.name, "type": c.type, "required": True, "nullable": True, "values": list(c.values)}
        for c in inputs.categorical
    ]
    listed += [{"name": n.name, "type": n.type, "required": True, "nullable": True} for n in inputs.numeric]
    return {
        "format": CONTRACT_FORMAT,
        "inputs": listed,
        "output": {"name": OUTPUT, "type": "float64", "range": [0, 1]},
        "feature_set": None,
        "semantics_version": SEMANTICS_VERSION,
    }


def language_contract(inputs: TokenInputs) -> dict[str, Json]:
    """What a caller of a language model gives and gets: any text; logits of the token after each of its tokens."""
    return {
        "format": CONTRACT_FORMAT,
        "inputs": [{"name": "text", "type": "string", "required": True, "nullable": False}],
        "output": {"name": LANGUAGE_OUTPUT, "type": "float32", "shape": ["tokens", inputs.vocab]},
        "feature_set": None,
        "semantics_version": SEMANTICS_VERSION,
    }


def weight_bytes(module: nn.Module) -> bytes:
    """The module's state as one safetensors file; the same weights give the same bytes.

    A weight that two layers share stands under both names: the file says what each layer has.
    """
    kept = {n: t.detach().cpu().contiguous() for n, t in module.state_dict().items()}
    places = [t.data_ptr() for t in kept.values()]
    return safetensors.torch.save({n: t.clone() if places.count(t.data_ptr()) > 1 else t for n, t in kept.items()})


def batch_logits(module: nn.Module, split: Split) -> NDArray[np.float32]:
    """Logits [rows] of a split in large batches: for statistics. Their last bits depend on the batch."""
    module.eval()
    parts: list[NDArray[np.float32]] = [np.empty(0, np.float32)]
    with torch.inference_mode():
        for start in range(0, len(split), _BATCH):
            numeric = torch.from_numpy(split.numeric[start : start + _BATCH])
            categorical = torch.from_numpy(split.categorical[start : start + _BATCH])
            parts.append(module(numeric, categorical).numpy())
    return np.concatenate(parts)


def probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """The logistic function in float64, one value at a time, so that no value's bits depend on its neighbours."""
    return np.array([_probability(float(logit)) for logit in logits], dtype=np.float64)


def _probability(logit: float) -> float:
    if logit >= 0:
        return 1.0 / (1.0 + math.exp(-logit))
    growth = math.exp(logit)
    return growth / (1.0 + growth)


def _reference(module: nn.Module, dataset: Dataset) -> dict[str, Json]:
    rows, split = ("valid", dataset.valid) if len(dataset.valid) else ("train", dataset.train)
    scores = probabilities(batch_logits(module, split))
    return reference_document(dataset.reference, len(dataset.train), scores, rows)


def _finite(value: Json) -> Json:
    """The value with every number that JSON cannot say as null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _write_files(folder: Path, files: Mapping[str, bytes], facts: Mapping[str, Json]) -> Manifest:
    """Write all files, then the manifest: a folder with a manifest is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MANIFEST).exists():
        raise ArtifactExists(f"{folder} already holds an artifact")
    entries: list[ManifestEntry] = []
    for name, content in files.items():
        _write(folder / name, content)
        media_type = "application/json" if name.endswith(".json") else "application/octet-stream"
        entries.append(ManifestEntry(name, len(content), digest_bytes(content), media_type))
    manifest = Manifest(tuple(entries), facts)
    _sync(folder)
    _write(folder / f".{MANIFEST}", manifest.canonical())
    (folder / f".{MANIFEST}").rename(folder / MANIFEST)
    _sync(folder)
    return manifest


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as target:
        target.write(content)
        target.flush()
        os.fsync(target.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
