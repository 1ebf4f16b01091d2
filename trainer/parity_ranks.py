"""What the ranks of `trainer.parity` do, and the one process that they are compared with.

The reference knows nothing of engines, meshes and batches: one loop in plain torch over the whole global batch.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

# Inductor's pool of compilers would be threads and processes of the parent that ranks are forked from.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
import torch
import torch._dynamo  # The first optimizer step would import it, on every rank.  # pyright: ignore[reportUnusedImport]
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.batches import Batch, TokenBatch
from trainer.counting import counting
from trainer.engines import make_engine
from trainer.models.decoder import Decoder, DecoderOptions, decoder_plan
from trainer.models.factory import one_group
from trainer.parity import GLOBAL_BATCH, HASH_EVERY, OPTIMIZER, Case, Policy
from trainer.process_group import Group

_WARM_UP = 4
# Small enough for half precision to hold the gradients, large enough for them not to vanish; a power of two is exact.
_FP16_SCALE = 1024.0


def reference(group: Group, case: Case, policy: Policy) -> dict[str, Any]:
    """Losses and gradient norms of one process, and the number of elements of each parameter.

    `autocast` computes in half precision where torch's list says so, `weights` casts every parameter before its use;
    both learn in fp32.
    """
    model, options = build(case)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
        foreach=False,
    )
    losses, norms = list[float](), list[float]()
    scale = _FP16_SCALE if policy.startswith("fp16") else 1.0
    for step in range(case.steps):
        tokens, weight = tokens_of(case.seed, step, options)
        optimizer.zero_grad()
        with _autocast(policy, options.experts > 0):
            logits = _forward(model, tokens[:, :-1], policy)
        each = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        loss = (each * weight.flatten()).sum() / weight.sum()
        (loss * scale).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = math.sqrt(sum((g.double() / scale).square().sum().item() for g in grads))
        factor = min(1.0, OPTIMIZER.clip_norm / (norm + 1e-6)) / scale
        for grad in grads:
            grad.mul_(factor)
        for entry in optimizer.param_groups:
            entry["lr"] = OPTIMIZER.lr * rate(step)
        optimizer.step()
        _balance(model)
        losses.append(loss.item())
        norms.append(norm)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    return {"losses": losses, "grad_norms": norms, "sizes": sizes}


def train(group: Group, case: Case) -> dict[str, Any]:
    """What this rank sees of the case: losses, norms, digests of what it holds every few steps, its facts.

    `step_s` is how long each step took, in seconds; the last one was watched, and so took longer.
    """
    model, options = build(case)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    spec = case.spec()
    engine = make_engine(spec, model, one_group(model, spec.optimizer), group, decoder_plan(options))
    said: dict[str, Any] = {"losses": [], "grad_norms": [], "scales": [], "skipped": [], "step_s": [], "hashes": {}}
    lame = group.rank == group.world_size - 1
    for step in range(case.steps):
        batches, items = micro_batches(case, step, options, engine.mesh.data_index, case.sabotage if lame else "")
        # Watching every operation costs: one step is enough.
        with counting() if step == case.steps - 1 else nullcontext():
            began = time.perf_counter()
            result = engine.step(batches, items, rate(step))
            said["step_s"].append(time.perf_counter() - began)
        if lame and case.sabotage == "replica" and step == 0:
            _drift(_modules(engine)[0])
        said["losses"].append(result.loss)
        said["grad_norms"].append(result.grad_norm)
        said["scales"].append(result.scale)
        said["skipped"].append(result.skipped)
        if (step + 1) % HASH_EVERY == 0 or step == case.steps - 1:
            said["hashes"][str(step + 1)] = digests(_modules(engine), shapes, engine.mesh.coordinate("tp"))
            if group.rank == 0:
                print(
                    f"  step {step + 1}: loss {result.loss:.6f}, gradient norm {result.grad_norm:.6f}", file=sys.stderr
                )
    return {**said, "facts": dict(engine.facts())}


def build(case: Case) -> tuple[Decoder, DecoderOptions]:
    """The small transformer, with the same weights in every process."""
    options = DecoderOptions.parse(case.model)
    torch.manual_seed(case.seed)
    return Decoder(options), options


def tokens_of(seed: int, step: int, options: DecoderOptions) -> tuple[Tensor, Tensor]:
    """The global batch of a step: tokens [GLOBAL_BATCH, T + 1] that can be learned, weights [GLOBAL_BATCH, T].

    Some tokens do not count, and not equally many on each rank: a mean of the ranks' means would be another number.
    """
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    start = torch.randint(options.vocab, (GLOBAL_BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (GLOBAL_BATCH, 1), generator=generator)
    weight = torch.ones(GLOBAL_BATCH, options.sequence)
    weight[-1, options.sequence // 2 - 1 :] = 0.0
    return (start + stride * torch.arange(options.sequence + 1)) % options.vocab, weight


def micro_batches(
    case: Case, step: int, options: DecoderOptions, data_index: int, sabotage: str
) -> tuple[list[Batch], int]:
    """This data rank's micro-batches of a step, and the real tokens of the whole global batch."""
    tokens, weight = tokens_of(case.seed, step, options)
    items = int(weight.sum())
    if sabotage == "data":
        tokens = (tokens + 1) % options.vocab
        tokens[:, ::2] = tokens[:, :1]
    mine = tokens.chunk(case.layout.data_ranks)[data_index].chunk(case.accumulation)
    counted = weight.chunk(case.layout.data_ranks)[data_index].chunk(case.accumulation)
    batches: list[Batch] = [TokenBatch.of(t, w) for t, w in zip(mine, counted, strict=True)]
    if sabotage == "gradient":
        batches = [Dropped(batch) for batch in batches]
    return batches, items


