"""Which raw rows made a feature of one row, found from the declaration and checked against the kernel.

The selection is written down a second time here, for one observation, in plain terms. It is then held against the
compiled plan: the kernel has to count as many rows, and the plan run on the selected rows alone has to give the very
same bits. So what is listed is what was used.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from headway.features.plan import Cells, CompiledView, CustomFunction, FeaturePlan, SourceRows, first_observed, prepare

Rows = NDArray[np.int64]

_POSITION = "__position"


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
        rows = _custom_rows(custom, spec.label.observation_time, one, first, sources[custom.source])
        alone = custom.run(one, custom.rows(sources[custom.source].take(pa.array(rows)), first))
        _require_same(name, alone, rows, cells[name], index)
        found[name] = Selection(custom.source, rows)
    return found


def _custom_rows(custom: CustomFunction, observed: str, one: pa.Table, first: int, table: pa.Table) -> Rows:
    """What the function gets and may use: the leakage proof showed that rows not known before the row do not matter."""
    at = int(instants(one.column(observed), observed)[0][0])
    numbered = table.append_column(_POSITION, pa.array(np.arange(len(table))))
    given = replace(custom, columns=(*custom.columns, _POSITION)).rows(numbered, first)
    times = custom.clock.times(table)
    positions = given.column(_POSITION).to_numpy()
    return positions[times.admitted[positions] & (times.known[positions] < at)]


def _view_rows(
    name: str, view: CompiledView, one: pa.Table, rows: SourceRows, index: int, cells: Mapping[str, Cells]
) -> dict[str, Rows]:
    keys = encode_keys(
        {right: rows.table.column(right) for right in view.spec.keys.values()},
        {right: one.column(left) for left, right in view.spec.keys.items()},
    )
    moments, valid = instants(one.column(view.observation_time), view.observation_time)
    asked = Observations(keys.observations, moments, valid)
    seen = _known_of_key(view, rows, keys, asked)
    found: dict[str, Rows] = {}
    for feature, declared in view.spec.latest_features().items():
        decisive = _decisive(view, rows, seen, declared.latest, cells[f"{name}__{feature}"], index)
        found[f"{name}__{feature}"] = rows.origin[decisive]
    windows = view.spec.window_features()
    for duration in dict.fromkeys(w.duration for w in windows.values()):
        oldest = int(moments[0]) - duration_us(duration)
        selected = seen[(rows.encoded.event_time[seen] >= oldest) & ~rows.encoded.deleted[seen]]
        _require_same_count(view, asked, keys, rows, duration_us(duration), len(selected))
        found |= {f"{name}__{f}": rows.origin[selected] for f, w in windows.items() if w.duration == duration}
    return found


def _known_of_key(view: CompiledView, rows: SourceRows, keys: EncodedKeys, asked: Observations) -> Rows:
    """Each identity in its latest version known at the instant; of these the visible ones of the key."""
    encoded, at, code = rows.encoded, int(asked.time[0]), int(keys.observations[0])
    assert encoded.row_id is not None
    if code < 0 or not asked.valid[0]:
        return np.empty(0, np.int64)
    known = np.flatnonzero(_passes(encoded.available_time, at, view.spec.boundary))
    order = known[np.lexsort((encoded.sequence[known], encoded.available_time[known], encoded.row_id[known]))]
    last = np.ones(len(order), dtype=np.bool_)
    last[:-1] = encoded.row_id[order[1:]] != encoded.row_id[order[:-1]]
    newest = order[last]
    visible = _passes(encoded.event_time[newest], at, view.spec.boundary)
    return np.sort(newest[visible & (keys.rows[newest] == code)])


def _decisive(view: CompiledView, rows: SourceRows, seen: Rows, column: str, cell: Cells, index: int) -> Rows:
    """The row that decided a `latest` cell: the answer, or the expired or retracted row in its place."""
    assert cell.chosen is not None
    if not cell.event_time[index].is_valid:
        return seen[:0]
    encoded = rows.encoded
    assert encoded.row_id is not None
    if view.spec.null_policy == "last_known":
        null = rows.table.column(column).is_null().to_numpy()
        seen = seen[~null[seen] | encoded.deleted[seen]]
    ranks = (encoded.row_id[seen], encoded.sequence[seen], encoded.available_time[seen], encoded.event_time[seen])
    best = seen[np.lexsort(ranks)[-1:]]
    chosen = int(cell.chosen[index])
    if chosen >= 0 and rows.origin[best].tolist() != [chosen]:
        raise RowsNotExplained(
            f"view {view.name!r}: row {rows.origin[best].tolist()} was found where the kernel chose {chosen}",
            "report this as a fault",
        )
    return best


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
    _require_same(feature, alone, rows, cell, index)


def _require_same(feature: str, alone: Cells, rows: Rows, cell: Cells, index: int) -> None:
    there = cell.take(np.array([index]))
    same = _bits(alone.value) == _bits(there.value) and _bits(alone.event_time) == _bits(there.event_time)
    # Without rows, what a cell says of itself may rest on nulls that were passed over.
    if not same or (len(rows) and alone.reason[0] != there.reason[0]):
        raise RowsNotExplained(
            f"feature {feature!r}: the {len(rows)} rows found for it do not give its value", "report this as a fault"
        )


def _bits(value: pa.Array) -> list[object]:
    plain = value.cast(value.type.value_type) if pa.types.is_dictionary(value.type) else value
    return (plain.view(pa.int64()) if pa.types.is_floating(plain.type) else plain).to_pylist()
