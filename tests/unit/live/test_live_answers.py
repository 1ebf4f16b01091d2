"""Batches: everybody gets their own answer, a fault stays with its request, and what is late is not computed."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.live_bench import spooled
from support.live_doubles import (
    FRESH,
    STALE,
    EchoFeatures,
    EchoVersion,
    answerer_of,
    asked_of,
    outcome,
    slot_of,
)

from headway.declaration import InferenceLogSpec
from headway.features.online.store import OnlineUnavailable as StoreUnavailable
from headway.serving.live.lane import Lane
from headway.serving.live.spool import Spool
from headway.serving.live.types import (
    DeadlineExceeded,
    FeaturesUnavailable,
    Inference,
    LogFull,
    OnlineUnavailable,
    QueueFull,
    ScoringFailed,
)


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    opened = Spool(tmp_path / "spool")
    yield opened
    opened.close()


def _lane(features: EchoFeatures, spool: Spool, queue_rows: int = 1_000, batch_rows: int = 64) -> Lane:
    return Lane("m", answerer_of(features, spool), queue_rows, batch_rows)


def _scores(found: list[Inference] | BaseException) -> list[float]:
    assert isinstance(found, list), found
    return [i.probability for i in found]


def test_g03_each_of_fifty_parallel_callers_gets_its_own_rows(spool: Spool) -> None:
    features, version = EchoFeatures(), EchoVersion()
    slot = slot_of(version)

    async def run() -> None:
        lane = _lane(features, spool)
        asked = [asked_of(slot, [100, 101, 102] if i == 25 else [i], caller=f"c{i}") for i in range(50)]
        found = await asyncio.gather(*[outcome(lane, a) for a in asked])
        for i, answers in enumerate(found):
            wanted = [100, 101, 102] if i == 25 else [i]
            assert _scores(answers) == [x / 1_000 for x in wanted]
        lane.close()

    asyncio.run(run())
    # They did share batches, and each answer was logged under its own caller.
    assert version.calls < 10
    logged = {r.caller_id: r.probability for r in spooled(spool.folder)}
    assert len(logged) == 52
    assert (logged["c7"], logged["c25/2"]) == (0.007, 0.102)


def test_g03_a_wrong_number_of_rows_fails_the_batch_for_all_and_is_logged_once(
    spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    from headway.serving.live.child import WrongRowCount

    def short(scores: np.ndarray) -> np.ndarray:
        raise WrongRowCount(len(scores), len(scores) - 1)

    slot = slot_of(EchoVersion(score_rows=short))

    async def run() -> list[list[Inference] | BaseException]:
        lane = _lane(EchoFeatures(), spool)
        found = await asyncio.gather(*[outcome(lane, asked_of(slot, [i])) for i in range(6)])
        lane.close()
        return found

    with caplog.at_level(logging.ERROR):
        found = asyncio.run(run())
    assert [getattr(f, "code", f) for f in found] == ["wrong_row_count"] * 6
    assert len(caplog.records) == 1
    assert spooled(spool.folder) == []


def test_g05_one_bad_row_in_a_batch_fails_alone_with_its_prediction_id(
    spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    slot = slot_of(EchoVersion())

    async def run() -> list[list[Inference] | BaseException]:
        lane = _lane(EchoFeatures(), spool)
        found = await asyncio.gather(*[outcome(lane, asked_of(slot, [i if i != 4 else -1])) for i in range(9)])
        lane.close()
        return found

    with caplog.at_level(logging.ERROR):
        found = asyncio.run(run())
    good = [_scores(f) for i, f in enumerate(found) if i != 4]
    assert good == [[i / 1_000] for i in range(9) if i != 4]
    bad = found[4]
    assert isinstance(bad, ScoringFailed)
    assert bad.code == "feature_code"
    # The caller sees no text that may hold its values; the log has the stack, under the same id.
    assert "domain" not in str(bad)
    assert len(bad.prediction_ids) == 1
    assert any(bad.prediction_ids[0] in r.getMessage() and r.exc_info for r in caplog.records)
    assert len(spooled(spool.folder)) == 8


def test_a_score_that_is_no_probability_fails_its_own_request_only(spool: Spool) -> None:
    slot = slot_of(EchoVersion(score_rows=lambda scores: np.where(scores == 0.003, np.nan, scores)))

    async def run() -> list[list[Inference] | BaseException]:
        lane = _lane(EchoFeatures(), spool)
        found = await asyncio.gather(*[outcome(lane, asked_of(slot, [i])) for i in range(5)])
        lane.close()
        return found

    found = asyncio.run(run())
    assert getattr(found[3], "code", None) == "not_finite"
    assert [r.probability for r in spooled(spool.folder)] == [0.0, 0.001, 0.002, 0.004]


@pytest.mark.parametrize("policy", ["serve", "fail"])
def test_a_stale_view_is_told_or_refused_as_declared(spool: Spool, policy: str) -> None:
    slot = slot_of(EchoVersion(), policy=policy)
    features = EchoFeatures(views=lambda x: {"v": STALE if x == 2 else FRESH})

    async def run() -> list[list[Inference] | BaseException]:
        lane = _lane(features, spool)
        found = await asyncio.gather(*[outcome(lane, asked_of(slot, [i])) for i in range(4)])
        lane.close()
        return found

    found = asyncio.run(run())
    others = [_scores(f) for i, f in enumerate(found) if i != 2]
    assert others == [[0.0], [0.001], [0.003]]
    if policy == "serve":
        (answer,) = found[2]  # type: ignore[misc]
        assert answer.degraded == ("v:too_old",)
        return
    refused = found[2]
    assert isinstance(refused, FeaturesUnavailable)
    assert (refused.view, refused.status, refused.age_s, refused.limit_s) == ("v", "stale", 9.0, 5.0)
    assert len(spooled(spool.folder)) == 3


def test_features_that_depend_on_company_are_computed_row_by_row(spool: Spool) -> None:
    features = EchoFeatures(rows_independent=False)
    slot = slot_of(EchoVersion())

    async def run() -> None:
        lane = _lane(features, spool)
        await asyncio.gather(*[outcome(lane, asked_of(slot, [i, i + 1])) for i in range(3)])
        lane.close()

    asyncio.run(run())
    assert set(features.batches) == {1}
    assert len(spooled(spool.folder)) == 6


def test_what_is_late_is_neither_computed_nor_logged(spool: Spool) -> None:
    """The thread is held; meanwhile one caller's time passes in the queue, one leaves, one waits."""
    held = threading.Event()
    features = EchoFeatures(before=lambda: held.wait(60))
    slot = slot_of(EchoVersion())

    async def run() -> None:
        lane = _lane(features, spool)
        first = asyncio.create_task(outcome(lane, asked_of(slot, [1], seconds=0.05)))
        await asyncio.sleep(0.02)
        late = asyncio.create_task(outcome(lane, asked_of(slot, [2], seconds=0.05)))
        leaves = asyncio.create_task(lane.ask(asked_of(slot, [3])))
        waits = asyncio.create_task(outcome(lane, asked_of(slot, [4])))
        await asyncio.sleep(0.02)
        leaves.cancel()
        found = [await first, await late]
        held.set()
        assert _scores(await waits) == [0.004]
        assert [getattr(f, "where", f) for f in found] == ["features", "queue"]
        assert lane.idle
        assert slot.users == 0
        lane.close()

    asyncio.run(run())
    assert features.batches == [1, 1]
    assert [r.probability for r in spooled(spool.folder)] == [0.004]


