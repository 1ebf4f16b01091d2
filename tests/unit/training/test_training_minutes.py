"""Validations by minutes of training, and as bits per byte."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest

from headway.catalog.run_facts import RunEvent
from headway.registry.text_candidates import bits_by_minute
from headway.training.minutes import Judged, timed


def _event(seconds: float, kind: str, attempt: int | None = 1, **data: Any) -> RunEvent:  # noqa: ANN401
    return RunEvent(1, attempt, 0, 1, kind, data, round(seconds * 1e6))


def test_minutes_count_from_the_first_step_that_can_be_taken() -> None:
    found = timed(
        [
            _event(0, "phase", name="data"),
            _event(60, "phase", name="train"),
            _event(90, "step", step=5),
            _event(120, "epoch", step=10, valid_loss=5.0),
            _event(121, "phase", name="save"),
            _event(125, "phase", name="train"),
            _event(180, "epoch", step=20, valid_loss=4),
            _event(181, "epoch", step=30, valid_loss=None),
        ]
    )
    assert found == [Judged(1.0, 10, 5.0), Judged(2.0, 20, 4.0)]


def test_what_lay_between_two_attempts_is_not_training() -> None:
    found = timed(
        [
            _event(0, "phase", 1, name="train"),
            _event(60, "epoch", 1, step=10, valid_loss=5.0),
            _event(90, "step", 1, step=14),
            _event(1000, "phase", None, name="train"),
            _event(5000, "phase", 2, name="train"),
            _event(5030, "epoch", 2, step=20, valid_loss=4.0),
        ]
    )
    assert found == [Judged(1.0, 10, 5.0), Judged(2.0, 20, 4.0)]


def test_nats_per_token_become_bits_per_original_byte() -> None:
    valid = pa.table({"tokens": [40, 60], "bytes": [150, 250]})
    found = list(bits_by_minute([Judged(1.234, 7, 2.0)], valid))
    assert found[0]["minute"] == 1.23
    assert found[0]["step"] == 7
    assert found[0]["bits_per_byte"] == pytest.approx(2.0 * 100 / (math.log(2) * 400), abs=1e-4)
