"""The columns of a values table, and where each of them lies among what a request is answered from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from headway.datasets.text import ARROW_TYPES
from headway.declaration import PipelineSpec
from headway.features.assemble import values_table
from headway.features.plan import Cells, FeaturePlan
from headway.serving.features import label_inputs, without_outcome
from headway.serving.requests import serving_of

_STAMP = pa.timestamp("us", tz="UTC")


@dataclass(frozen=True)
class Layout:
    """`schema` is that of `values_table`, `labels` that of the label columns which a request may know.

    `row` puts one row in the order of the schema, from None, the label columns, the cells of each view, value,
    event time and reason of each function's feature, and the flags of the views.
    """

    schema: pa.Schema
    labels: pa.Schema
    row: Callable[[Sequence[Any]], tuple[Any, ...]]


def layout_of(
    spec: PipelineSpec, plan: FeaturePlan, types: Mapping[str, Mapping[str, pa.DataType]], cells: Sequence[str]
) -> Layout:
    """Lay out the values of a feature set.

    Args:
        spec: the declaration.
        plan: the compiled feature set.
        types: by view: the types of its source's columns.
        cells: the names of all views' cells, in the order in which `Layout.row` gets them.
    """
    nothing = pa.table({n: pa.array([], ARROW_TYPES[f.type]) for n, f in serving_of(spec).request.items()})
    inputs = label_inputs(spec, nothing)
    features = {
        f"{name}__{f}": types[name][declared.latest]
        for name, view in plan.views.items()
        for f, declared in view.spec.latest_features().items()
    }
    features |= {f"{n}__{f}": pa.float64() for n, v in plan.views.items() for f in v.spec.window_features()}
    features |= {n: f.type for n, f in (*plan.custom.items(), *plan.derived.items())}
    empty = {n: Cells(pa.array([], t), pa.array([], _STAMP), np.empty(0, np.int8)) for n, t in features.items()}
    flags = dict.fromkeys(spec.features.views, np.empty(0, np.bool_))
    schema = values_table(spec, without_outcome(spec, inputs), empty, flags).schema
    functions = (f"{n}{part}" for n in (*plan.custom, *plan.derived) for part in ("", "__event_time", "__reason"))
    names = ["", *inputs.column_names, *cells, *functions, *(f"{v}__incomplete" for v in flags)]
    place = {name: at for at, name in enumerate(names)}
    # What no request knows (the target above all) is null.
    place[spec.label.target] = 0
    return Layout(schema, inputs.schema, itemgetter(*(place.get(n, 0) for n in schema.names)))
