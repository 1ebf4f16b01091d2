"""Label rows of a partition: which rows ask for a prediction, and which are left out and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headway.datasets.arrow import compute as pc
from headway.declaration import PipelineSpec

NO_TARGET = "no_target"
NO_OBSERVATION_TIME = "no_observation_time"


@dataclass(frozen=True)
class LabelRows:
    """Label rows in the order of their identity.

    `inputs` holds what features may read (keys, carried columns, observation time); `outcome` holds the row identity,
    the target and when it became known. Both have one row per label. `excluded` counts rows left out, by reason.
    """

    inputs: pa.Table
    outcome: pa.Table
    excluded: Mapping[str, int]

    def __len__(self) -> int:
        return self.inputs.num_rows


def label_rows(spec: PipelineSpec, rows: pa.Table) -> LabelRows:
    """Label rows among the released rows of one partition of the label source."""
    label = spec.label
    keep = np.ones(rows.num_rows, dtype=np.bool_)
    excluded: dict[str, int] = {}
    for reason, column in label.exclude.items():
        flagged = pc.fill_null(rows.column(column), False).to_numpy() & keep
        excluded[reason] = int(flagged.sum())
        keep &= ~flagged
    for reason, column in ((NO_TARGET, label.target), (NO_OBSERVATION_TIME, label.observation_time)):
        missing = rows.column(column).is_null().to_numpy() & keep
        if missing.any():
            excluded[reason] = int(missing.sum())
        keep &= ~missing
    identity = spec.sources[label.source].row_id
    kept = _plain(rows.filter(pa.array(keep))).sort_by([(c, "ascending") for c in identity])
    outcome = tuple(dict.fromkeys([*identity, label.target, label.known_at]))
    return LabelRows(kept.select(spec.label_inputs()), kept.select(outcome), excluded)


def _plain(rows: pa.Table) -> pa.Table:
    """The rows with dictionary-encoded text as plain text, which Arrow can sort."""
    fields = [f.with_type(f.type.value_type) if pa.types.is_dictionary(f.type) else f for f in rows.schema]
    return rows.cast(pa.schema(fields))
