"""Which raw rows made a feature of one row, found from the declaration and checked against the kernel.

The selection is written down a second time here, for one observation, in plain terms. It is then held against the
compiled plan: the kernel has to count as many rows, and the plan run on the selected rows alone has to give the very
same bits. So what is listed is what was used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.declaration import PipelineSpec, duration_us
from headway.errors import HeadwayError
from headway.features import kernel
from headway.features.clocks import instants
from headway.features.kernel import Observations
from headway.features.kernel.encode import EncodedKeys, encode_keys
from headway.features.plan import Cells, CompiledView, FeaturePlan, SourceRows, first_observed, prepare

Rows = NDArray[np.int64]


class RowsNotExplained(HeadwayError):
    """The rows found for a feature do not give its value: the explanation would be wrong."""


@dataclass(frozen=True)
class Selection:
    """Positions, in the table of their source, of the rows that a feature was made of."""

    source: str
    rows: Rows


def select_rows(
    spec: PipelineSpec,
    plan: FeaturePlan,
    labels: pa.Table,
    index: int,
    sources: Mapping[str, pa.Table],
    cells: Mapping[str, Cells],
) -> dict[str, Selection]:
    """The rows behind every view and custom feature of one row.

    Args:
        spec: the declaration.
        plan: the compiled plan that gave `cells`.
        labels: label inputs of all rows that were computed together.
        index: the row asked about.
        sources: rows of every source.
        cells: features of all rows of `labels`.

    Raises:
        RowsNotExplained: a selection does not reproduce its cell.
    """
    one = labels.slice(index, 1)
    found: dict[str, Selection] = {}
    for name, view in plan.views.items():
        table = sources[view.spec.source]
        prepared = prepare(view.source, view.clock, table)
        chosen = _view_rows(name, view, one, prepared, index, cells)
        for feature, rows in chosen.items():
            _require_same_value(view, feature, one, table, rows, cells[feature], index)
        found |= {f: Selection(view.spec.source, rows) for f, rows in chosen.items()}
    first = first_observed(labels, spec.label.observation_time)
    for name, custom in plan.custom.items():
        # A function may look at all that it is given.
        numbered = sources[custom.source].append_column("__position", pa.array(np.arange(len(sources[custom.source]))))
        given = replace(custom, columns=(*custom.columns, "__position")).rows(numbered, first)
        found[name] = Selection(custom.source, given.column("__position").to_numpy())
    return found


def _view_rows(
    name: str, view: CompiledView, one: pa.Table, rows: SourceRows, index: int, cells: Mapping[str, Cells]
) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for feature in view.spec.latest_features():
        chosen = cells[f"{name}__{feature}"].chosen
        assert chosen is not None
        found[f"{name}__{feature}"] = chosen[index : index + 1][chosen[index : index + 1] >= 0]
    windows = view.spec.window_features()
    for duration in dict.fromkeys(w.duration for w in windows.values()):
        selected = _window_rows(view, one, rows, duration_us(duration))
        found |= {f"{name}__{f}": rows.origin[selected] for f, w in windows.items() if w.duration == duration}
    return found


def _window_rows(view: CompiledView, one: pa.Table, rows: SourceRows, duration: int) -> Rows:
    """Each identity in its latest version known at the instant; of these the key's own inside the window."""
    keys = encode_keys(
        {right: rows.table.column(right) for right in view.spec.keys.values()},
        {right: one.column(left) for left, right in view.spec.keys.items()},
    )
    moments, valid = instants(one.column(view.observation_time), view.observation_time)
    code, at = int(keys.observations[0]), int(moments[0])
    encoded = rows.encoded
    assert encoded.row_id is not None
    known = np.flatnonzero(_passes(encoded.available_time, at, view.spec.boundary))
    order = known[np.lexsort((encoded.sequence[known], encoded.available_time[known], encoded.row_id[known]))]
    identity = encoded.row_id[order]
    newest = order[np.append(identity[1:] != identity[:-1], True)] if len(order) else order
    inside = (encoded.event_time[newest] >= at - duration) & _passes(encoded.event_time[newest], at, view.spec.boundary)
    selected = np.sort(newest[inside & (keys.rows[newest] == code) & ~encoded.deleted[newest]])
    selected = selected if code >= 0 and valid[0] else selected[:0]
    _require_same_count(view, Observations(keys.observations, moments, valid), keys, rows, duration, len(selected))
    return selected


def _passes(moments: NDArray[np.int64], at: int, boundary: str) -> NDArray[np.bool_]:
    return moments < at if boundary == "lt" else moments <= at


def _require_same_count(
    view: CompiledView,
    asked: Observations,
    keys: EncodedKeys,
    rows: SourceRows,
    duration: int,
    found: int,
) -> None:
    answer = kernel.window(
        replace(rows.encoded, key=keys.rows),
        asked,
        np.zeros(len(rows.encoded)),
        np.zeros(len(rows.encoded), np.bool_),
        groups=keys.groups,
        boundary=view.spec.boundary,
        durations=[duration],
        aggregates=["count"],
    )
    counted = int(answer[0].values["count"][0])
    if counted != found:
        raise RowsNotExplained(
            f"view {view.name!r}: {found} rows were found where the kernel counts {counted}", "report this as a fault"
        )


def _require_same_value(
    view: CompiledView, feature: str, one: pa.Table, table: pa.Table, rows: Rows, cell: Cells, index: int
) -> None:
    """Run the view on the selected rows alone; its value must be the cell's, to the last bit."""
    alone = view.answer(one, prepare(view.source, view.clock, table.take(pa.array(rows))))[feature]
    if _bits(alone.value) != _bits(cell.value.slice(index, 1)):
        raise RowsNotExplained(
            f"feature {feature!r}: the {len(rows)} rows found for it give another value", "report this as a fault"
        )


def _bits(value: pa.Array) -> Iterable[object]:
    plain = value.cast(value.type.value_type) if pa.types.is_dictionary(value.type) else value
    return (plain.view(pa.int64()) if pa.types.is_floating(plain.type) else plain).to_pylist()
