"""What a model takes of a row of feature values, looked up once per version."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias, cast

import pyarrow as pa

from headway.serving.scoring import ContractNotMet, model_inputs

Row: TypeAlias = tuple[Any, ...]


class ModelInputs:
    """Picks a contract's inputs, in its order, out of rows of plain values.

    Args:
        contract: the registered contract.
        schema: the columns of the rows.

    Raises:
        ContractNotMet: an input is not among the columns, or of another type.
    """

    def __init__(self, contract: Mapping[str, object], schema: pa.Schema) -> None:
        # The batch path decides what fits, on a table without rows.
        model_inputs(contract, schema.empty_table())
        self.schema = schema
        places = {name: at for at, name in enumerate(schema.names)}
        self._names = list(input_types(contract))
        self._pick = _picker([places[name] for name in self._names])
        inputs = cast("Sequence[Mapping[str, Any]]", contract["inputs"])
        self._required = [at for at, declared in enumerate(inputs) if not declared.get("nullable", True)]

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """The inputs of each row. Raises `ContractNotMet` for a null where the contract takes none."""
        picked = [self._pick(row) for row in rows]
        for number, row in enumerate(picked, 1):
            for at in self._required:
                if row[at] is None:
                    raise ContractNotMet(
                        f"row {number}: the model requires {self._names[at]!r}, and it is null",
                        "give it in the request",
                    )
        return picked


def input_types(contract: Mapping[str, object]) -> dict[str, str]:
    """Names and types of a contract's inputs, in its order."""
    return {i["name"]: i["type"] for i in cast("Sequence[Mapping[str, Any]]", contract["inputs"])}


def _picker(places: Sequence[int]) -> Callable[[Row], Row]:
    if len(places) > 1:
        return itemgetter(*places)
    # `itemgetter` of one place gives the value itself, no tuple.
    return lambda row: tuple(row[at] for at in places)
