"""Loss scaling for fp16: the largest scale under which gradients stay finite (Micikevicius and others, 2018)."""

import math
from collections.abc import Mapping
from typing import Any

_FIRST, _MOST = 2.0**16, 2.0**24
_GROWTH_EVERY = 2000


class LossScaler:
    """The factor of the loss in the backward pass; it halves when gradients overflow, and doubles after 2000 steps.

    The decision hangs on the gradient norm over all ranks, so all ranks take the same one.
    """

    def __init__(self) -> None:
        self.scale = _FIRST
        self._good = 0

    def skips(self, norm: float) -> bool:
        """Whether the step is left out, given the gradient norm; sets the next scale."""
        if not math.isfinite(norm):
            self.scale = max(self.scale / 2, 1.0)
            self._good = 0
            return True
        self._good += 1
        if self._good == _GROWTH_EVERY:
            self.scale, self._good = min(self.scale * 2, _MOST), 0
        return False

    def state(self) -> dict[str, Any]:
        """What `load` takes."""
        return {"scale": self.scale, "good": self._good}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with the scale of a saved state."""
        self.scale, self._good = float(state["scale"]), int(state["good"])
