"""What an attempt at a stored run spec is given beside it: where its files lie, and the little of the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from trainer.spec import AttemptSpec, RunSpec

Accelerator = Literal["cpu", "cuda"]


def attempt_spec(
    spec: RunSpec,
    run_id: str,
    number: int,
    token: int,
    *,
    nodes: int,
    run_dir: Path,
    store_root: Path,
    accelerator: Accelerator,
) -> AttemptSpec:
    """Describe attempt `number` of a run, on `nodes` nodes.

    `run_dir` holds the run's own copy of the code, which its workers import.
    """
    code = run_dir / "code"
    return AttemptSpec(
        run_id=run_id,
        attempt=number,
        token=token,
        nodes=nodes,
        processes_per_node=spec.layout.processes_per_node,
        run_dir=str(run_dir),
        store_root=str(store_root),
        code_root=str(code),
        environment={
            "OMP_NUM_THREADS": str(spec.threads),
            "DS_ACCELERATOR": accelerator,
            # Whatever the tree holds by then.
            "PYTHONPATH": str(code),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    )
