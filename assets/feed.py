"""`headway demo feed`: plays a pipeline's recorded events through a server until a date, and closes each week."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import dagster as dg

from assets.loop import Loop, feed_line
from headway.catalog.clock import utc_text
from headway.cli.ui import free_port
from headway.errors import HeadwayError
from headway.features.online import online_store_for
from headway.home import Settings, load_settings, write_dagster_instance
from headway.loading import Pipeline, load_pipeline
from headway.registry.keys import KeyRing
from headway.replay.client import ServingClient, running_server
from headway.replay.feed import Disturbance, Feed, FeedCount
from headway.replay.moments import moment_of
from headway.services import Services, open_services
from headway.world import replayed_time

SERVER = "feed"


def main() -> int:
    """Play until the date; the exit status is 0 when every event was sent and every week closed."""
    arguments = _arguments()
    settings = load_settings()
    try:
        until = moment_of(arguments.until)
        pipeline = load_pipeline(arguments.pipeline)
        if replayed_time(settings.clock_file) is None:
            print("error: this home goes by the machine's clock; `make demo` or `headway demo clock --to` sets one")
            return 2
        with (
            opened_loop(settings, pipeline, retrains=not arguments.no_retrain) as (services, loop),
            serving(settings, pipeline, arguments.url) as client,
        ):
            feed = make_feed(settings, services, pipeline, client, loop, arguments.per_day)
            print_count(feed.run(until))
    except HeadwayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def make_feed(
    settings: Settings,
    services: Services,
    pipeline: Pipeline,
    client: ServingClient,
    loop: Loop,
    per_day: int,
    disturbances: Sequence[Disturbance] = (),
) -> Feed:
    """A feed that ships what was answered at each day's end, closes each week, and tells how it goes."""
    from headway.serving.ship import ship

    def ship_now() -> None:
        ship(services, {pipeline.name: pipeline}.get, settings.serving_folder)

    def on_day(moment: int) -> None:
        ship_now()
        tell(feed_line(feed.count.requests, sum(feed.count.labels.values()), utc_text(moment)))

    ship_now()
    feed = Feed(
        settings=settings,
        services=services,
        pipeline=pipeline,
        online=online_store_for(settings),
        client=client,
        per_day=per_day,
        disturbances=disturbances,
        on_day=on_day,
        on_week=loop.close_week,
    )
    return feed


@contextmanager
def opened_loop(settings: Settings, pipeline: Pipeline, *, retrains: bool = True) -> Iterator[tuple[Services, Loop]]:
    """Services and the Dagster instance of a home, for the length of a `with` block."""
    os.environ["HEADWAY_HOME"] = str(settings.home)
    os.environ["DAGSTER_HOME"] = str(write_dagster_instance(settings))
    with open_services(settings) as services, dg.DagsterInstance.get() as instance:
        yield services, Loop(services, KeyRing(settings.keys_folder), pipeline, instance, tell, retrains=retrains)


@contextmanager
def serving(settings: Settings, pipeline: Pipeline, url: str | None = None) -> Iterator[ServingClient]:
    """A client of the server at `url`, or of one that is started for the block."""
    if url is not None:
        yield ServingClient(url)
        return
    log = settings.serving_folder / f"{SERVER}.log"
    with running_server(settings, pipeline.name, free_port(0), log, "--no-sync", "--name", SERVER) as started:
        client = ServingClient(started)
        yield client
        client.close()


def print_count(count: FeedCount) -> None:
    """What the feed did, in three lines."""
    tell(f"{count.requests} requests: " + _counted(count.answers.items()))
    tell("degraded: " + (_counted(count.degraded.most_common()) or "none"))
    tell("labels: " + (_counted(count.labels.most_common()) or "none"))


def tell(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def _counted(items: Iterable[tuple[object, int]]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in items)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headway demo feed", description=__doc__)
    parser.add_argument("--until", required=True)
    parser.add_argument("--pipeline", default="flight_delay")
    parser.add_argument("--per-day", type=int, default=120)
    parser.add_argument("--url")
    parser.add_argument("--no-retrain", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
