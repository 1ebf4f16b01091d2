"""Weights in files of bounded size with an index: whole or absent, the same bytes however they were cut."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trainer.export
from trainer.blobs import Manifest, digest_file, parse_manifest
from trainer.export import ExportExists, ExportFailed, export_weights
from trainer.pieces import PiecesMissing, box_piece, flat_piece
from trainer.process_group import Group

WEIGHTS = {
    "b.weight": torch.arange(35, dtype=torch.float32).view(7, 5),
    "a.weight": torch.arange(12).view(3, 4).to(torch.bfloat16),
    "scale": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "seen": torch.arange(3),
}


def parts_of(rows: int = 7) -> list[dict[str, Any]]:
    """What two ranks saved: of one matrix each some rows, the rest as it came."""
    whole = WEIGHTS["b.weight"]
    cut = [
        box_piece((7, 5), [[0, rows], [0, 5]], weight=whole[:rows]),
        box_piece((7, 5), [[rows, 7], [0, 5]], weight=whole[rows:]),
    ]
    flat = flat_piece((3, 4), 0, 12, weight=WEIGHTS["a.weight"].flatten())
    others = {
        name: [box_piece(WEIGHTS[name].shape, [[0, n] for n in WEIGHTS[name].shape], weight=WEIGHTS[name])]
        for name in ("scale", "empty", "seen")
    }
    return [
        {"engine": {"pieces": {"b.weight": cut[:1], **others}}},
        {"engine": {"pieces": {"b.weight": cut[1:], "a.weight": [flat]}}},
    ]


def export(folder: Path, parts: list[dict[str, Any]], **sizes: int) -> Manifest:
    group = Group(0, 1, dist.HashStore(), 5.0)  # pyright: ignore[reportPrivateImportUsage]
    return export_weights(parts, folder, group, {"run_id": "r"}, **sizes)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 6), st.integers(1, 400), st.integers(1, 200))
def test_the_same_weights_give_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, rows: int, file_bytes: int, block_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("export")
    manifest = export(folder / "one", parts_of(rows), file_bytes=file_bytes, block_bytes=block_bytes)
    assert export(folder / "two", parts_of(3), file_bytes=file_bytes) == manifest
    assert parse_manifest((folder / "one" / "manifest.json").read_bytes()) == manifest
    found: dict[str, torch.Tensor] = {}
    for entry in manifest.entries:
        file = folder / "one" / entry.name
        assert (file.stat().st_size, digest_file(file)) == (entry.size, entry.sha256)
        if file.suffix == ".safetensors":
            tensors = safetensors.torch.load_file(file)
            assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= file_bytes
            found |= tensors
    assert set(found) == set(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_an_export_does_not_change(tmp_path: Path) -> None:
    export(tmp_path / "out", parts_of())
    with pytest.raises(ExportExists, match="out is there already"):
        export(tmp_path / "out", parts_of())


def test_what_an_export_left_that_never_finished_is_no_part_of_the_next(tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "model-00001-of-00009.safetensors").write_bytes(b"torn")
    manifest = export(tmp_path / "out", parts_of())
    assert {p.name for p in (tmp_path / "out").iterdir()} == {e.name for e in manifest.entries} | {"manifest.json"}


def test_pieces_that_are_missing_leave_nothing(tmp_path: Path) -> None:
    parts = parts_of(4)
    del parts[1]["engine"]["pieces"]["b.weight"]
    with pytest.raises(ExportFailed, match=r"rank 0: parameter 'b\.weight': its pieces hold 20 elements"):
        export(tmp_path / "out", parts)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PiecesMissing, match="no piece holds its weights"):
        export(tmp_path / "out", [{"engine": {"pieces": {"w": [{"shape": [1], "box": [[0, 1]]}]}}}])


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(trainer.export, "write_synced", fail)
    with pytest.raises(ExportFailed, match="No space left"):
        export(tmp_path / "out", parts_of())
    assert list(tmp_path.iterdir()) == []
