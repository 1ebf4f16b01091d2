"""What a layout asks of the memory of one rank, by kind, from the sizes of a decoder and before anything starts.

Parameters, gradients and AdamW's two moments are counted as in Rajbhandari and others, ZeRO (2020), section 3.1, with
what each engine divides over which ranks. Activations are what autograd keeps for the backward pass, counted tensor by
tensor as in Korthikanti and others, Reducing Activation Recomputation in Large Transformer Models (2022), section 4,
for the blocks of `trainer/models/decoder.py`: RMSNorm, grouped-query attention that keeps no score matrix, SwiGLU.
Micro-batches in flight: Narayanan and others, Efficient Large-Scale Language Model Training (2021), section 2.2, and
Qi and others, Pipeline Parallelism with Controllable Memory (2024), for ZB-V.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.errors import HeadwayError
from trainer.blobs import Json
from trainer.spec import STAGES_PER_RANK, BatchSpec, LayoutSpec, ModelFacts, Precision

NEEDED = ("layers", "heads", "kv_heads", "dim", "hidden", "vocab", "sequence")

# Elements that DeepSpeed reduces at a time, as its engine here is configured.
_DEEPSPEED_BUCKET = 1 << 25

_MOMENTS = 8  # bytes per parameter: two moments in fp32


class SizesUnknown(HeadwayError):
    """A model whose options do not state the sizes that its memory follows from."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the rank that needs most of each kind.

    `optimizer` holds AdamW's moments and, with DeepSpeed's stages, the fp32 copy of the parameters. `transient` is what
    comes and goes within a step: gathered blocks, casts of the weights, communication buckets. The kinds in `host` are
    kept in host memory and not on the accelerator; without an accelerator both are the same.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    transient: int
    host: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """All kinds together."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.transient

    def to_json(self) -> dict[str, Json]:
        """By kind, with the total."""
        kinds = ("parameters", "gradients", "optimizer", "activations", "transient", "total")
        return {**{kind: getattr(self, kind) for kind in kinds}, "host": list(self.host)}


def estimate_memory(model: ModelFacts, layout: LayoutSpec, precision: Precision, batch: BatchSpec) -> MemoryEstimate:
    """The memory of one rank of a valid layout.

    Args:
        model: Sizes of a decoder.
        layout: Its layout.
        precision: Of the run.
        batch: Rows (sequences of `model.sequence` tokens) per step, and micro-batches.

    Raises:
        SizesUnknown: names the sizes that the model's options do not state.
    """
    missing = [name for name in NEEDED if not getattr(model, name)]
    if missing:
        raise SizesUnknown(
            f"the model's options state no {', '.join(missing)}", "the estimate is made from the sizes of a decoder"
        )
    held = _held(model, layout)
    parameters, gradients, optimizer = _states(held, _held_experts(model, layout), layout, precision)
    return MemoryEstimate(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=_activations(model, layout, precision, batch),
        transient=_transient(model, held, layout, precision),
        host=_on_host(layout),
    )


def parameter_count(model: ModelFacts) -> int:
    """Parameters of a whole decoder."""
    ends = model.vocab * model.dim * (1 if model.tied else 2) + model.dim
    return model.layers * _block_parameters(model, LayoutSpec()) + ends


def _block_parameters(model: ModelFacts, layout: LayoutSpec) -> int:
    """Parameters of one block on one rank: tensor ranks divide attention and plain SwiGLU, expert ranks the experts."""
    key_width = model.dim // model.heads * model.kv_heads
    attention = 2 * model.dim * (model.dim + key_width) // layout.tp
    feed = 3 * model.dim * model.hidden // layout.tp
    if model.experts:
        # A router has one row of weights per expert, which every rank holds.
        feed = _block_experts(model, layout) + model.experts * model.dim
    return attention + feed + 2 * model.dim


def _block_experts(model: ModelFacts, layout: LayoutSpec) -> int:
    return model.experts // layout.ep * 3 * model.dim * model.hidden


def _held(model: ModelFacts, layout: LayoutSpec) -> int:
    """Parameters of the stage with most of them, before anything is sharded."""
    table = model.vocab * model.dim // layout.tp
    blocks = model.layers // layout.pp * _block_parameters(model, layout)
    if layout.pp == 1:
        return blocks + table * (1 if model.tied else 2) + model.dim
    # ZB-V bends the pipeline: its first rank has the first and the last stage.
    return blocks + model.dim + table * (2 if layout.schedule == "zbv" else 1)


def _held_experts(model: ModelFacts, layout: LayoutSpec) -> int:
    return model.layers // layout.pp * _block_experts(model, layout)


def _states(held: int, experts: int, layout: LayoutSpec, precision: Precision) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer at rest."""
    if layout.engine != "deepspeed":
        # FSDP2 shards over the expert ranks too, all but the experts.
        ranks = layout.ep if layout.engine == "fsdp2" else 1
        own = ((held - experts) // ranks + experts) // layout.shard
        return 4 * own, 4 * own, _MOMENTS * own
    width, ranks = _width(precision), layout.dp * layout.sp
    parameters = width * held // (ranks if layout.zero == 3 else 1)
    gradients = width * held // (ranks if layout.zero >= 2 else 1)
    optimizer = (_MOMENTS + 4) * held // ranks if layout.zero else _MOMENTS * held
    return parameters, gradients, optimizer


def _transient(model: ModelFacts, held: int, layout: LayoutSpec, precision: Precision) -> int:
    width = _width(precision)
    # The block that computes and the one that is fetched meanwhile.
    gathered = 2 * width * _block_parameters(model, layout)
    if layout.engine == "fsdp2":
        return gathered if layout.shard > 1 or precision != "fp32" else 0
    if layout.engine == "ddp":
        return 0 if precision == "fp32" else 2 * held
    return width * min(_DEEPSPEED_BUCKET, held) + (gathered if layout.zero == 3 else 0)


def _on_host(layout: LayoutSpec) -> tuple[str, ...]:
    return {"": (), "optimizer": ("optimizer",), "parameters": ("parameters", "gradients", "optimizer")}[layout.offload]


def _activations(model: ModelFacts, layout: LayoutSpec, precision: Precision, batch: BatchSpec) -> int:
    rows = batch.global_size // (layout.data_ranks * batch.accumulation)
    tokens = rows * model.sequence // layout.sp
    block = _block_activations(model, layout, precision)
    kept = _stream_width(layout, precision) * model.dim if layout.activation_checkpointing else block
    again = block if layout.activation_checkpointing else 0
    stages = layout.pp * STAGES_PER_RANK[layout.schedule]
    in_flight = kept * (model.layers // stages) * _stages_in_flight(layout, batch.accumulation)
    return tokens * (in_flight + again + _end_activations(model, layout, precision))


def _block_activations(model: ModelFacts, layout: LayoutSpec, precision: Precision) -> int:
    """Bytes per token that autograd keeps of one block.

    Each of the two norms keeps its input, the normalised input (both in fp32, always), one fp32 scale and its result,
    whole on every tensor rank. Under autocast every layer that reads the result casts it for itself: three and two.
    Divided are queries, keys, values, the attention's result, its row of log-sums in fp32, and in SwiGLU both products,
    the gate and what enters `w2`.
    """
    width, dim = _width(precision), model.dim
    key_width = dim // model.heads * model.kv_heads
    attention = (width * (2 * dim + 2 * key_width) + 4 * model.heads) // layout.tp
    first, second = (3, 2) if _casts(layout, precision) else (1, 1)
    feed = width * 4 * model.hidden // layout.tp
    if model.experts:
        feed = _expert_activations(model, layout, precision)
        # Rows go to a router in fp32, and as copies to experts.
        second = 1 if precision == "fp32" else 0
    return 8 + (16 + width * (first + second)) * dim + attention + feed


def _expert_activations(model: ModelFacts, layout: LayoutSpec, precision: Precision) -> int:
    """The same of a mixture of experts: rows are copied for each of their experts, and so are the results.

    In 16 bits the router has a row of its own in fp32, and what a result is weighted with makes it fp32. Autocast casts
    the copied rows for each of the two matrices that read them.
    """
    width, dim, taken = _width(precision), model.dim, model.top_k or 2
    routing = 32 * taken + 8 * model.experts + (0 if precision == "fp32" else 4 * dim)
    copies = 4 + 3 * width if _casts(layout, precision) else 4 + 2 * width
    return routing + taken * (copies * dim + 4 * width * model.hidden)


def _end_activations(model: ModelFacts, layout: LayoutSpec, precision: Precision) -> int:
    """Bytes per token of the last norm, the logits and their log-softmax in fp32."""
    width = _width(precision)
    return (8 + width) * model.dim + (width + 4) * model.vocab // layout.tp


def _stages_in_flight(layout: LayoutSpec, micro_batches: int) -> int:
    """Stage-times-micro-batch activations that the rank with most of them holds at once."""
    each = STAGES_PER_RANK[layout.schedule]
    if layout.pp == 1:
        return 1
    if layout.schedule == "gpipe":
        return micro_batches
    if layout.schedule == "1f1b":
        return min(micro_batches, layout.pp)
    most = 2 * layout.pp if layout.schedule == "zbv" else (each - 1) * layout.pp + 2 * (layout.pp - 1) + 1
    return min(micro_batches * each, most)


def _width(precision: Precision) -> int:
    return 4 if precision == "fp32" else 2


def _casts(layout: LayoutSpec, precision: Precision) -> bool:
    """Whether the engine trains by autocast over fp32 parameters."""
    return layout.engine == "ddp" and precision != "fp32"


def _stream_width(layout: LayoutSpec, precision: Precision) -> int:
    return 4 if _casts(layout, precision) else _width(precision)
