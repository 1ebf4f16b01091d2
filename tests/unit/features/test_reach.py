"""A snapshot partition reads what its declared windows and look-backs can touch, and nothing else."""

from datetime import UTC, datetime

import pytest

from headway.declaration import PipelineSpec
from headway.features.reach import Interval, memory, partitions_in_reach
from headway.loading import load_pipeline


@pytest.fixture(scope="module")
def flights() -> PipelineSpec:
    return load_pipeline("flight_delay").spec


def _instant(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 1_000_000


def test_flights_of_a_day_read_the_days_that_can_still_matter(flights: PipelineSpec) -> None:
    observed = Interval(_instant("2013-03-09T23:00:00"), _instant("2013-03-10T22:59:00"))
    reach = partitions_in_reach(flights, observed)
    # 48 h for an expired previous departure, and 33 h that an arrival may lie after its scheduled departure.
    assert reach["flights"] == ("2013-03-06", "2013-03-07", "2013-03-08", "2013-03-09", "2013-03-10")
    # Three hours of look-back, and three more in which an expired observation is still called expired.
    assert reach["weather"] == ("2013-03-09", "2013-03-10")
    assert reach["planes"] == ("",)
    assert set(reach) == {"flights", "weather", "planes"}, "sources that no feature reads are not in reach"


def test_the_calendar_cuts_the_reach_at_both_ends(flights: PipelineSpec) -> None:
    first = partitions_in_reach(flights, Interval(_instant("2013-01-01T09:00:00"), _instant("2013-01-01T23:00:00")))
    assert first["flights"] == ("2013-01-01", "2013-01-02"), "a flight may leave an hour before its schedule"
    last = partitions_in_reach(flights, Interval(_instant("2014-01-01T01:00:00"), _instant("2014-01-01T03:00:00")))
    assert last["flights"][-1] == "2014-01-01"


def test_without_label_rows_only_whole_tables_are_in_reach(flights: PipelineSpec) -> None:
    assert partitions_in_reach(flights, None) == {"weather": (), "flights": (), "planes": ("",)}


def test_memory_is_the_longest_window_or_two_look_backs(flights: PipelineSpec) -> None:
    hours = {name: memory(view) / 3_600_000_000 for name, view in flights.features.views.items()}
    assert hours["origin_arrivals"] == 24
    assert hours["aircraft_departure"] == 48
    assert hours["weather_at_origin"] == 6
    assert hours["plane"] == 0
