"""What the tests of the DeepSpeed engine run in a warmed parent and its ranks; imported there only, it has torch."""

import hashlib
import json
from pathlib import Path
from typing import Any

import deepspeed
import safetensors.torch
import torch
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule
from torch import Tensor

from trainer.engines import make_engine
from trainer.models.decoder import decoder_plan
from trainer.models.factory import one_group
from trainer.parity import GLOBAL_BATCH, Case, run_case
from trainer.parity_ranks import build, micro_batches, rate, tokens_of
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


def pipeline(group: Group, clip: float, steps: int) -> dict[str, list[float]]:
    """Losses of DeepSpeed's PipelineModule on two ranks without a stage of ZeRO, and those of one process."""
    case = Case(layout_of("deepspeed", "dp=1,zero=0", ""))
    bare, options = build(case)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=3e-3, foreach=True)
    told: dict[str, list[float]] = {"alone": [], "pipeline": []}
    for step in range(steps):
        tokens, _ = tokens_of(case.seed, step, options)
        loss = token_mean(bare(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(bare.parameters(), clip)
        optimizer.step()
        told["alone"].append(loss.item())
    model, _ = build(case)
    parts = [model.embed, *model.layers.values(), model.norm, model.head]
    deepspeed.init_distributed("gloo", dist_init_required=False)
    module: Any = PipelineModule(parts, num_stages=2, loss_fn=token_mean, partition_method="uniform")
    config = {"train_batch_size": GLOBAL_BATCH, "train_micro_batch_size_per_gpu": GLOBAL_BATCH // 2}
    config |= {"gradient_accumulation_steps": 2, "gradient_clipping": clip, "steps_per_print": 2**31}
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, foreach=True)
    engine: Any = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)[0]
    for step in range(steps):
        tokens, _ = tokens_of(case.seed, step, options)
        halves = [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens.chunk(2)]
        told["pipeline"].append(engine.train_batch(iter(halves)).item())
    return told


def token_mean(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy in nats."""
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())
