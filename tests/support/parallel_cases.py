"""What the ranks of the parity tests of trainer.parallel do: a few steps of one decoder under one layout."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # The first optimizer step would import it.  # pyright: ignore[reportUnusedImport]
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trainer.models.decoder import Block, Decoder, DecoderOptions, Router, decoder_plan
from trainer.parallel import clip
from trainer.parallel.clip import clip_gradients, grad_norm
from trainer.parallel.expert import apply_experts, balance_experts, expert_parameters, reduce_expert_gradients
from trainer.parallel.loss import token_loss_sum
from trainer.parallel.plan import cut_stage
from trainer.parallel.sequence import apply_sequence
from trainer.parallel.tensor import apply_tensor

DIMS = ("pp", "dp", "shard", "ep", "sp", "tp")
STEPS, BATCH, SEQUENCE, LIMIT = 4, 8, 16, 0.5
SMALL = {"vocab": 64, "sequence": SEQUENCE, "dim": 32, "layers": 2, "heads": 8, "kv_heads": 4, "hidden": 64}


def train(rank: int, world: int, asked: dict[str, Any]) -> dict[str, Any]:
    """What one rank saw of the steps, and what it holds."""
    degrees = {name: asked.get(name, 1) for name in DIMS}
    run = Layout(DecoderOptions(**{**SMALL, **asked.get("model", {})}), degrees, asked.get("mutant", ""))
    for router in run.routers:
        # Tokens lean towards the first two experts.
        router.bias[:2] += asked.get("lean", 0.0)
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as sent:
        steps = [run.step(step) for step in range(STEPS)]
    return {
        "losses": [loss for loss, _ in steps],
        "norms": [norm for _, norm in steps],
        "stage": run.at["pp"],
        "owned": run.owned(),
        "plain": run.plain(),
        "bias": [router.bias.tolist() for router in run.routers],
        "first_load": run.first_load,
        "all_to_all": sent.call_count,
    }


class Layout:
    """A decoder over the ranks; gradients are averaged over all ranks that have tokens of their own."""

    def __init__(self, options: DecoderOptions, degrees: dict[str, int], mutant: str) -> None:
        self.degrees, self.mutant = degrees, mutant
        self.mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=DIMS)
        self.at = dict(zip(DIMS, self.mesh.get_coordinate() or [], strict=True))
        self.plan = decoder_plan(options)
        torch.manual_seed(11)
        self.module: nn.Module = Decoder(options)
        self.options = options
        if self.many("pp"):
            cut_stage(self.module, self.plan, self.at["pp"], degrees["pp"])
        if self.many("ep"):
            apply_experts(self.module, self.plan, self.mesh["ep"])
        if self.many("tp"):
            apply_tensor(self.module, self.plan, self.mesh["tp"])
        if self.many("sp"):
            apply_sequence(self.module, self.plan, self.mesh["sp"].get_group())
        if mutant == "rope":
            for block in self.blocks():
                block.attention.part = 0
        if self.many("shard"):
            self._shard(self.mesh["shard"])
        self.experts = {id(p) for _, p in expert_parameters(self.module, self.plan)}
        self.parameters = list(self.module.parameters())
        self.routers: list[Router] = [m for m in self.module.modules() if isinstance(m, Router)]
        self.first_load: list[int] = []
        self.optimizer = torch.optim.AdamW(self.parameters, lr=3e-3, foreach=False)
        self.tokens = self.group("dp", "shard", "ep", "sp")
        self.replicas = self.group("dp", "sp")

    def blocks(self) -> list[Block]:
        return [m for m in self.module.modules() if isinstance(m, Block)]

    def many(self, name: str) -> bool:
        return self.degrees[name] > 1

    def group(self, *names: str) -> ProcessGroup | None:
        """The ranks that differ from this one in these dimensions only."""
        present = [name for name in names if self.many(name)]
        if not present:
            return None
        if len(present) == 1:
            return self.mesh[present[0]].get_group()
        return self.mesh[tuple(present)]._flatten("_".join(present)).get_group()

    def _shard(self, mesh: DeviceMesh) -> None:
        for block in self.blocks():
            fully_shard(block, mesh=mesh)
        fully_shard(self.module, mesh=mesh)

    def step(self, step: int) -> tuple[float, float]:
        tokens, weight = batch(step, self.options.vocab)
        items = float(weight.sum())
        rows = self.degrees["dp"] * self.degrees["shard"] * self.degrees["ep"]
        ranks = rows * self.degrees["sp"]
        index = (self.at["dp"] * self.degrees["shard"] + self.at["shard"]) * self.degrees["ep"] + self.at["ep"]
        mine, counted = tokens.chunk(rows)[index], weight.chunk(rows)[index]
        inputs, targets, counted = (
            part.chunk(self.degrees["sp"], 1)[self.at["sp"]] for part in (mine[:, :-1], mine[:, 1:], counted)
        )
        self.optimizer.zero_grad()
        loss = self._pass(inputs, targets, counted, ranks / items)
        self._reduce(ranks)
        norm = self._norm()
        clip_gradients(self.parameters, norm, LIMIT)
        self.optimizer.step()
        self.first_load = self.first_load or [int(n) for router in self.routers[:1] for n in router.load]
        balance_experts(self.module, self.plan, self.tokens)
        total = torch.tensor([loss / ranks], dtype=torch.float64)
        for group in (self.tokens, self.group("pp")):
            if group is not None:
                dist.all_reduce(total, group=group)
        return total.item(), norm

    def _pass(self, inputs: Tensor, targets: Tensor, weight: Tensor, factor: float) -> float:
        if not self.many("pp"):
            loss = token_loss_sum(self.module(inputs), targets, weight) * factor
            loss.backward()
            return loss.item()
        return self._pipeline(inputs, targets, weight, factor)

    def _pipeline(self, inputs: Tensor, targets: Tensor, weight: Tensor, factor: float) -> float:
        """Two stages, one after the other."""
        group = self.group("pp")
        shape = (*inputs.shape, self.options.dim)
        if self.at["pp"] == 0:
            sent = self.module(inputs)
            dist.send(sent.detach().contiguous(), group=group, group_dst=1)
            grad = torch.empty(shape)
            dist.recv(grad, group=group, group_src=1)
            sent.backward(grad)
            return 0.0
        received = torch.empty(shape)
        dist.recv(received, group=group, group_src=0)
        loss = token_loss_sum(self.module(received.requires_grad_()), targets, weight) * factor
        loss.backward()
        assert received.grad is not None
        dist.send(received.grad, group=group, group_dst=0)
        return loss.item()

    @torch.no_grad()
    def _reduce(self, ranks: int) -> None:
        others = self.group("dp", "ep", "sp") if self.many("shard") else self.tokens
        for p in self.parameters:
            if id(p) in self.experts or others is None or p.grad is None:
                continue
            # FSDP2 has averaged over its own dimension already.
            grad = clip.local(p.grad)
            grad.div_(dist.get_world_size(others))
            if self.mutant == "data":
                grad.mul_(dist.get_rank(others) == 0)
            dist.all_reduce(grad, group=others)
        divisor = 1 if self.mutant == "experts" else ranks // self.degrees["shard"]
        reduce_expert_gradients(self.module, self.plan, divisor, self.replicas)

    def _norm(self) -> float:
        if self.mutant == "norm":
            with mock.patch.object(clip, "_parts", return_value=dist.get_world_size()):
                return grad_norm(self.parameters, self.degrees["pp"])
        return grad_norm(self.parameters, 1 if self.mutant == "stages" else self.degrees["pp"])

    def owned(self) -> dict[str, int]:
        """Elements of each parameter on this rank."""
        return {name: clip.local(p.detach()).numel() for name, p in self.module.named_parameters()}

    def plain(self) -> str:
        """SHA-256 of the parameters that every rank of a stage holds whole."""
        whole = [p.detach().flatten() for p in self.parameters if not isinstance(p, DTensor)]
        return hashlib.sha256(torch.cat([*whole, torch.empty(0)]).numpy().tobytes()).hexdigest()


def batch(step: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Tokens [BATCH, SEQUENCE + 1] that can be learned, and weights with some filling, of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    start = torch.randint(vocab, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    weight = torch.ones(BATCH, SEQUENCE)
    weight[-1, SEQUENCE // 2 - 1 :] = 0.0
    return (start + stride * torch.arange(SEQUENCE + 1)) % vocab, weight


CASES: dict[str, Callable[[int, int, dict[str, Any]], Any]] = {"train": train}


def spread(results: Sequence[dict[str, Any]], single: dict[str, Any]) -> float:
    """The largest difference of a loss or gradient norm of any rank to the single process."""
    pairs = [(r[key], single[key]) for r in results for key in ("losses", "norms")]
    return max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
