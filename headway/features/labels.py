"""Label rows of a partition: which rows ask for a prediction, and which are left out and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.datasets.arrow import compute as pc
from headway.declaration import PipelineSpec
from headway.features.clocks import clock_of
from headway.features.kernel.encode import encode_identity

NO_TARGET = "no_target"
NO_OBSERVATION_TIME = "no_observation_time"
NO_KNOWN_TIME = "target_without_known_time"
KNOWN_TOO_EARLY = "known_before_observation"
SUPERSEDED = "superseded"
DELETED = "deleted"


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
    excluded: dict[str, int] = {}
    keep = _newest_versions(spec, rows, excluded)
    for reason, column in label.exclude.items():
        flagged = pc.fill_null(rows.column(column), False).to_numpy() & keep
        excluded[reason] = int(flagged.sum())
        keep &= ~flagged
    for reason, column in ((NO_TARGET, label.target), (NO_OBSERVATION_TIME, label.observation_time)):
        _leave_out(rows.column(column).is_null().to_numpy(), reason, keep, excluded)
    _leave_out(rows.column(label.known_at).is_null().to_numpy(), NO_KNOWN_TIME, keep, excluded)
    early = pc.fill_null(pc.less(rows.column(label.known_at), rows.column(label.observation_time)), False).to_numpy()
    _leave_out(early, KNOWN_TOO_EARLY, keep, excluded)
    identity = spec.sources[label.source].row_id
    kept = _plain(rows.filter(pa.array(keep))).sort_by([(c, "ascending") for c in identity])
    outcome = tuple(dict.fromkeys([*identity, label.target, label.known_at]))
    return LabelRows(kept.select(spec.label_inputs()), kept.select(outcome), excluded)


def _leave_out(out: NDArray[np.bool_], reason: str, keep: NDArray[np.bool_], excluded: dict[str, int]) -> None:
    """Take rows out and count those that were still in."""
    lost = out & keep
    if lost.any():
        excluded[reason] = int(lost.sum())
    keep &= ~out


def _newest_versions(spec: PipelineSpec, rows: pa.Table, excluded: dict[str, int]) -> NDArray[np.bool_]:
    """One row per identity, its newest by availability and sequence; a retracted one is no label row."""
    source = spec.sources[spec.label.source]
    keep = np.ones(rows.num_rows, dtype=np.bool_)
    identity = encode_identity({c: rows.column(c) for c in source.row_id})
    available = clock_of(source).times(rows).available
    sequence = np.zeros(rows.num_rows, np.int64)
    if source.sequence is not None:
        sequence = pc.fill_null(rows.column(source.sequence), 0).to_numpy()
    order = np.lexsort((sequence, available, identity))
    newest = np.ones(rows.num_rows, dtype=np.bool_)
    newest[order[:-1]] = identity[order[1:]] != identity[order[:-1]]
    _leave_out(~newest, SUPERSEDED, keep, excluded)
    if source.deleted is not None:
        _leave_out(pc.fill_null(rows.column(source.deleted), False).to_numpy(), DELETED, keep, excluded)
    return keep


def _plain(rows: pa.Table) -> pa.Table:
    """The rows with dictionary-encoded text as plain text, which Arrow can sort."""
    fields = [f.with_type(f.type.value_type) if pa.types.is_dictionary(f.type) else f for f in rows.schema]
    return rows.cast(pa.schema(fields))