def test_a_full_queue_refuses_with_the_time_to_wait_and_one_large_request_is_taken(spool: Spool) -> None:
    held = threading.Event()
    features = EchoFeatures(before=lambda: held.wait(60))
    slot = slot_of(EchoVersion())

    async def run() -> None:
        lane = _lane(features, spool, queue_rows=4)
        first = asyncio.create_task(outcome(lane, asked_of(slot, [1])))
        await asyncio.sleep(0.02)
        large = asyncio.create_task(outcome(lane, asked_of(slot, range(10))))
        await asyncio.sleep(0)
        refused = await outcome(lane, asked_of(slot, [2]))
        assert isinstance(refused, QueueFull)
        assert refused.retry_after_s > 0
        held.set()
        assert len(_scores(await large)) == 10
        assert len(_scores(await first)) == 1
        lane.close()

    asyncio.run(run())


def test_who_cannot_be_answered_in_time_is_refused_at_the_door(spool: Spool) -> None:
    """After slow batches, the time that the queue takes is known."""
    pause = threading.Event()
    features = EchoFeatures(before=lambda: pause.wait(0.2))
    slot = slot_of(EchoVersion())

    async def run() -> None:
        lane = _lane(features, spool, batch_rows=1)
        await outcome(lane, asked_of(slot, [1]))
        waiting = [asyncio.create_task(outcome(lane, asked_of(slot, [i]))) for i in range(8)]
        await asyncio.sleep(0.02)
        assert isinstance(await outcome(lane, asked_of(slot, [9], seconds=0.3)), QueueFull)
        pause.set()
        assert [len(_scores(f)) for f in await asyncio.gather(*waiting)] == [1] * 8
        lane.close()

    asyncio.run(run())


