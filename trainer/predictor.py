"""Loads an artifact and scores rows with it.

The bytes that are verified are the bytes that are used: every file is read once into memory, without following links,
its digest is compared with the manifest's, and everything is parsed from there. Nobody can swap a file in between.

Each row is scored in a batch of its own, through the same kernels and from the same aligned buffers. Matrix products
pick their kernel by shape and add in another order for another shape, so a larger batch would make a row's last bits
depend on its neighbours.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import nn

from trainer.artifact import (
    CONTRACT,
    CONTRACT_FORMAT,
    LANGUAGE_OUTPUT,
    MANIFEST,
    METRICS,
    MODEL,
    MODEL_FORMAT,
    OUTPUT,
    REFERENCE,
    TOKENIZER,
    WEIGHTS,
    contract_document,
    language_contract,
    probabilities,
)
from trainer.blobs import InvalidManifest, Json, Manifest, canonical_json, digest_bytes, parse_manifest
from trainer.encoders import EncodingRefused, InputEncoding, encoding_from_json
from trainer.models.factory import CodeRefused, factory_digest, load_factory, make_module
from trainer.models.inputs import Inputs, TokenInputs
from trainer.models.logistic import LogisticRegression
from trainer.spec import SpecRefused
from trainer.weights import WeightsRefused, read_weights

CODE_ROOT = Path(__file__).resolve().parents[1]
"""The tree that this code runs from."""

FILES = frozenset({WEIGHTS, MODEL, CONTRACT, REFERENCE, METRICS})
LANGUAGE_FILES = frozenset({WEIGHTS, MODEL, CONTRACT, METRICS, TOKENIZER})
KINDS = ("network", "logistic")

MAX_FILE_BYTES = 1 << 31
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ArtifactRefused(ValueError):
    """An artifact that must not be used; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Scores:
    """`probability` [rows] in float64 and the `logit` [rows] that it comes from."""

    probability: NDArray[np.float64]
    logit: NDArray[np.float32]


@dataclass(frozen=True)
class Predictor:
    """A loaded model: its manifest, kind, input encoding, documents and module in evaluation mode."""

    manifest: Manifest
    kind: str
    inputs: InputEncoding
    contract: Mapping[str, Json]
    reference: Mapping[str, Json]
    module: nn.Module

    def score(self, table: pa.Table) -> Scores:
        """Score every row of `table` on its own, in order; columns other than the inputs are not looked at.

        Raises:
            EncodingRefused: an input column is missing or has another kind of type.
        """
        numeric, categorical = self.inputs.encode(table)
        logits = np.empty(table.num_rows, dtype=np.float32)
        rows = zip(torch.from_numpy(numeric), torch.from_numpy(categorical), strict=True)
        # Slices of a matrix are not aligned alike, and kernels may add in another order for another alignment.
        number = torch.zeros((1, numeric.shape[1]), dtype=torch.float32)
        code = torch.zeros((1, categorical.shape[1]), dtype=torch.int64)
        with torch.inference_mode():
            for index, (numbers, codes) in enumerate(rows):
                number.copy_(numbers)
                code.copy_(codes)
                logits[index] = self.module(number, code).item()
        return Scores(probabilities(logits), logits)


def load_artifact(folder: Path, code_root: Path = CODE_ROOT) -> Predictor:
    """Verify an artifact and load its model.

    Args:
        folder: Holds `manifest.json`, every file that it lists, and nothing besides.
        code_root: The tree from which a network's module is built.

    Raises:
        ArtifactRefused: a file is missing, altered, added or of another form, or the weights do not fit the module.
        CodeRefused: the tree holds other model code than the artifact was trained with.
    """
    manifest, files = read_artifact(folder)
    model = _document(files[MODEL], MODEL)
    kind = _required(model, MODEL, format=MODEL_FORMAT, output={"name": OUTPUT}).get("kind")
    if kind not in KINDS or manifest.facts.get("kind") != kind:
        raise ArtifactRefused(f"{MODEL}: kind {kind!r:.40}, the manifest says {manifest.facts.get('kind')!r:.40}")
    try:
        inputs = encoding_from_json(model.get("inputs"))
    except EncodingRefused as error:
        raise ArtifactRefused(f"{MODEL}: {error}") from error
    contract = _required(_document(files[CONTRACT], CONTRACT), CONTRACT, format=CONTRACT_FORMAT)
    if contract.get("inputs") != json.loads(canonical_json(contract_document(inputs)["inputs"])):
        raise ArtifactRefused(f"{CONTRACT}: its inputs are not those of {MODEL}")
    if (model.get("factory") is None) != (kind == "logistic"):
        raise ArtifactRefused(f"{MODEL}: kind {kind!r} with factory {model.get('factory')!r:.200}")
    module = _module(model.get("factory"), inputs, code_root)
    try:
        module.load_state_dict(read_weights(files[WEIGHTS], module.state_dict()))
    except WeightsRefused as error:
        raise ArtifactRefused(f"{WEIGHTS}: {error}") from error
    return Predictor(manifest, kind, inputs, contract, _document(files[REFERENCE], REFERENCE), module.eval())


@dataclass(frozen=True)
class Language:
    """A loaded language model: its manifest, tokens, the tokenizer's file, and the module in evaluation mode."""

    manifest: Manifest
    inputs: TokenInputs
    tokenizer: bytes
    module: nn.Module


