"""Artifacts that somebody tampered with: each is refused with the reason, before a model is made of it."""

import io
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors.torch
import torch
from support.training_data import forge, training_run, write_models

from trainer.blobs import digest_bytes
from trainer.check import check_artifact
from trainer.models.factory import CodeRefused
from trainer.predictor import ArtifactRefused, load_artifact

WEIGHTS = "weights.safetensors"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    write_models(training_run(folder / "store", days=4, rows=60), folder / "store", folder)
    return folder


@pytest.fixture
def artifact(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "network", tmp_path / "network"))


def refused(folder: Path, *words: str) -> None:
    """Refused when it is loaded, and reported as not loading by the check."""
    with pytest.raises(ArtifactRefused) as caught:
        load_artifact(folder)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    found = check_artifact(folder)
    assert (found["weights_only"], found["finite_outputs"]) == (False, False)
    assert all(word in " ".join(cast("list[str]", found["problems"])) for word in words)


def test_the_untouched_artifact_passes(artifact: Path) -> None:
    assert check_artifact(artifact) == {"weights_only": True, "finite_outputs": True, "problems": []}


@pytest.mark.parametrize("name", [WEIGHTS, "model.json", "contract.json", "reference.json", "metrics.json"])
def test_one_flipped_bit_in_any_file_is_refused(artifact: Path, name: str) -> None:
    content = bytearray((artifact / name).read_bytes())
    content[len(content) // 2] ^= 1
    (artifact / name).write_bytes(content)
    refused(artifact, name)


@pytest.mark.parametrize("change", [b"", b"x"])
def test_a_cut_or_longer_file_is_refused(artifact: Path, change: bytes) -> None:
    content = (artifact / WEIGHTS).read_bytes()
    (artifact / WEIGHTS).write_bytes(content + change if change else content[:-1])
    refused(artifact, WEIGHTS)


def test_a_missing_an_added_and_a_renamed_file_are_refused(artifact: Path) -> None:
    (artifact / "evil.py").write_text("print(1)")
    refused(artifact, "evil.py")
    (artifact / "evil.py").unlink()
    (artifact / "metrics.json").rename(artifact / "METRICS.json")
    refused(artifact, "METRICS.json")
    (artifact / "METRICS.json").unlink()
    refused(artifact, "metrics.json")


def test_links_and_folders_in_place_of_files_are_refused(artifact: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    shutil.copy(artifact / WEIGHTS, outside)
    (artifact / WEIGHTS).unlink()
    (artifact / WEIGHTS).symlink_to(outside)
    refused(artifact, WEIGHTS)
    (artifact / WEIGHTS).unlink()
    (artifact / WEIGHTS).mkdir()
    refused(artifact, WEIGHTS, "not a plain file")
    refused(tmp_path / "nowhere", "no artifact folder")


HOSTILE_NAMES: list[list[str]] = [
    ["../x"],
    ["/etc/hostname"],
    ["a/../../x"],
    ["a//b"],
    ["A", "a"],
    ["new\nline"],
    ["twice", "twice"],
]


@pytest.mark.parametrize("names", HOSTILE_NAMES)
def test_field_F05_manifest_names_that_leave_or_blur_the_set_are_refused_before_anything_is_opened(
    artifact: Path, names: list[str]
) -> None:
    document = json.loads((artifact / "manifest.json").read_bytes())
    for index, name in enumerate(names):
        entry = {**document["entries"][0], "name": name, "sha256": digest_bytes(bytes([index]))}
        document["entries"].append(entry)
    document["entries"].sort(key=lambda e: e["name"])
    content = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    (artifact / "manifest.json").write_bytes(content)
    # Were a file opened, its absence would be what is reported.
    for path in artifact.iterdir():
        if path.name != "manifest.json":
            path.unlink()
    refused(artifact, "manifest.json", repr(names[-1]))


def test_a_manifest_that_lists_another_set_of_files_is_refused(artifact: Path) -> None:
    document = json.loads((artifact / "manifest.json").read_bytes())
    document["entries"] = [e for e in document["entries"] if e["name"] != "reference.json"]
    (artifact / "manifest.json").write_bytes(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())
    refused(artifact, "manifest.json", "lists")


def header(document: object, data: bytes = b"") -> bytes:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return struct.pack("<Q", len(text)) + text + data


def changed(artifact: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> bytes:
    state = safetensors.torch.load((artifact / WEIGHTS).read_bytes())
    change(state)
    return safetensors.torch.save(state)


def duplicate_key(artifact: Path) -> bytes:
    content = (artifact / WEIGHTS).read_bytes()
    size = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + size].rstrip()
    first, entry = next(iter(json.loads(text).items()))
    doubled = text[:-1] + b"," + json.dumps({first: entry}).encode()[1:]
    return header(doubled, content[8 + size :])


def pickled(artifact: Path) -> bytes:
    del artifact
    target = io.BytesIO()
    torch.save({"leave.bias": torch.zeros(1)}, target)
    return target.getvalue()


def poke(number: float) -> Callable[[Path], bytes]:
    def change(state: dict[str, torch.Tensor]) -> None:
        state["enter.weight"][3, 2] = number

    return lambda artifact: changed(artifact, change)


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}

WRONG_WEIGHTS: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "a key twice": (duplicate_key, "twice"),
    "nan": (poke(float("nan")), "enter.weight"),
    "infinity": (poke(float("-inf")), "enter.weight"),
    "a pickle with another name": (pickled, "no safetensors"),
    "empty": (lambda _: b"", "no safetensors"),
    "a huge length": (lambda _: struct.pack("<Q", 2**63) + b"{}", "no safetensors"),
    "a large header": (lambda _: header(b"{" + b" " * (1 << 20) + b"}"), "are the most"),
    "no JSON": (lambda _: header(b"\x80\x02"), "no JSON"),
    "deep JSON": (lambda _: header(b"[" * 200_000), "no JSON"),
    "a list": (lambda _: header([]), "no safetensors"),
    "offsets beyond the end": (lambda _: header({"a": {**F32, "data_offsets": [0, 400]}}, b"\0" * 4), "no safetensors"),
    "overlapping tensors": (lambda _: header({"a": F32, "b": F32}, b"\0" * 4), "no safetensors"),
    "a hole": (lambda _: header({"a": {**F32, "data_offsets": [4, 8]}}, b"\0" * 8), "no safetensors"),
    "an overflowing shape": (lambda _: header({"a": {**F32, "shape": [2**62, 2**62]}}, b"\0" * 4), "no safetensors"),
    "a tensor too few": (lambda a: changed(a, lambda s: s.pop("leave.bias")), "leave.bias"),
    "a tensor too many": (lambda a: changed(a, lambda s: s.update(more=torch.zeros(1))), "more"),
    "another shape": (lambda a: changed(a, lambda s: s.update({"leave.bias": torch.zeros(2)})), "leave.bias"),
    "another dtype": (lambda a: changed(a, lambda s: s.update({"leave.bias": torch.zeros(1).double()})), "leave.bias"),
}


