"""How far two computations of one run are apart, told from what they told and the tensors that they kept."""

import math
import struct
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from headway.training.claims import Level
from headway.training.replay import Replay, Told, compare
from headway.training.tensors import StoredTensor, TensorsUnreadable, differences, read_tensors

TOLERANCE = 1e-5


def told(*losses: float, norm: float = 1.0) -> dict[str, Told]:
    return {f"step {i}": Told(i, {"loss": loss, "grad_norm": norm}) for i, loss in enumerate(losses, start=1)}


def tensors(**values: Any) -> dict[str, StoredTensor]:  # noqa: ANN401
    return read_tensors(safetensors.numpy.save({k: np.asarray(v, dtype=np.float32) for k, v in values.items()}))


def answer(first: Any, again: Any, kept: Any = (), claimed: Level = "bit") -> Replay:  # noqa: ANN401
    return compare(first, again, list(kept), claimed, TOLERANCE)


def test_the_same_told_and_kept_is_bit_exact() -> None:
    same = answer(told(0.5, 0.4), told(0.5, 0.4, 0.3), [(2, tensors(a=[1, 2]), tensors(a=[1, 2]))])
    assert (same.in_words(), same.as_claimed, same.steps, same.tensors) == ("bit_exact", True, 2, 1)


@given(st.floats(1e-12, 9e-6), st.sampled_from(["bit", "tolerance", "statistical"]))
def test_a_small_difference_is_named_by_its_size_and_breaks_the_claim_of_bits_only(by: float, claimed: Level) -> None:
    found = answer(told(0.5, 0.4), told(0.5, 0.4 + by), claimed=claimed)
    if 0.4 + by != 0.4:
        assert found.verdict == "within_tolerance"
        assert found.eps == pytest.approx(by, abs=1e-15)
        assert found.as_claimed == (claimed != "bit")


@given(st.integers(0, 3), st.floats(1e-4, 10) | st.just(math.inf) | st.just(math.nan))
def test_the_first_step_that_is_too_far_apart_is_named(place: int, by: float) -> None:
    first, again = [0.5, 0.4, 0.3, 0.2], [0.5, 0.4, 0.3, 0.2]
    again[place:] = [loss + by for loss in again[place:]]
    found = answer(told(*first), told(*again))
    assert found.in_words() == f"diverged(step {place + 1}, loss)"
    assert not found.as_claimed


def test_the_tensor_that_differs_most_at_the_first_checkpoint_after_it_is_named() -> None:
    kept = [
        (1, tensors(a=[1.0], b=[1.0]), tensors(a=[1.0], b=[1.0])),
        (2, tensors(a=[1.0], b=[1.0]), tensors(a=[1.5], b=[3.0])),
        (3, tensors(a=[1.0], b=[1.0]), tensors(a=[9.0], b=[3.0])),
    ]
    found = answer(told(0.5, 0.4, 0.3), told(0.5, 0.9, 0.9), kept)
    assert (found.step, found.tensor) == (2, "b")


def test_a_tensor_alone_breaks_bits_and_not_tolerance() -> None:
    kept = [(2, tensors(a=[1.0, 2.0]), tensors(a=[1.0, 2.5]))]
    assert answer(told(0.5), told(0.5), kept).in_words() == "diverged(step 2, a)"
    assert answer(told(0.5), told(0.5), kept, "tolerance").as_claimed
    near = [(2, tensors(a=[1.0]), tensors(a=[1.000001]))]
    assert answer(told(0.5), told(0.5), near).verdict == "within_tolerance"


def test_gradient_norms_are_compared_by_their_size() -> None:
    assert answer(told(0.5, norm=1000.0), told(0.5, norm=1000.001)).verdict == "within_tolerance"
    assert answer(told(0.5, norm=1.0), told(0.5, norm=1.001)).in_words() == "diverged(step 1, grad_norm)"


def test_another_environment_is_never_as_claimed() -> None:
    mismatch = Replay("environment_mismatch", "statistical", what="torch: 1 then, 2 now")
    assert (mismatch.in_words(), mismatch.as_claimed) == ("environment_mismatch(torch: 1 then, 2 now)", False)


@given(st.dictionaries(st.text("abc/.", min_size=1), st.lists(st.floats(-9, 9, width=32), max_size=4), max_size=4))
def test_tensors_are_read_as_they_were_written(values: dict[str, list[float]]) -> None:
    read = (
        tensors(**{})
        if not values
        else read_tensors(safetensors.numpy.save({k: np.asarray(v, dtype=np.float32) for k, v in values.items()}))
    )
    assert {k: np.frombuffer(v.data, "<f4").tolist() for k, v in read.items()} == values
    assert list(differences(read, read)) == []


def test_half_precision_and_what_stands_on_one_side_only() -> None:
    one, two = (
        StoredTensor("BF16", (1,), struct.pack("<H", 0x3F80)),
        StoredTensor("BF16", (1,), struct.pack("<H", 0x4000)),
    )
    (found,) = differences({"x": one}, {"x": two})
    assert found.size == 1.0
    assert [d.size for d in differences({"x": one}, {})] == [math.inf]
    ints = StoredTensor("I64", (1,), bytes(8)), StoredTensor("I64", (1,), bytes([1, *bytes(7)]))
    assert [d.size for d in differences({"x": ints[0]}, {"x": ints[1]})] == [math.inf]


@pytest.mark.parametrize("data", [b"", b"\xff" * 20, struct.pack("<Q", 3) + b"[1]"])
def test_bytes_that_are_no_such_file_are_refused(data: bytes) -> None:
    with pytest.raises(TensorsUnreadable):
        read_tensors(data)
