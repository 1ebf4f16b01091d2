"""Quality without labels: what the scores themselves expect, as long as they can be believed.

Confidence-based estimation (CBPE): a calibrated score is the probability of its label, so each row counts as a positive
by its score and as a negative by the rest, and the expected AUC, log loss and rate follow. It holds while scores are
calibrated, inputs stay in the region that training knew, and the relation of inputs to outcomes has not changed. The
first two are checked; the third cannot be seen without labels, which is why the number is always marked `estimated`
and gives way to the realised one as soon as labels are mature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.registry.metrics import Floats, auc

LARGEST_CALIBRATION_ERROR = 0.05
LARGEST_OUT_OF_RANGE = 0.05
LEAST_ROWS = 500


@dataclass(frozen=True)
class Estimate:
    """Estimated quality, or None where an assumption does not hold; `broken` names those that do not.

    `out_of_range` is the share of rows with an input outside of what training knew.
    """

    auc: float | None
    log_loss: float | None
    rate: float | None
    rows: int
    calibration_error: float | None
    out_of_range: float
    broken: tuple[str, ...]


def estimate_quality(
    scores: Floats, calibration_error: float | None, out_of_range: float, incidents: Sequence[str] = ()
) -> Estimate:
    """Estimate the quality of answers without their labels.

    Args:
        scores: probabilities [n].
        calibration_error: that of the version's own evaluation; None: it was never measured.
        out_of_range: share of rows with an input that training did not know.
        incidents: kinds of data incidents among the rows; scores of broken inputs mean nothing.
    """
    broken = [
        *(["too_few_rows"] if len(scores) < LEAST_ROWS else []),
        *(["calibration_unknown"] if calibration_error is None else []),
        *(["not_calibrated"] if (calibration_error or 0.0) > LARGEST_CALIBRATION_ERROR else []),
        *(["unseen_region"] if out_of_range > LARGEST_OUT_OF_RANGE else []),
        *(["data_incident"] if incidents else []),
    ]
    if broken:
        return Estimate(None, None, None, len(scores), calibration_error, out_of_range, tuple(broken))
    kept = np.clip(scores, 1e-15, 1 - 1e-15)
    entropy = -(kept * np.log(kept) + (1 - kept) * np.log1p(-kept))
    doubled = np.concatenate([scores, scores])
    outcome = np.concatenate([np.ones(len(scores)), np.zeros(len(scores))])
    return Estimate(
        auc(doubled, outcome, np.concatenate([scores, 1 - scores])),
        float(entropy.mean()),
        float(scores.mean()),
        len(scores),
        calibration_error,
        out_of_range,
        (),
    )