@dataclass(frozen=True)
class Dropped:
    """A batch whose loss is told right and teaches nothing."""

    batch: Batch

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Those of the batch."""
        return self.batch.inputs

    @property
    def items(self) -> int:
        """Those of the batch."""
        return self.batch.items

    def loss_sum(self, output: Tensor) -> Tensor:
        """The batch's, with a gradient of zero."""
        loss = self.batch.loss_sum(output)
        return loss.detach() + 0.0 * loss

    def sequence_part(self, rank: int, degree: int) -> Dropped:
        """The batch's."""
        return Dropped(self.batch.sequence_part(rank, degree))


def rate(step: int) -> float:
    """What the rates are multiplied with: a short warm-up."""
    return min(1.0, (step + 1) / _WARM_UP)


@torch.no_grad()
def digests(modules: Iterable[nn.Module], shapes: Mapping[str, torch.Size], tensor_rank: int) -> dict[str, str]:
    """SHA-256 of the parts of parameters and saved buffers that this rank holds, by name and place in the whole.

    Args:
        modules: What the rank holds of the model.
        shapes: Of the whole tensors.
        tensor_rank: Place of plain tensors that are smaller than the whole: DeepSpeed's tensor ranks have such.
    """
    found: dict[str, str] = {}
    for name, p in chain.from_iterable(module.state_dict(keep_vars=True).items() for module in modules):
        own, place = p.detach(), "whole"
        if isinstance(p, DTensor):
            own = p.to_local().detach()
            _, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
            place = f"at {list(offset)}"
        elif own.shape != shapes[name]:
            place = f"part {tensor_rank}"
        if own.numel():
            data = own.contiguous().view(torch.uint8).numpy().tobytes()
            found[f"{name} {list(own.shape)} {place}"] = hashlib.sha256(data).hexdigest()
    return found


@torch.no_grad()
def _drift(module: nn.Module) -> None:
    # One last bit alone may be rounded away by the next update.
    next(module.parameters()).view(-1)[:1].mul_(1 + 2.0**-19)


def _modules(engine: Any) -> list[nn.Module]:  # noqa: ANN401 - what holds the parameters is no part of the protocol
    stages: dict[int, nn.Module] | None = getattr(engine, "stages", None)
    return [engine.module] if stages is None else list(stages.values())


def _autocast(policy: Policy, experts: bool) -> AbstractContextManager[object]:
    # Who casts weights does so with what it gathers; experts stay in fp32, and are left to autocast.
    if policy == "fp32" or not (experts or policy.endswith("autocast")):
        return nullcontext()
    return torch.autocast("cpu", dtype=_half(policy))


def _forward(model: nn.Module, tokens: Tensor, policy: Policy) -> Tensor:
    if not policy.endswith("weights"):
        return model(tokens)
    names: Iterable[tuple[str, Tensor]] = model.named_parameters()
    cast = {name: p if ".experts." in name else p.to(_half(policy)) for name, p in names}
    return torch.func.functional_call(model, cast, (tokens,))


def _half(policy: Policy) -> torch.dtype:
    return torch.bfloat16 if policy.startswith("bf16") else torch.float16


def _balance(model: nn.Module) -> None:
    for module in model.modules():
        router: Any = module
        if hasattr(module, "balance"):
            router.balance(router.load)
