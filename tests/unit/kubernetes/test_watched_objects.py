"""The copy of Jobs and pods that watching keeps: resumed, listed anew, and not shown while nobody answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.fake_cluster import FakeCluster

from headway.training.kubernetes import view
from headway.training.kubernetes.client import ClusterUnreachable, Forbidden
from headway.training.kubernetes.view import Informer

PATIENCE_S = 120.0


@pytest.fixture
def cluster() -> FakeCluster:
    made = FakeCluster()
    made.put("pods", pod("first"))
    made.put("pods", {**pod("other"), "metadata": {"name": "other", "labels": {"app": "b"}}})
    return made


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def informer(cluster: FakeCluster, told: list[str]) -> Iterator[Informer]:
    made = Informer(cluster, "pods", "app=a", lambda item: told.append(item["metadata"]["name"]))
    yield made
    made.close()


def pod(name: str, **status: Any) -> dict[str, Any]:  # noqa: ANN401
    """A pod that the selector chooses."""
    return {"metadata": {"name": name, "labels": {"app": "a"}}, "status": status}


def wait_for(look: Callable[[], object], what: str) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def test_the_first_use_lists_and_changes_follow(cluster: FakeCluster, informer: Informer, told: list[str]) -> None:
    assert list(informer.objects()) == ["first"]
    assert told == ["first"]
    cluster.put("pods", pod("second"))
    wait_for(lambda: sorted(informer.objects()) == ["first", "second"], "the new pod")
    cluster.change("pods", "first", {"status": {"phase": "Failed"}})
    wait_for(lambda: informer.objects()["first"]["status"] == {"phase": "Failed"}, "the change")
    cluster.remove("pods", "first")
    wait_for(lambda: list(informer.objects()) == ["second"], "the removal")
    assert told.count("first") == 3
    assert cluster.counted("list", "pods") == 1


def test_a_dropped_watch_is_resumed_where_it_was(cluster: FakeCluster, informer: Informer) -> None:
    informer.objects()
    wait_for(lambda: cluster.watches, "a watch")
    cluster.watches[0].broken = True
    wait_for(lambda: len(cluster.watches) > 1, "another watch")
    cluster.put("pods", pod("second"))
    wait_for(lambda: "second" in informer.objects(), "the new pod")
    assert all(watch.closed or watch.broken or watch is cluster.watches[-1] for watch in cluster.watches)


def test_a_version_too_old_is_listed_anew(cluster: FakeCluster, informer: Informer) -> None:
    informer.objects()
    wait_for(lambda: cluster.watches, "a watch")
    cluster.oldest = 100
    for _ in range(100):
        cluster.put("events", {"metadata": {"name": f"e{len(cluster.objects)}"}})
    cluster.watches[0].broken = True
    wait_for(lambda: cluster.counted("list", "pods") > 1, "another list")
    cluster.put("pods", pod("second"))
    wait_for(lambda: "second" in informer.objects(), "the new pod")


def test_now_and_then_everything_is_listed_anew(
    cluster: FakeCluster, informer: Informer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a watch forgot to tell is found."""
    monkeypatch.setattr(view, "RELIST_S", 0.0)
    informer.objects()
    wait_for(lambda: cluster.watches, "a watch")
    cluster.objects.pop(("pods", "first"))
    cluster.watches[0].broken = True
    wait_for(lambda: not informer.objects(), "the pod to be forgotten")


def test_while_nobody_answers_nothing_is_shown(cluster: FakeCluster, informer: Informer) -> None:
    informer.objects()
    wait_for(lambda: cluster.watches, "a watch")
    cluster.away = True
    cluster.watches[0].broken = True

    def refused() -> bool:
        try:
            informer.objects()
        except ClusterUnreachable:
            return True
        return False

    wait_for(refused, "the copy to be withheld")
    cluster.away = False
    wait_for(lambda: not refused(), "the copy to be shown again")
    cluster.put("pods", pod("second"))
    wait_for(lambda: "second" in informer.objects(), "the new pod")


def test_a_first_use_that_fails_is_the_callers(cluster: FakeCluster, informer: Informer) -> None:
    cluster.forbidden.add(("list", "pods"))
    for _ in range(2):
        with pytest.raises(Forbidden):
            informer.objects()
    assert not cluster.watches
    cluster.forbidden.clear()
    assert list(informer.objects()) == ["first"]


def test_closing_ends_the_thread(cluster: FakeCluster, informer: Informer) -> None:
    informer.objects()
    wait_for(lambda: cluster.watches, "a watch")
    informer.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "watch-pods"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_an_unforeseen_error_ended_is_replaced(cluster: FakeCluster) -> None:
    told: list[str] = []

    def hear(item: dict[str, Any]) -> None:
        told.append(item["metadata"]["name"])
        if told == ["first", "second"]:
            raise ZeroDivisionError

    informer = Informer(cluster, "pods", "app=a", hear)
    try:
        informer.objects()
        ended = informer._thread
        assert ended is not None
        cluster.put("pods", pod("second"))
        wait_for(lambda: not ended.is_alive(), "the end of the thread")
        assert sorted(informer.objects()) == ["first", "second"]
        cluster.put("pods", pod("third"))
        wait_for(lambda: sorted(informer.objects()) == ["first", "second", "third"], "the new pod")
    finally:
        informer.close()