def test_a_burst_that_goes_in_few_batches_is_taken_whole(spool: Spool) -> None:
    pause = threading.Event()
    features = EchoFeatures(before=lambda: pause.wait(0.2))
    slot = slot_of(EchoVersion())

    async def run() -> None:
        lane = _lane(features, spool)
        for i in range(3):
            await outcome(lane, asked_of(slot, [i]))
        # Four batches of what one row took; by rows it would be 40 s.
        burst = [outcome(lane, asked_of(slot, [i], seconds=30.0)) for i in range(200)]
        assert [len(_scores(f)) for f in await asyncio.gather(*burst)] == [1] * 200
        lane.close()

    asyncio.run(run())


def test_a_batch_that_nobody_got_an_answer_from_tells_nothing_of_the_next(spool: Spool) -> None:
    held = threading.Event()
    features = EchoFeatures()
    slot = slot_of(EchoVersion())

    async def run() -> None:
        lane = _lane(features, spool, batch_rows=1)
        await outcome(lane, asked_of(slot, [1]))
        features.before = lambda: held.wait(1.0)
        assert isinstance(await outcome(lane, asked_of(slot, [2], seconds=0.1)), DeadlineExceeded)
        while not lane.idle:
            await asyncio.sleep(0.01)
        features.before = lambda: None
        after = [outcome(lane, asked_of(slot, [i], seconds=2.0)) for i in range(20)]
        assert [len(_scores(f)) for f in await asyncio.gather(*after)] == [1] * 20
        lane.close()

    asyncio.run(run())


@pytest.mark.parametrize("policy", ["must_log", "drop"])
def test_a_full_log_does_as_declared_and_heals(spool: Spool, policy: str) -> None:
    slot = slot_of(EchoVersion(), log=InferenceLogSpec(policy=policy, max_bytes=4096))  # type: ignore[arg-type]
    answerer = answerer_of(EchoFeatures(), spool)

    async def run() -> None:
        lane = Lane("m", answerer, 1_000, 64)
        answered = refused = 0
        for i in range(40):
            found = await outcome(lane, asked_of(slot, [i]))
            answered += isinstance(found, list)
            refused += isinstance(found, LogFull)
        kept = len(spooled(spool.folder))
        assert 0 < kept < 40
        assert answerer.log_full
        if policy == "must_log":
            assert (answered, refused, spool.status().dropped) == (kept, 40 - kept, 0)
        else:
            assert (answered, refused, spool.status().dropped) == (40, 0, 40 - kept)
        spool.seal()
        for path in spool.folder.glob("*.log"):
            path.unlink()
        assert isinstance(await outcome(lane, asked_of(slot, [1])), list)
        assert not answerer.log_full
        lane.close()

    asyncio.run(run())


def test_an_online_store_that_is_away_refuses_and_heals(spool: Spool) -> None:
    features = EchoFeatures(fault=StoreUnavailable("connection refused", "start it"))
    slot = slot_of(EchoVersion())

    async def run() -> None:
        lane = _lane(features, spool)
        found = await asyncio.gather(*[outcome(lane, asked_of(slot, [i])) for i in range(5)])
        assert {type(f) for f in found} == {OnlineUnavailable}
        # Nobody is to blame, so nobody is tried alone.
        assert len(features.batches) == 1
        features.fault = None
        assert _scores(await outcome(lane, asked_of(slot, [1]))) == [0.001]
        lane.close()

    asyncio.run(run())


def test_requests_of_two_versions_are_never_in_one_batch(spool: Spool) -> None:
    old, new = EchoVersion(), EchoVersion(score_rows=lambda scores: scores / 2)
    slots = [slot_of(old, number=1), slot_of(new, number=2)]

    async def run() -> None:
        lane = _lane(EchoFeatures(), spool)
        found = await asyncio.gather(*[outcome(lane, asked_of(slots[i % 2], [8])) for i in range(6)])
        for i, answers in enumerate(found):
            assert _scores(answers) == [[0.008, 0.004][i % 2]]
        lane.close()

    asyncio.run(run())
    assert {(r.epoch, r.probability) for r in spooled(spool.folder)} == {(1, 0.008), (2, 0.004)}


def test_a_deadline_that_passes_while_the_model_works_is_told_and_not_logged(spool: Spool) -> None:
    held = threading.Event()

    def slow(scores: np.ndarray) -> np.ndarray:
        assert held.wait(60)
        return scores

    slot = slot_of(EchoVersion(score_rows=slow))

    async def run() -> None:
        lane = _lane(EchoFeatures(), spool)
        found = await outcome(lane, asked_of(slot, [1], seconds=0.1))
        assert isinstance(found, DeadlineExceeded)
        assert found.where == "compute"
        held.set()
        assert isinstance(await outcome(lane, asked_of(slot, [2])), list)
        lane.close()

    asyncio.run(run())
    assert [r.probability for r in spooled(spool.folder)] == [0.002]
