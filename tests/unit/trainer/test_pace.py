"""The timeout of collectives follows the steps; a slow rank is told of, once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.blobs import Json
from trainer.pace import MEASURED_STEPS, SLOW_FACTOR, SLOW_LOOKS, Pace, Stragglers, slow_rank
from trainer.process_group import Group
from trainer.spec import RestartSpec, SpecRefused


class Told:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Mapping[str, Any]]] = []

    def emit(self, kind: str, data: Mapping[str, Json]) -> None:
        self.events.append((kind, data))

    def beat(self) -> None:
        """Nothing."""


class Ranks:
    """A group of two, of which the other rank's slowest step is known."""

    rank = 0
    world_size = 2

    def __init__(self, theirs: float) -> None:
        self._theirs = theirs
        self.allowed: list[float] = []

    def agree(self, name: str, mine: Json, judge: Callable[[list[Json]], Json]) -> Json:
        assert name == "pace"
        return judge([mine, self._theirs])

    def allow(self, seconds: float) -> None:
        self.allowed.append(seconds)


def busy(*seconds: float) -> list[dict[str, float]]:
    return [{"rank": rank, "busy_s": value} for rank, value in enumerate(seconds)]


@given(
    st.lists(st.floats(0.001, 500), min_size=MEASURED_STEPS + 1, max_size=MEASURED_STEPS + 5),
    st.floats(0.001, 500),
    st.floats(1, 100),
    st.floats(1, 10),
)
def test_a_collective_may_take_a_multiple_of_the_slowest_step_and_never_less_than_the_floor(
    steps: list[float], theirs: float, floor: float, factor: float
) -> None:
    now, told, ranks = 0.0, Told(), Ranks(theirs)
    policy = RestartSpec(group_timeout_s=floor, group_timeout_factor=factor)
    pace = Pace(cast("Group", ranks), told, policy, lambda: now)
    for took in steps:
        now += took
        pace.step_done()
    slowest = max(*steps[1 : MEASURED_STEPS + 1], theirs)
    assert ranks.allowed == [pytest.approx(max(floor, factor * slowest))]
    ((kind, said),) = told.events
    assert kind == "collective_timeout"
    assert (said["factor"], said["floor_s"]) == (factor, floor)
    assert said["slowest_step_s"] == pytest.approx(slowest)


def test_nothing_is_derived_from_fewer_steps() -> None:
    told, ranks = Told(), Ranks(1.0)
    pace = Pace(cast("Group", ranks), told, RestartSpec(), lambda: 0.0)
    for _ in range(MEASURED_STEPS):
        pace.step_done()
    assert (ranks.allowed, told.events) == ([], [])


@pytest.mark.parametrize("factor", [0.5, float("inf"), float("nan")])
def test_a_factor_that_gives_no_time_is_refused(factor: float) -> None:
    with pytest.raises(SpecRefused, match="group_timeout_factor"):
        RestartSpec(group_timeout_factor=factor).check()


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=8))
def test_a_rank_is_slow_when_it_is_busy_longer_than_the_others_by_the_factor(seconds: list[float]) -> None:
    found = slow_rank(busy(*seconds))
    if found is None:
        rest: Sequence[float] = sorted(seconds)[:-1]
        assert not rest or max(seconds) <= SLOW_FACTOR * max(rest)
    else:
        assert seconds[found.rank] == max(seconds) == found.busy_s
        assert found.busy_s > SLOW_FACTOR * found.others_s


def test_a_slow_rank_is_told_once_and_again_after_it_was_not() -> None:
    told = Told()
    stragglers = Stragglers(told)
    looks = [(1, 1), (1, 2), (1, 2), (1, 2), (1, 1), (1, 2), (1, 1), (2, 1), (2, 1), (1, 2), (1, 2)]
    for step, seconds in enumerate(looks):
        stragglers.look(step, busy(*seconds))
    assert SLOW_LOOKS == 2
    assert [(data["rank"], data["step"]) for _, data in told.events] == [(1, 2), (0, 8), (1, 10)]
