"""Replicas that average their gradients: torch's DistributedDataParallel over gloo."""

from collections.abc import Sequence
from contextlib import nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.batches import Batch
from trainer.engines.base import (
    ParameterGroups,
    State,
    StepResult,
    batch_loss,
    check_same_groups,
    describe_groups,
    load_weights,
    make_optimizer,
    moment_slice,
    optimizer_groups,
    set_rates,
    whole_moments,
)
from trainer.process_group import Group, peers
from trainer.spec import RunSpec


class DdpEngine:
    """See `trainer.engines.base.Engine`. Every rank holds the whole model and the whole optimizer; rank 0 saves."""

    def __init__(self, spec: RunSpec, model: nn.Module, declared: ParameterGroups, group: Group) -> None:
        self.module = model
        self._group = group
        self._clip_norm = spec.optimizer.clip_norm
        self._optimizer = make_optimizer(optimizer_groups(model, declared, spec.optimizer), spec.optimizer)
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        with peers():
            self._replica = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step(self, micro_batches: Sequence[Batch], real_rows: int, lr_factor: float) -> StepResult:
        """See `Engine`."""
        set_rates(self._optimizer, lr_factor)
        self._optimizer.zero_grad()
        own_loss = 0.0
        for index, batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with nullcontext() if last else self._replica.no_sync(), peers():
                loss = batch_loss(self._replica, batch, real_rows)
                # DDP averages over the ranks; what is wanted is the sum of the ranks' parts of one mean.
                (loss * self._group.world_size).backward()
            own_loss += loss.item()
        grad_norm = self._clip()
        self._optimizer.step()
        return StepResult(self._group.sum(own_loss), grad_norm)

    def state(self) -> State:
        """See `Engine`."""
        described = describe_groups(self.module, self._optimizer.param_groups, self._optimizer.param_groups)
        if self._group.rank != 0:
            return {"model": {}, "optimizer": {}, **described}
        moments = {
            name: moment_slice(self._optimizer.state[p], slice(None), 0)
            for name, p in self.module.named_parameters()
            if p in self._optimizer.state
        }
        return {"model": self.module.state_dict(), "optimizer": moments, **described}

    def load(self, states: Sequence[State]) -> None:
        """See `Engine`."""
        check_same_groups(
            states[0], describe_groups(self.module, self._optimizer.param_groups, self._optimizer.param_groups)
        )
        load_weights(self.module, states[0]["model"])
        for name, p in self.module.named_parameters():
            moments = whole_moments(states, name, p.numel())
            if moments is not None:
                step = moments.pop("step")
                self._optimizer.state[p] = {"step": step, **{k: v.view_as(p) for k, v in moments.items()}}

    def _clip(self) -> float:
        limit = self._clip_norm or float("inf")
        return nn.utils.clip_grad_norm_(self._trainable, limit, foreach=True).item()
