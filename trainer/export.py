"""Weights of a checkpoint as safetensors files of bounded size with an index, whatever layout saved them.

The tensors, whole, stand in order of their names in `model-00001-of-0000N.safetensors` and so on, and
`model.safetensors.index.json` says which is where (the form that transformers and others load). Which tensor goes into
which file depends on names and sizes only: every engine, layout and world size gives the same bytes for the same
weights. Each rank writes files of its own, and reads what it writes piece by piece: no rank ever holds the model, or
more of one tensor than a block of it.

The folder is whole or absent: ranks write beside it and meet, the first one writes index and manifest, and renames.
"""

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from trainer.blobs import Json, Manifest, ManifestEntry, canonical_json, digest_bytes, sync_folder
from trainer.checkpoint import MANIFEST, write_synced
from trainer.image import Form, layout_file
from trainer.pieces import Pieces, PiecesMissing, collect, read, whole_box
from trainer.process_group import Group

INDEX = "model.safetensors.index.json"
FILE_BYTES = 2 << 30
BLOCK_BYTES = 64 << 20


class ExportFailed(RuntimeError):
    """The weights could not be written; the message names the rank and the reason."""


class ExportExists(FileExistsError):
    """The folder is there already: an export does not change."""


def export_weights(
    parts: Sequence[Mapping[str, Any]],
    folder: Path,
    group: Group,
    facts: Mapping[str, Json],
    *,
    file_bytes: int = FILE_BYTES,
    block_bytes: int = BLOCK_BYTES,
    deadline_s: float | None = None,
) -> Manifest:
    """Write the weights of a checkpoint to `folder`; all ranks call it, and get the manifest of what is there then.

    Args:
        parts: What each rank saved (`Checkpoints.parts`), in rank order.
        folder: Where the files go; on a disk that all ranks see.
        group: The ranks, which share the files among them.
        facts: Small facts for the manifest.
        file_bytes: How large a file may be; a tensor that is larger has a file of its own.
        block_bytes: How much of a tensor is read at a time.
        deadline_s: How long ranks wait for each other; the group's timeout when not given.

    Raises:
        ExportExists: `folder` is there already.
        ExportFailed: a rank could not write its files; nothing is left.
        PiecesMissing: the parts do not hold all of a tensor.
    """
    if folder.exists():
        raise ExportExists(f"{folder} is there already")
    pieces = collect([part["engine"] for part in parts])
    forms = {name: _form(pieces, name) for name in sorted(pieces)}
    files = _files(forms, file_bytes)
    partial = folder.with_name(f"{folder.name}.partial")
    mine: dict[str, Json] = {}
    try:
        partial.mkdir(parents=True, exist_ok=True)
        for name in list(files)[group.rank :: group.world_size]:
            chosen = {key: forms[key] for key in files[name]}
            mine[name] = _write_file(partial / name, chosen, pieces, block_bytes)
        sync_folder(partial)
        said: Json = {"files": mine}
    except (OSError, PiecesMissing) as error:
        said = {"failed": f"rank {group.rank}: {error}"}
    publish = _publisher(partial, folder, files, forms, facts)
    answer = cast("dict[str, Any]", group.agree(f"export/{folder}", said, publish, deadline_s=deadline_s))
    if "failed" in answer:
        raise ExportFailed(answer["failed"])
    return Manifest(tuple(ManifestEntry(*entry) for entry in answer["entries"]), facts)


def _form(pieces: Pieces, name: str) -> Form:
    held = next((piece["weight"] for piece in pieces[name] if "weight" in piece), None)
    if held is None:
        raise PiecesMissing(f"parameter {name!r}: no piece holds its weights")
    return Form(held.dtype, tuple(pieces[name][0]["shape"]))


def _files(forms: Mapping[str, Form], file_bytes: int) -> dict[str, list[str]]:
    """The tensors of each file, by its name."""
    groups: list[list[str]] = []
    used = file_bytes
    for name, form in forms.items():
        if not groups or used + form.size > file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += form.size
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups)}


def _write_file(path: Path, forms: Mapping[str, Form], pieces: Pieces, block_bytes: int) -> Json:
    """Write one file; its size and digest."""
    head, places = layout_file(forms)
    hasher, size = hashlib.sha256(), 0
    with path.open("wb") as target:

        def put(data: bytes | memoryview) -> None:
            nonlocal size
            hasher.update(data)
            size += target.write(data)

        put(head)
        for name in sorted(places, key=lambda n: places[n]):
            for block in _blocks(pieces, name, forms[name], block_bytes):
                put(block.contiguous().view(-1).view(torch.uint8).numpy().data)
        target.flush()
        os.fsync(target.fileno())
    return [size, f"sha256:{hasher.hexdigest()}"]


def _blocks(pieces: Pieces, name: str, form: Form, block_bytes: int) -> Iterator[Tensor]:
    """The tensor in parts along its first dimension."""
    box = whole_box(form.shape)
    if not box:
        yield _weight(pieces, name, box)
        return
    row = math.prod(form.shape[1:]) * form.dtype.itemsize
    rows = max(1, block_bytes // max(row, 1))
    for start in range(0, form.shape[0], rows):
        yield _weight(pieces, name, [[start, min(start + rows, form.shape[0])], *box[1:]])


def _weight(pieces: Pieces, name: str, box: list[list[int]]) -> Tensor:
    part = read(pieces[name], name, "weight", box)
    assert part is not None, "its form is that of a piece with weights"
    return part


def _publisher(
    partial: Path,
    folder: Path,
    files: Mapping[str, list[str]],
    forms: Mapping[str, Form],
    facts: Mapping[str, Json],
) -> Callable[[list[Json]], Json]:
    def publish(said: list[Json]) -> Json:
        told = cast("list[dict[str, Any]]", said)
        failed = [one["failed"] for one in told if "failed" in one]
        if failed:
            shutil.rmtree(partial, ignore_errors=True)
            return {"failed": "; ".join(failed)}
        written: dict[str, Any] = {name: entry for one in told for name, entry in one["files"].items()}
        total = sum(form.size for form in forms.values())
        index = canonical_json(
            {
                "metadata": {"total_size": total},
                "weight_map": {key: name for name, keys in files.items() for key in keys},
            }
        )
        entries = [[name, *written[name]] for name in files] + [[INDEX, len(index), digest_bytes(index)]]
        manifest = Manifest(tuple(ManifestEntry(*entry) for entry in entries), facts)
        try:
            for other in partial.iterdir():
                if other.name not in written:
                    # Of an export that was never finished.
                    other.unlink()
            write_synced(partial / INDEX, index)
            write_synced(partial / MANIFEST, manifest.canonical())
            sync_folder(partial)
            partial.rename(folder)
            sync_folder(folder.parent)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            return {"failed": f"rank 0: {error}"}
        return {"entries": entries}

    return publish
