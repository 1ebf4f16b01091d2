"""DeepSpeed's configuration for a run spec.

Nothing in it makes DeepSpeed build anything: AdamW is torch's own, on offloaded parts too.
"""

import re
from typing import Any

from torch import nn

from trainer.parallel.plan import ParallelPlan, matching
from trainer.spec import RunSpec

_BUCKET_MOST = 1 << 25
_HOST = {"device": "cpu", "pin_memory": False}


def make_config(spec: RunSpec, model: nn.Module, plan: ParallelPlan | None) -> dict[str, Any]:
    """The configuration; sizes of buffers follow those of the model, 2 GB are the default whatever its size."""
    layout = spec.layout
    config: dict[str, Any] = {
        # The size of the whole batch would be checked against the world, tensor and sequence ranks among it.
        "train_micro_batch_size_per_gpu": spec.batch.global_size // (layout.data_ranks * spec.batch.accumulation),
        "gradient_accumulation_steps": spec.batch.accumulation,
        "gradient_clipping": spec.optimizer.clip_norm,
        "zero_optimization": _stage(spec, model, plan),
        "zero_allow_untested_optimizer": True,
        # Else offloaded parts are refused to any optimizer but one that DeepSpeed would build.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }
    if spec.precision == "bf16":
        # Gradients are added up over the ranks in fp32: bf16 sums lose small ones.
        config |= {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
    if layout.tp > 1:
        assert plan is not None
        specs = {"use_default_specs": False, "layer_specs": _layers(model, plan)}
        config["tensor_parallel"] = {"autotp_size": layout.tp, "partition_config": specs}
    return config


def _stage(spec: RunSpec, model: nn.Module, plan: ParallelPlan | None) -> dict[str, Any]:
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    bucket = min(_BUCKET_MOST, 2 * -(-sum(sizes) // 2))
    chosen: dict[str, Any] = {
        "stage": spec.layout.zero,
        "round_robin_gradients": False,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if spec.layout.zero == 3:
        # By default every parameter of less than 100,000 elements would stay whole on all ranks.
        chosen["stage3_param_persistence_threshold"] = 0
        # The block after the one that is computed is gathered meanwhile; what was used is given up at once.
        block = _largest_block(model, plan)
        chosen |= {"stage3_prefetch_bucket_size": block, "stage3_max_live_parameters": 2 * max(block, *sizes)}
        chosen["stage3_max_reuse_distance"] = 0
    if spec.layout.offload:
        chosen["offload_optimizer"] = _HOST
    if spec.layout.offload == "parameters":
        chosen["offload_param"] = _HOST
    return chosen


def _largest_block(model: nn.Module, plan: ParallelPlan | None) -> int:
    blocks = list(model.get_submodule(plan.blocks).children()) if plan is not None else []
    return max((sum(p.numel() for p in block.parameters()) for block in blocks), default=0)


def _layers(model: nn.Module, plan: ParallelPlan) -> list[dict[str, Any]]:
    """AutoTP's form of the plan. Embeddings stay whole: it would divide their width, not their tokens."""
    layers = list[dict[str, Any]]()
    for pattern, style in plan.tensor.items():
        for name, layer in matching(model, pattern):
            if isinstance(layer, nn.Embedding):
                continue
            spec = {
                "patterns": [rf"^{re.escape(name)}\.weight$"],
                "partition_type": "row" if style == "row" else "column",
            }
            layers.append({**spec, "gather_output": True} if style == "vocab" else spec)
    return layers
