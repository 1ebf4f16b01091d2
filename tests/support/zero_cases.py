"""What the tests of the DeepSpeed engine run in a warmed parent and its ranks; imported there only, it has torch."""

import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from trainer.engines import make_engine
from trainer.models.decoder import decoder_plan
from trainer.models.factory import one_group
from trainer.parity import Case, run_case
from trainer.parity_ranks import build, micro_batches, rate
from trainer.pieces import collect, read, whole_box
from trainer.process_group import Group
from trainer.spec import LayoutSpec, Precision, parse_layout
from trainer.tree import decode_tree, encode_tree


def layout_of(engine: str, layout: str, offload: str) -> LayoutSpec:
    fields: Any = {**parse_layout(engine, layout).__dict__, "offload": offload}
    return LayoutSpec(**fields)


def unrefused(engine: str, layout: str, precision: Precision = "fp32", steps: int = 20) -> dict[str, Any]:
    """The parity of a combination that the table may refuse."""
    return run_case(Case(layout_of(engine, layout, ""), precision, steps=steps)).to_json()


def go_on(
    group: Group,
    layout: str,
    first: int,
    last: int,
    engine: str = "deepspeed",
    precision: Precision = "fp32",
    offload: str = "",
    load: str = "",
    save: str = "",
    save_at: int = -1,
    seed: int = 11,
) -> dict[str, Any]:
    """Steps `first` to before `last`, from the states in `load`; those after step `save_at` go to `save`.

    A model that loads something else begins with other weights, which have to be overwritten.
    """
    case = Case(layout_of(engine, layout, offload), precision, seed=seed + bool(load))
    model, options = build(case)
    model.get_parameter("layers.0.attention.wk.weight").requires_grad_(False)
    case = Case(case.layout, precision, seed=seed)
    spec = case.spec()
    made = make_engine(spec, model, one_group(model, spec.optimizer), group, decoder_plan(options))
    if load:
        made.load(read_states(Path(load)))
    losses, norms = list[str](), list[str]()
    for step in range(first, last):
        batches, items = micro_batches(case, step, options, made.mesh.data_index, "")
        result = made.step(batches, items, rate(step))
        losses.append(result.loss.hex())
        norms.append(result.grad_norm.hex())
        if step + 1 == save_at:
            write_state(Path(save), group.rank, made.state())
    batches, _ = micro_batches(case, last, options, made.mesh.data_index, "")
    held = made.evaluate(batches[0])
    return {
        "losses": losses,
        "norms": norms,
        "evaluated": (group.sum(held.loss_sum) / group.sum(held.items)).hex(),
        "state": digest(made.state()),
        "saved": saved_elements(made.state()),
    }


def write_state(folder: Path, rank: int, state: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    document, tensors = encode_tree(state)
    safetensors.torch.save_file({name: t.contiguous() for name, t in tensors.items()}, folder / f"{rank}.safetensors")
    (folder / f"{rank}.json").write_text(json.dumps(document))


def read_states(folder: Path) -> list[Any]:
    ranks = len(list(folder.glob("*.json")))
    return [
        decode_tree(
            json.loads((folder / f"{r}.json").read_text()), safetensors.torch.load_file(folder / f"{r}.safetensors")
        )
        for r in range(ranks)
    ]


def digest(state: dict[str, Any]) -> str:
    """Of everything that a rank saves."""
    document, tensors = encode_tree(state)
    found = hashlib.sha256(json.dumps(document, sort_keys=True).encode())
    for name in sorted(tensors):
        found.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def saved_elements(state: dict[str, Any]) -> dict[str, int]:
    """How many elements of weights and moments a rank saves, and of what types."""
    parts = [part for pieces in state["pieces"].values() for part in pieces]
    found = {key: sum(p[key].numel() for p in parts if key in p) for key in ("weight", "exp_avg", "exp_avg_sq")}
    return found | {"fp32": sum(p["weight"].dtype is torch.float32 for p in parts), "pieces": len(parts)}


def put_together(folder: str) -> dict[str, int]:
    """Elements of each saved kind, put together; raises where pieces lack a part or hold one twice."""
    found = dict[str, int]()
    for name, parts in collect(read_states(Path(folder))).items():
        for key in ("weight", "exp_avg", "exp_avg_sq"):
            whole: Tensor | None = read(parts, name, key, whole_box(parts[0]["shape"]))
            found[key] = found.get(key, 0) + (0 if whole is None else whole.numel())
    return found
