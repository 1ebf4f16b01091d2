"""The parts of a step: they add up, whatever is entered and left, and waits are counted to the thread that waits."""

import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.timing import PARTS, Part, StepClock

parts = st.sampled_from(PARTS)


@dataclass
class Hands:
    """A clock's hands, moved by the test."""

    at: int = 0
    moved: dict[Part, int] = field(default_factory=dict[Part, int])

    def __call__(self) -> int:
        return self.at

    def go(self, part: Part, ns: int) -> None:
        self.at += ns
        self.moved[part] = self.moved.get(part, 0) + ns


@dataclass(frozen=True)
class Block:
    """What happens inside of a part: time before, blocks, time after each."""

    part: Part
    before: int
    inner: tuple["Block", ...]


blocks = st.recursive(
    st.builds(Block, parts, st.integers(0, 10**12), st.just(())),
    lambda inner: st.builds(Block, parts, st.integers(0, 10**12), st.lists(inner, max_size=3).map(tuple)),
    max_leaves=12,
)


def run(clock: StepClock, hands: Hands, block: Block) -> None:
    with clock.part(block.part):
        hands.go(block.part, block.before)
        for inner in block.inner:
            run(clock, hands, inner)
            hands.go(block.part, 3)


@given(st.lists(st.tuples(blocks, st.integers(0, 10**9)), max_size=4))
def test_parts_add_up_to_the_wall_time_and_nothing_is_counted_twice(steps: list[tuple[Block, int]]) -> None:
    hands = Hands(at=77)
    clock = StepClock(hands)
    since = hands.at
    for block, between in steps:
        run(clock, hands, block)
        hands.go("other", between)
        clock.step_done()
    split = clock.take()
    assert sum(split.ns.values()) == hands.at - since
    assert {part: ns for part, ns in split.ns.items() if ns} == {p: ns for p, ns in hands.moved.items() if ns}
    assert split.steps == len(steps)
    assert sum(clock.take().ns.values()) == 0


@given(blocks)
def test_a_rank_is_busy_while_it_does_not_wait(block: Block) -> None:
    hands = Hands()
    clock = StepClock(hands)
    run(clock, hands, block)
    clock.step_done()
    split = clock.take()
    waited = hands.moved.get("communication", 0) * 1e-9
    assert split.busy_s == pytest.approx(split.wall_s - waited, abs=1e-9)
    assert sum(split.per_step().values()) == pytest.approx(split.wall_s)


def test_a_part_ends_when_its_block_raises() -> None:
    hands = Hands()
    clock = StepClock(hands)

    def fail() -> None:
        with clock.part("forward"):
            hands.go("forward", 5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    hands.go("other", 7)
    assert clock.take().per_step() == pytest.approx({"forward": 5e-9, "other": 7e-9})


def test_a_clock_knows_its_thread() -> None:
    clock = StepClock()
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(clock.is_of_this_thread))
    thread.start()
    thread.join()
    assert (clock.is_of_this_thread, seen) == (True, [False])
