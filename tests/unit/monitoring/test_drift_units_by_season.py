"""Another temperature scale that a season hides from the whole reference shows against the week before."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.monitoring_worlds import DAY, START, calibrated

from headway.loading import load_pipeline
from headway.monitoring.cases import run_cases
from headway.monitoring.drift import DriftPolicy, judge_window
from headway.monitoring.reference import Reference, Window, numeric_column
from headway.monitoring.reports import feature_units

POLICY = DriftPolicy(minimum=300)
WEEK = 7 * DAY


def _week(rng: np.random.Generator, mean: float, rows: int = 600) -> NDArray[np.float64]:
    """Hourly-looking temperatures of a week: its days differ, and its hours."""
    days = rng.normal(mean, 6, 7)[np.arange(rows) * 7 // rows]
    return days + rng.normal(0, 5, rows)


@pytest.fixture(scope="module")
def reference() -> Reference:
    """Eight months from hard frost (10 F) to heat, which a mild week in Celsius is inside of."""
    rng = np.random.default_rng(3)
    weeks = [_week(rng, mean) for mean in np.concatenate([np.linspace(8, 40, 16), np.linspace(42, 85, 18)])]
    times = np.concatenate([START + i * WEEK + np.arange(600) * (WEEK // 600) for i in range(len(weeks))])
    world = Window({"temp": numeric_column(np.concatenate(weeks))}, times=times)
    return calibrated(world, POLICY, 600, span=WEEK)


def _current(values: NDArray[np.float64]) -> Window:
    return Window({"temp": numeric_column(values)}, times=START + 44 * WEEK + np.arange(len(values)) * (WEEK // 600))


@pytest.mark.parametrize("seed", range(8))
def test_a_week_in_celsius_is_an_incident_against_the_week_before(reference: Reference, seed: int) -> None:
    rng = np.random.default_rng([5, seed])
    before, now = _current(_week(rng, 52)), (_week(rng, 49) - 32) * 5 / 9
    alone = judge_window(reference, _current(now), POLICY)
    assert not alone.incidents, "the whole reference does not tell: that is why the week before is asked"
    judged = judge_window(reference, _current(now), POLICY, before)
    assert [(i.kind, i.feature) for i in judged.incidents] == [("unit_change", "temp")]
    assert "Fahrenheit to Celsius" in judged.incidents[0].detail
    assert judged.verdict == "data_incident"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("fall", [-25, -12, 0, 12, 25])
def test_weather_that_turns_between_weeks_is_none(reference: Reference, seed: int, fall: int) -> None:
    rng = np.random.default_rng([6, seed])
    judged = judge_window(reference, _current(_week(rng, 50 + fall)), POLICY, _current(_week(rng, 50)))
    assert not judged.incidents


def test_only_temperatures_are_compared_with_the_week_before() -> None:
    """Delays after a storm are also as if they had been Celsius and came in Fahrenheit."""
    units = feature_units(load_pipeline("flight_delay").spec)
    assert {n for n, u in units.items() if u == "degF"} == {"weather_at_origin__temp", "weather_at_origin__dewp"}
    assert units["carrier_arrivals__mean_delay_24h"] not in ("degF", "degC")


def test_declared_cases_may_name_the_window_before(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    spring, before, now = _week(rng, 40), _week(rng, 52), (_week(rng, 50) - 32) * 5 / 9
    wide = np.concatenate([spring, _week(rng, 10), _week(rng, 80)])
    case = {"name": "celsius", "reference": {"temp": wide.tolist()}, "current": {"temp": now.tolist()}}
    file = tmp_path / "cases.json"
    told = {"before": {"temp": before.tolist()}, "expected": {"incidents": ["unit_change:temp"]}}
    file.write_text(json.dumps({"kind": "drift", "policy": {"minimum": 300}, "cases": [case | told]}))
    assert [answer["agree"] for answer in run_cases(file)] == [True]
