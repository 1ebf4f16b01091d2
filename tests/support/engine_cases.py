"""What ranks do in the tests of engine states: steps of the parity test's decoder between a load and a save."""

import importlib
import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from trainer.batches import TokenBatch
from trainer.engines import make_engine, scaler
from trainer.models.decoder import decoder_plan
from trainer.models.factory import one_group
from trainer.parity import Case
from trainer.parity_ranks import build, micro_batches, rate, tokens_of
from trainer.parity_ranks import reference as one_process
from trainer.pieces import MOMENTS, collect, read, step_of, whole_box
from trainer.process_group import Group
from trainer.spec import parse_layout
from trainer.tree import decode_tree, encode_tree

# Before the fork: each costs seconds.
for module in ("trainer.engines.fsdp2", "trainer.engines.pipeline"):
    importlib.import_module(module)

KEYS = ("weight", *MOMENTS)


def case_of(asked: dict[str, Any]) -> Case:
    fields = {"layout": {}, **asked}
    layout = parse_layout(fields.pop("engine"), fields.pop("degrees"))
    for name, value in fields.pop("layout").items():
        object.__setattr__(layout, name, value)
    return Case(layout, **fields)


def steps(group: Group, asked: dict[str, Any], first: int, stop: int, load: str, save: str) -> dict[str, Any]:
    """Take the steps `first` to `stop` of a case; `load` and `save` are folders of states, "" for none."""
    case = case_of(asked)
    model, options = build(case)
    spec = case.spec()
    engine = make_engine(spec, model, one_group(model, spec.optimizer), group, decoder_plan(options))
    if load:
        engine.load(read_states(load))
    results = []
    for step in range(first, stop):
        batches, items = micro_batches(case, step, options, engine.mesh.data_index, "")
        results.append(engine.step(batches, items, rate(step)))
    if save:
        write_state(save, group.rank, engine.state())
    return {
        "losses": [r.loss.hex() for r in results],
        "norms": [r.grad_norm.hex() for r in results],
        "scales": [r.scale for r in results],
        "skipped": [r.skipped for r in results],
    }


def overflow(group: Group, asked: dict[str, Any], stop: int) -> dict[str, Any]:
    """Steps that begin with a scale too large for fp16."""
    scaler._FIRST = 2.0**24
    return steps(group, asked, 0, stop, "", "")


def reference(group: Group, asked: dict[str, Any]) -> dict[str, Any]:
    """One process of plain torch."""
    return one_process(group, case_of(asked), "fp32")


def evaluated(group: Group, asked: dict[str, Any]) -> dict[str, Any]:
    """Judge the first global batch before a step and after it: sums, items, and the logits' shape where whole."""
    case = case_of(asked)
    model, options = build(case)
    spec = case.spec()
    engine = make_engine(spec, model, one_group(model, spec.optimizer), group, decoder_plan(options))
    said: dict[str, Any] = {"index": engine.mesh.data_index, "sums": [], "items": [], "logits": []}
    for step in (0, 1):
        tokens, weight = tokens_of(case.seed, 0, options)
        ranks = case.layout.data_ranks
        own = TokenBatch.of(tokens.chunk(ranks)[engine.mesh.data_index], weight.chunk(ranks)[engine.mesh.data_index])
        found = engine.evaluate(own)
        said["sums"].append(found.loss_sum)
        said["items"].append(found.items)
        said["logits"].append(None if found.logits is None else list(found.logits.shape))
        batches, items = micro_batches(case, step, options, engine.mesh.data_index, "")
        engine.step(batches, items, 1.0)
    return said


def write_state(folder: str, rank: int, state: dict[str, Any]) -> None:
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    document, tensors = encode_tree(state)
    safetensors.torch.save_file(tensors, place / f"rank-{rank}.safetensors")
    (place / f"rank-{rank}.json").write_text(json.dumps(document))


def read_states(folder: str) -> list[Any]:
    parts = sorted(Path(folder).glob("*.json"), key=lambda p: int(p.stem.split("-")[1]))
    return [
        decode_tree(json.loads(p.read_text()), safetensors.torch.load_file(p.with_suffix(".safetensors")))
        for p in parts
    ]


def same_states(one: str, two: str) -> dict[str, Any]:
    """Names whose weights, moments or steps differ in a bit between two saved states, each put together."""
    first, second = collect(read_states(one)), collect(read_states(two))
    different = sorted({*first} ^ {*second})
    for name in sorted({*first} & {*second}):
        box = whole_box(first[name][0]["shape"])
        for key in KEYS:
            a, b = read(first[name], name, key, box), read(second[name], name, key, box)
            if a is None or b is None or not torch.equal(a, b):
                different.append(f"{name} {key}")
        if step_of(first[name]) != step_of(second[name]):
            different.append(f"{name} step")
    return {"names": len(first), "different": different}


def elements(folder: str) -> list[int]:
    """Elements of weights that each rank saved."""
    return [
        sum(part["weight"].numel() for parts in state["pieces"].values() for part in parts)
        for state in read_states(folder)
    ]
