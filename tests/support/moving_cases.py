"""What ranks do in the tests of checkpoints that move: steps of the parity test's decoder between real checkpoints."""

import importlib
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from support.engine_cases import case_of

from trainer.blobs import Json
from trainer.checkpoint import Checkpoints, Retention, open_parts
from trainer.engines import make_engine
from trainer.export import export_weights
from trainer.image import Image
from trainer.models.decoder import decoder_plan
from trainer.models.factory import one_group
from trainer.parity_ranks import build, micro_batches, rate
from trainer.pieces import Stored, whole_weights
from trainer.process_group import Group

# Before the fork: each costs seconds.
for module in ("trainer.engines.fsdp2", "trainer.engines.pipeline", "trainer.engines.zero"):
    importlib.import_module(module)


class Told:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.events: list[list[Any]] = []

    def emit(self, kind: str, data: Mapping[str, Json]) -> None:
        self.events.append([kind, dict(data)])

    def beat(self) -> None:
        pass


class Counted:
    """Counts the elements that are read from files."""

    def __init__(self) -> None:
        self.elements = 0
        part, read = Stored.part, Stored.read

        def count_part(stored: Stored, places: tuple[slice, ...]) -> Any:  # noqa: ANN401
            found = part(stored, places)
            self.elements += found.numel() if places else 0
            return found

        def count_read(stored: Stored) -> Any:  # noqa: ANN401
            self.elements += stored.numel()
            return read(stored)

        patched: Any = Stored
        patched.part, patched.read = count_part, count_read


def copy_slowly() -> None:
    """Let the copy beside the training take longer than a step."""
    copy = Image.copy

    def wait_and_copy(image: Image, tensors: Mapping[str, Any], names: Iterable[str]) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.3)
        copy(image, tensors, names)

    patched: Any = Image
    patched.copy = wait_and_copy


def train(
    group: Group, asked: dict[str, Any], stop: int, run: str, to: str = "", attempt: int = 1, slow: bool = False
) -> dict[str, Any]:
    """Go on from the newest checkpoint of the folder `run` until step `stop`; one save is under way during each step.

    Steps are saved in `to`, when it is another folder. What is read is counted. `slow`: see `copy_slowly`.
    """
    if slow:
        copy_slowly()
    case = case_of(asked)
    model, options = build(case)
    spec = case.spec()
    told, counted = Told(), Counted()
    for folder in (run, to or run):
        (Path(folder) / "attempts" / str(attempt)).mkdir(parents=True, exist_ok=True)
    engine = make_engine(spec, model, one_group(model, spec.optimizer), group, decoder_plan(options))
    parts = Checkpoints(Path(run), attempt, group, told, {}).newest()
    first = 0
    if parts is not None:
        first = parts[0]["step"]
        engine.load([part["engine"] for part in parts])
    read = counted.elements
    checkpoints = Checkpoints(Path(to or run), attempt, group, told, {}, Retention(stop))
    engine.before_update = checkpoints.settle
    losses, norms = list[str](), list[str]()
    for step in range(first, stop):
        batches, items = micro_batches(case, step, options, engine.mesh.data_index, "")
        result = engine.step(batches, items, rate(step))
        losses.append(result.loss.hex())
        norms.append(result.grad_norm.hex())
        if step + 1 < stop:
            checkpoints.finish()
            checkpoints.begin(step + 1, {"step": step + 1, "engine": engine.state()}, "last", None)
    checkpoints.finish()
    checkpoints.save(stop, {"step": stop, "engine": engine.state()}, "last", None)
    return {"first": first, "losses": losses, "norms": norms, "read": read, "told": told.events}


def export(group: Group, checkpoint: str, to: str, file_bytes: int, block_bytes: int) -> dict[str, Any]:
    """Export the weights of the checkpoint in the folder; the digest of the manifest, and how much each rank read."""
    counted = Counted()
    manifest = export_weights(
        open_parts(Path(checkpoint)), Path(to), group, {}, file_bytes=file_bytes, block_bytes=block_bytes
    )
    return {"manifest": manifest.digest, "read": counted.elements}


def exported_as_saved(checkpoint: str, exported: str) -> dict[str, Any]:
    """How the weights of a checkpoint and its export compare, and how many elements and files there are."""
    whole = whole_weights([part["engine"] for part in open_parts(Path(checkpoint))])
    files = sorted(Path(exported).glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}
    different = [name for name in whole if not (name in found and whole[name].equal(found[name]))]
    sizes = [sum(t.numel() for t in safetensors.torch.load_file(file).values()) for file in files]
    return {
        "same_names": set(found) == set(whole),
        "different": different,
        "elements": sum(t.numel() for t in whole.values()),
        "files": sizes,
        "largest": max(t.numel() for t in whole.values()),
    }
