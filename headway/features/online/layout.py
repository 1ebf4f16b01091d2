"""The values table of `features.assemble`, put together again and again for one feature set."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.declaration import PipelineSpec
from headway.features.assemble import companions, values_table
from headway.features.kernel import Reason, collapse
from headway.features.labels import LabelRows
from headway.features.plan import Cells

# By reason code: the word of what a model may see of it.
_WORDS = pa.array([Reason(int(r)).name.lower() for r in collapse(np.array(list(Reason), dtype=np.int8))])


class Layout:
    """Makes values tables. The first is made by `values_table` itself, which decides the schema of all."""

    def __init__(self, spec: PipelineSpec) -> None:
        self._spec = spec
        self._schema: pa.Schema | None = None
        self._first_of: dict[str, str] = {}
        for feature, group in companions(spec).items():
            self._first_of.setdefault(group, feature)

    def table(
        self, labels: LabelRows, cells: Mapping[str, Cells], incomplete: Mapping[str, NDArray[np.bool_]]
    ) -> pa.Table:
        """What `values_table` gives."""
        if self._schema is None:
            first = values_table(self._spec, labels, cells, incomplete)
            self._schema = first.schema
            return first
        found: dict[str, pa.Array | pa.ChunkedArray] = {n: c.value for n, c in cells.items()}
        reasons = np.concatenate([cells[feature].reason for feature in self._first_of.values()])
        words = _WORDS.take(pa.array(reasons))
        rows = len(labels)
        for number, (group, feature) in enumerate(self._first_of.items()):
            found[f"{group}__event_time"] = cells[feature].event_time
            found[f"{group}__reason"] = words.slice(number * rows, rows)
        for view, flags in incomplete.items():
            found[f"{view}__incomplete"] = pa.array(flags)
        for table in (labels.inputs, labels.outcome):
            found |= dict(zip(table.column_names, table.columns, strict=True))
        return pa.Table.from_arrays([found[n] for n in self._schema.names], schema=self._schema)
