"""Counts the collectives that torch really issues, by kind: DDP's and FSDP2's own, DTensor's, and those of our code.

Counting watches every operation, which costs: it is for tests and for looking at single steps, and off otherwise.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
}
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")

_counts: Counter[str] = Counter()


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        # A DTensor turns its operation into plain ones, and those come here again.
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        if func.namespace in _NAMESPACES:
            kind = _KINDS.get(func._overloadpacket.__name__)
            if kind is not None:
                _counts[kind] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[None]:
    """Count the collectives that this thread issues in here (backward passes on a CPU run in it too)."""
    with _Watch():
        yield


def counted() -> dict[str, int]:
    """Collectives by kind, from the start of the process, as far as they were counted."""
    return dict(sorted(_counts.items()))
