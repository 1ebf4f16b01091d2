"""What a model takes of a row: by name, in the contract's order, refused where the contract takes no null."""

from typing import Any

import pyarrow as pa
import pytest

from headway.serving.live.inputs import ModelInputs, input_types
from headway.serving.scoring import ContractNotMet

SCHEMA = pa.schema(
    [("x", pa.float64()), ("word", pa.dictionary(pa.int32(), pa.string())), ("n", pa.int64()), ("y", pa.float64())]
)
ROWS: list[tuple[Any, ...]] = [(0.5, "a", 1, None), (None, None, 2, 0.25)]


def contract(*inputs: tuple[str, str, bool]) -> dict[str, object]:
    return {"inputs": [{"name": n, "type": t, "nullable": nullable} for n, t, nullable in inputs]}


def test_inputs_are_picked_by_name_in_the_contracts_order() -> None:
    wanted = contract(("n", "int64", True), ("word", "string", True), ("x", "float64", True))
    assert ModelInputs(wanted, SCHEMA).of(ROWS) == [(1, "a", 0.5), (2, None, None)]
    assert input_types(wanted) == {"n": "int64", "word": "string", "x": "float64"}


@pytest.mark.parametrize(("inputs", "expected"), [([("y", "float64", True)], [(None,), (0.25,)]), ([], [(), ()])])
def test_a_model_may_take_one_input_or_none(inputs: list[tuple[str, str, bool]], expected: list[tuple[Any]]) -> None:
    assert ModelInputs(contract(*inputs), SCHEMA).of(ROWS) == expected


def test_what_does_not_meet_the_contract_is_refused_by_name_and_row() -> None:
    with pytest.raises(ContractNotMet, match="'z'"):
        ModelInputs(contract(("z", "float64", True)), SCHEMA)
    with pytest.raises(ContractNotMet, match="'n' as float64"):
        ModelInputs(contract(("n", "float64", True)), SCHEMA)
    with pytest.raises(ContractNotMet, match="row 2: the model requires 'x'"):
        ModelInputs(contract(("x", "float64", False)), SCHEMA).of(ROWS)
