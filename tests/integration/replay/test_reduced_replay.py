"""A reduced replay: recorded events through a real server over HTTP, late outcomes, a week closed by Dagster."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.loop_bench import ENDPOINT, WEEK, copied, make_loop, materialize, temporary_instance
from support.serving_bench import DAYS, opened, pipeline_of
from support.workbench import Workbench

from headway.cli.ui import free_port
from headway.features.online import online_store_for
from headway.home import load_settings
from headway.replay.client import ServingClient, running_server
from headway.replay.events import events_of
from headway.replay.feed import Disturbance, Feed, FeedCount
from headway.replay.moments import moment_of
from headway.serving.ship import ship
from headway.world import move_clock, replayed_time

START, END = moment_of("2026-03-03"), moment_of("2026-03-09")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return make_loop(tmp_path_factory.mktemp("replay"))


def _feed(
    bench: Workbench,
    *stops: int,
    disturbances: tuple[Disturbance, ...] = (),
    on_week: Callable[[str], None] | None = None,
) -> list[FeedCount]:
    """Feed until each stop, every time with a new feed and a new server, as a person who calls it again."""
    settings = load_settings({"HEADWAY_HOME": str(bench.home)})
    pipeline = pipeline_of(bench)
    counts: list[FeedCount] = []
    for stop in stops:
        more = ("--no-sync", "--name", "replay", "--pipeline", str(bench.folder))
        log = bench.home / "serve.log"
        with opened(bench) as services, running_server(settings, ENDPOINT, free_port(0), log, *more) as url:
            client = ServingClient(url, timeout_s=120, deadline_ms=60_000)
            online = online_store_for(settings)
            feed = Feed(
                settings, services, pipeline, online, client, per_day=1_000, disturbances=disturbances, on_week=on_week
            )
            counts.append(feed.run(stop))
            client.close()
            online.close()
            ship(services, {pipeline.name: pipeline}.get, settings.serving_folder)
    return counts


def _start(bench: Workbench, at: int = START) -> None:
    file = load_settings({"HEADWAY_HOME": str(bench.home)}).clock_file
    file.unlink()
    move_clock(file, at)


def _answers(bench: Workbench) -> dict[str, tuple[int | None, float | None]]:
    with opened(bench) as services:
        found = services.catalog.predictions(services.principal, ENDPOINT, START, END)
        assert len({p.caller_id for p in found}) == len(found)
        return {str(p.caller_id): (p.asked_at, p.score) for p in found}


def test_every_event_is_asked_once_and_a_replay_goes_on_where_it_stopped(bench: Workbench, tmp_path: Path) -> None:
    whole, parted = copied(bench, tmp_path / "whole"), copied(bench, tmp_path / "parted")
    closed: list[str] = []
    _start(whole)
    _start(parted)
    (once,) = _feed(whole, END, on_week=closed.append)
    first, second = _feed(parted, moment_of("2026-03-04T07:30"), END)
    with opened(whole) as services:
        events = [e for day in DAYS for e in events_of(services, pipeline_of(whole), day, 1_000)]
        answers = _answers(whole)
        assert answers == _answers(parted)
        assert {e.caller_id: e.at for e in events} == {c: at for c, (at, _) in answers.items()}
        labels = services.catalog.labels_between(services.principal, ENDPOINT, START, END)
        known = {e.caller_id for e in events if e.outcome is not None}
        assert len(labels) == len(known) > 50
    assert once.answers == {200: len(events)}
    assert first.requests + second.requests == len(events)
    assert first.requests > 0 < second.requests
    for fed in (whole, parted):
        with opened(fed) as services:
            assert services.catalog.label_inbox(services.principal, ENDPOINT) == []
    assert closed == [WEEK]
    assert replayed_time(load_settings({"HEADWAY_HOME": str(whole.home)}).clock_file) == END


def test_the_week_of_a_replay_is_reported_and_an_outage_shows_in_it(bench: Workbench, tmp_path: Path) -> None:
    bench = copied(bench, tmp_path / "outage")
    _start(bench)
    outage = Disturbance("no data", START, END, held=frozenset({"data"}))
    (count,) = _feed(bench, END, disturbances=(outage,))
    assert count.answers[200] == count.requests > 0
    assert sum(count.degraded.values()) > 0
    with temporary_instance(tmp_path) as instance:
        for stage in ("predictions", "labels", "quality_report", "drift_report"):
            result = materialize(bench, instance, stage, WEEK)
            assert result.success, stage
    with opened(bench) as services:
        reports = {r.kind: r for r in services.catalog.reports(services.principal, ENDPOINT)}
    assert {"quality", "drift"} <= set(reports)
    assert reports["drift"].verdict == "data_incident"