@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_weights_with_a_truthful_manifest_are_still_refused_when_they_are_hostile(artifact: Path, case: str) -> None:
    make, word = WRONG_WEIGHTS[case]
    forge(artifact, WEIGHTS, make(artifact))
    refused(artifact, WEIGHTS, word)


def rewritten(artifact: Path, name: str, **fields: object) -> None:
    document = json.loads((artifact / name).read_bytes())
    forge(artifact, name, json.dumps({**document, **fields}).encode())


@pytest.mark.parametrize(
    ("name", "fields", "word"),
    [
        ("model.json", {"format": "headway.model/2"}, "format"),
        ("model.json", {"kind": "oracle"}, "kind"),
        ("model.json", {"kind": "logistic"}, "kind"),
        ("model.json", {"factory": None}, "factory"),
        ("model.json", {"factory": {"file": "x"}}, "factory"),
        ("model.json", {"inputs": {"categorical": [], "numeric": []}}, "inputs"),
        ("model.json", {"inputs": []}, "object"),
        ("contract.json", {"inputs": []}, "inputs"),
        ("contract.json", {"format": "other"}, "format"),
    ],
)
def test_documents_that_contradict_each_other_are_refused(
    artifact: Path, name: str, fields: dict[str, Any], word: str
) -> None:
    rewritten(artifact, name, **fields)
    refused(artifact, name, word)


def test_documents_that_are_no_json_object_are_refused(artifact: Path) -> None:
    forge(artifact, "reference.json", b"[")
    refused(artifact, "reference.json", "not JSON")
    forge(artifact, "reference.json", b"[]")
    refused(artifact, "reference.json", "no object")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"code_digest": "sha256:" + "0" * 64}, "digest"),
        ({"file": "../../../etc/passwd"}, "passwd"),
        ({"file": "trainer/spec.py"}, "spec.py"),
        ({"file": "pipelines/flight_delay/nothing.py"}, "nothing.py"),
        ({"function": "absent"}, "absent"),
    ],
)
def test_other_model_code_than_the_artifact_was_trained_with_is_refused(
    artifact: Path, changes: dict[str, str], word: str
) -> None:
    factory = json.loads((artifact / "model.json").read_bytes())["factory"]
    rewritten(artifact, "model.json", factory={**factory, **changes})
    with pytest.raises(CodeRefused, match=word):
        load_artifact(artifact)


def test_options_that_the_factory_does_not_know_are_refused(artifact: Path) -> None:
    factory = json.loads((artifact / "model.json").read_bytes())["factory"]
    rewritten(artifact, "model.json", factory={**factory, "options": {"height": 3}})
    refused(artifact, "model.json", "height")


def test_a_reference_without_an_input_does_not_pass(artifact: Path) -> None:
    rewritten(artifact, "reference.json", features={})
    found = check_artifact(artifact)
    assert (found["weights_only"], found["finite_outputs"]) == (False, True)
    assert "carrier" in str(found["problems"])


def test_a_model_that_overflows_is_found(artifact: Path) -> None:
    def grow(state: dict[str, torch.Tensor]) -> None:
        state["enter.weight"] *= 1e38
        state["leave.weight"] *= 1e38

    forge(artifact, WEIGHTS, changed(artifact, grow))
    found = check_artifact(artifact)
    assert found["finite_outputs"] is False
    assert found["problems"]