def load_language(folder: Path, code_root: Path = CODE_ROOT) -> Language:
    """Verify the artifact of a language model and load it; as `load_artifact`."""
    manifest, files = read_artifact(folder, LANGUAGE_FILES)
    model = _required(_document(files[MODEL], MODEL), MODEL, format=MODEL_FORMAT, kind="language")
    _required(model, MODEL, output={"name": LANGUAGE_OUTPUT})
    if manifest.facts.get("kind") != "language":
        raise ArtifactRefused(f"{MODEL}: kind 'language', the manifest says {manifest.facts.get('kind')!r:.40}")
    inputs = _token_inputs(model.get("inputs"))
    if inputs.tokenizer != digest_bytes(files[TOKENIZER]):
        raise ArtifactRefused(f"{TOKENIZER}: is not the tokenizer that the model learned with, {inputs.tokenizer}")
    contract = json.loads(canonical_json(language_contract(inputs)))
    _required(_document(files[CONTRACT], CONTRACT), CONTRACT, **contract)
    if model.get("factory") is None:
        raise ArtifactRefused(f"{MODEL}: a language model without factory")
    module = _module(model["factory"], inputs, code_root)
    try:
        module.load_state_dict(read_weights(files[WEIGHTS], module.state_dict()))
    except WeightsRefused as error:
        raise ArtifactRefused(f"{WEIGHTS}: {error}") from error
    return Language(manifest, inputs, files[TOKENIZER], module.eval())


def _token_inputs(raw: object) -> TokenInputs:
    given = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
    numbers = ("vocab", "context", "end_token")
    right = set(given) == {*numbers, "tokenizer"} and isinstance(given["tokenizer"], str)
    if not right or any(type(given[name]) is not int or given[name] < 0 for name in numbers):
        raise ArtifactRefused(f"{MODEL}: inputs {raw!r:.200}")
    return TokenInputs(**given)


def input_columns(folder: Path) -> tuple[str, ...]:
    """Input columns of a verified artifact, by its contract; its model is not loaded. Raises `ArtifactRefused`."""
    _, files = read_artifact(folder)
    listed = _document(files[CONTRACT], CONTRACT).get("inputs")
    try:
        return tuple(str(item["name"]) for item in cast("list[dict[str, object]]", listed))
    except (TypeError, KeyError) as error:
        raise ArtifactRefused(f"{CONTRACT}: inputs {listed!r:.200}") from error


def read_artifact(folder: Path, listed: frozenset[str] = FILES) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest of an artifact folder and the verified bytes of every file that it lists, which are `listed`.

    Raises:
        ArtifactRefused: as `load_artifact`; nothing but the manifest is opened before the manifest was checked.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ArtifactRefused(f"{folder} is no artifact folder: {error.strerror}") from error
    try:
        try:
            manifest = parse_manifest(_read(MANIFEST, MAX_FILE_BYTES, descriptor))
        except InvalidManifest as error:
            raise ArtifactRefused(f"{MANIFEST}: {error}") from error
        names = {entry.name for entry in manifest.entries}
        if names != listed:
            raise ArtifactRefused(f"{MANIFEST}: lists {sorted(names)!r:.300}, an artifact has {sorted(listed)}")
        with os.scandir(descriptor) as items:
            extra = sorted({item.name for item in items} - names - {MANIFEST})
        if extra:
            raise ArtifactRefused(f"{extra!r:.300} lie in {folder} and are not in the manifest")
        files: dict[str, bytes] = {}
        for entry in manifest.entries:
            content = _read(entry.name, entry.size, descriptor)
            if len(content) != entry.size or digest_bytes(content) != entry.sha256:
                raise ArtifactRefused(f"{entry.name}: its bytes are not those that the manifest lists")
            files[entry.name] = content
        return manifest, files
    finally:
        os.close(descriptor)


def _read(name: str, limit: int, folder: int) -> bytes:
    """The bytes of a plain file, at most one more than `limit`."""
    if limit > MAX_FILE_BYTES:
        raise ArtifactRefused(f"{name}: {limit} bytes; {MAX_FILE_BYTES} are the most")
    try:
        descriptor = os.open(name, _READ, dir_fd=folder)
    except OSError as error:
        raise ArtifactRefused(f"{name}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ArtifactRefused(f"{name}: not a plain file")
    with os.fdopen(descriptor, "rb") as source:
        return source.read(limit + 1)


def _module(factory: object, inputs: Inputs, code_root: Path) -> nn.Module:
    if factory is None:
        assert isinstance(inputs, InputEncoding), "a logistic regression takes rows"
        return LogisticRegression(inputs.category_sizes, inputs.numeric_width)
    fields = cast("dict[str, Any]", factory) if isinstance(factory, dict) else {}
    if set(fields) != {"file", "function", "code_digest", "options"} or not isinstance(fields["options"], dict):
        raise ArtifactRefused(f"{MODEL}: factory {factory!r:.200}")
    if not isinstance(fields["file"], str) or not isinstance(fields["function"], str):
        raise ArtifactRefused(f"{MODEL}: factory {factory!r:.200}")
    found = factory_digest(code_root, fields["file"])
    if found != fields["code_digest"]:
        raise CodeRefused(
            f"the model code in {code_root} has the digest {found}, the artifact was trained with "
            f"{fields['code_digest']!r:.100}"
        )
    try:
        return make_module(load_factory(code_root, fields["file"]), fields["function"], inputs, fields["options"])
    except SpecRefused as error:
        raise ArtifactRefused(f"{MODEL}: {error}") from error


def _document(content: bytes, name: str) -> dict[str, Json]:
    try:
        document: object = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArtifactRefused(f"{name}: not JSON ({error})") from error
    if not isinstance(document, dict):
        raise ArtifactRefused(f"{name}: {document!r:.80} is no object")
    return cast("dict[str, Json]", document)


def _required(document: dict[str, Json], file: str, **fields: Json) -> dict[str, Json]:
    for name, value in fields.items():
        if document.get(name) != value:
            raise ArtifactRefused(f"{file}: {name} is {document.get(name)!r:.80}, expected {value!r}")
    return document
