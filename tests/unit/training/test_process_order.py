"""The order in which processes of an attempt are killed."""

from hypothesis import given
from hypothesis import strategies as st

from headway.training.process_table import Process, elders_first


@st.composite
def forests(draw: st.DrawFn) -> list[Process]:
    """Processes below each other, or below one that is not among them (pid 0), in any order."""
    count = draw(st.integers(0, 12))
    parents = [draw(st.integers(0, pid - 1)) for pid in range(1, count + 1)]
    several = [Process(pid, parent, "S", 0) for pid, parent in enumerate(parents, start=1)]
    return draw(st.permutations(several))


@given(forests())
def test_no_process_comes_before_its_parent(several: list[Process]) -> None:
    order = [process.pid for process in elders_first(several)]
    assert sorted(order) == sorted(process.pid for process in several)
    assert all(order.index(p.parent) < order.index(p.pid) for p in several if p.parent)
