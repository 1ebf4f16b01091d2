"""What a run claims about being computed again, and how far two computations are apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from trainer.blobs import canonical_json
from trainer.spec import Precision, RunSpec

if TYPE_CHECKING:
    from headway.catalog.run_facts import Attempt

Level = Literal["bit", "tolerance", "statistical"]

LEVELS: dict[Level, str] = {
    "bit": "the same bits, on the same layout, versions, threads and kind of CPU",
    "tolerance": "the same losses and gradient norms but for rounding: attempts ran on different layouts",
    "statistical": "the same in the mean: operations were allowed that differ from run to run",
}

TOLERANCE: dict[Precision, float] = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 5e-3}
"""How far losses and gradient norms of one run may lie apart on different layouts, by precision."""


def claimed_level(spec: RunSpec, attempts: Sequence[Attempt]) -> Level:
    """What a run of these attempts, in order, can promise; attempts that never started computed nothing."""
    if spec.determinism != "deterministic":
        return "statistical"
    layouts = {canonical_json(dict(a.layout)) for a in attempts if a.reason_code != "never_started"}
    return "bit" if len(layouts) <= 1 else "tolerance"
