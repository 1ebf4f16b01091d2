"""`make replay-year`: the months after a training cut, replayed through the whole loop, and a report of what it gave.

It works in a copy of the demo's home, from a catalog in which nothing was trained yet. One model is trained, judged and
promoted; then real flights are asked for over HTTP at their time, outcomes reported, weeks closed and the retraining
decision followed, while the weather fails once and once comes in another unit. At the end the same rows are scored by
what other habits would have served: never retraining, and retraining every month.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from assets.feed import make_feed, opened_loop, print_count, serving, tell
from assets.loop import Loop
from headway.catalog.clock import utc_text
from headway.catalog.registry_facts import ModelVersion
from headway.datasets.ingest import ingest
from headway.datasets.reading import delivery_files
from headway.datasets.zones import DAY_US
from headway.errors import HeadwayError
from headway.home import Settings, load_settings
from headway.loading import Pipeline, load_pipeline
from headway.registry.candidates import newest_run
from headway.registry.keys import KeyRing
from headway.registry.promote import promote
from headway.replay.compare import Strategy, Turn, answered_rows, auc_gap, compare
from headway.replay.feed import Disturbance, FeedCount
from headway.replay.home import copy_home
from headway.replay.moments import moment_of
from headway.replay.report import Replay, write_report
from headway.services import Services
from headway.world import move_clock

PIPELINE = "flight_delay"
FIRST_AS_OF = "2013-08-01"
# The evaluation month of the first model is over, and its labels are due, three days into the month after.
START = "2013-09-04"
END = "2014-01-01"
# As of the first of a month, judged on that month, served when the month is over and its labels are due.
MONTHLY = {"2013-09-01": "2013-10-04", "2013-10-01": "2013-11-04", "2013-11-01": "2013-12-04"}
OUTAGE = ("2013-10-08T06:00", "2013-10-10T18:00")
CELSIUS = ("2013-11-04", "2013-11-11")


def main() -> int:
    """Replay and report; the exit status is 0 when the report was written."""
    arguments = _arguments()
    source = load_settings()
    pipeline = load_pipeline(PIPELINE)
    try:
        home = source.home / "replay"
        tell(f"copying {source.home} to {home}, as it was before anything was trained")
        settings = copy_home(source, home, untrained=True)
        report = _replay(settings, pipeline, arguments)
    except HeadwayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tell(f"\nthe report: {report}")
    tell(f"look at its home:   HEADWAY_HOME={home} .venv/bin/headway ui")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make replay-year", description=__doc__)
    parser.add_argument("--per-day", type=int, default=120, help="sampled flights a day (default: 120)")
    parser.add_argument("--until", default=END, help=f"where the replay ends (default: {END})")
    parser.add_argument("--no-monthly", action="store_true", help="leave out the habit of retraining every month")
    return parser.parse_args()


def _replay(settings: Settings, pipeline: Pipeline, arguments: argparse.Namespace) -> Path:
    started = time.monotonic()
    start, end = moment_of(START), moment_of(arguments.until)
    move_clock(settings.clock_file, start)
    with opened_loop(settings, pipeline) as (services, loop):
        first = _first_model(settings, services, pipeline, loop)
        disturbances = _disturbances(services, pipeline, settings.home / "disturbed")
        with serving(settings, pipeline) as client:
            feed = make_feed(settings, services, pipeline, client, loop, arguments.per_day, disturbances)
            count = feed.run(end)
        print_count(count)
        seconds = time.monotonic() - started
        monthly = None if arguments.no_monthly else _monthly(services, pipeline, loop, first, start, end)
        replay = _compared(
            services, pipeline, count, disturbances, first, monthly, start, end, arguments.per_day, seconds
        )
        return write_report(settings.home / "report", services, replay)


def _first_model(settings: Settings, services: Services, pipeline: Pipeline, loop: Loop) -> ModelVersion:
    tell(f"training the first model, as of {FIRST_AS_OF}")
    if not loop.train(FIRST_AS_OF):
        tell("its Dagster run did not succeed; the registry decides whether it may serve")
    version = _version_of(services, pipeline, FIRST_AS_OF)
    promote(services, KeyRing(settings.keys_folder), pipeline.name, version.model_id, version.version)
    tell(f"{version.model_id}@{version.version} serves from {START}")
    return version


def _version_of(services: Services, pipeline: Pipeline, as_of: str) -> ModelVersion:
    """The network that the newest run of an `as_of` made."""
    run = newest_run(services, pipeline.name, as_of)
    versions = services.catalog.model_versions(services.principal, pipeline.name)
    return next(v for v in versions if v.run_id == run.run_id and v.kind == "network")


def _disturbances(services: Services, pipeline: Pipeline, folder: Path) -> Sequence[Disturbance]:
    first, last = CELSIUS
    days = _days(first, last)

    def change() -> None:
        tell(f"weather comes in degrees Celsius from {first} to {last}")
        _require_released(ingest(services, pipeline, "weather", days, files=[_celsius(pipeline, folder, days)]))

    def mend() -> None:
        tell("the weather of that week is delivered again, in degrees Fahrenheit")
        _require_released(ingest(services, pipeline, "weather", days))

    return (
        Disturbance("no weather observations arrive", *map(moment_of, OUTAGE), held=frozenset({"weather"})),
        Disturbance("temperatures in degrees Celsius", moment_of(first), moment_of(last), begin=change, finish=mend),
    )


def _days(first: str, last: str) -> list[str]:
    return [utc_text(moment)[:10] for moment in range(moment_of(first), moment_of(last), DAY_US)]


def _celsius(pipeline: Pipeline, folder: Path, days: Sequence[str]) -> Path:
    """The weather file of some days (UTC) as another vendor would send it: temperature and dew point in Celsius."""
    raw = delivery_files(pipeline, "weather")[0].content().decode()
    reader = csv.DictReader(io.StringIO(raw))
    assert reader.fieldnames is not None
    folder.mkdir(exist_ok=True)
    file = folder / "weather-celsius.csv"
    with file.open("w", newline="", encoding="utf-8") as output:
        writer = csv.DictWriter(output, reader.fieldnames)
        writer.writeheader()
        for row in reader:
            if row["time_hour"][:10] in days:
                writer.writerow(row | {c: _to_celsius(row[c]) for c in ("temp", "dewp")})
    return file


def _to_celsius(cell: str) -> str:
    return cell if cell == "NA" else f"{(float(cell) - 32) * 5 / 9:.2f}"


def _require_released(outcomes: Sequence[object]) -> None:
    wrong = [o for o in outcomes if getattr(o, "standing", "") != "released"]
    if wrong:
        tell(f"{len(wrong)} partitions were not released: the suite kept them out")


def _monthly(services: Services, pipeline: Pipeline, loop: Loop, first: ModelVersion, start: int, end: int) -> Strategy:
    """What retraining every month would have served: each month's model if its gates passed, whatever it costs."""
    turns = [Turn(start, first)]
    seconds, trainings = 0.0, 0
    for as_of, live in MONTHLY.items():
        if moment_of(live) >= end:
            continue
        tell(f"for comparison: as of {as_of}")
        loop.train(as_of)
        version = _version_of(services, pipeline, as_of)
        trainings += 1
        seconds += services.catalog.run(services.principal, version.run_id).worker_seconds
        turns.append(Turn(moment_of(live), version))
    return Strategy("retrain every month", tuple(turns), trainings, seconds)


def _compared(
    services: Services,
    pipeline: Pipeline,
    count: FeedCount,
    disturbances: Sequence[Disturbance],
    first: ModelVersion,
    monthly: Strategy | None,
    start: int,
    end: int,
    per_day: int,
    seconds: float,
) -> Replay:
    tell("scoring the same rows under every habit")
    rows = answered_rows(services, pipeline.name, start, end)
    never = Strategy("never retrain", (Turn(start, first),))
    strategies = [_as_served(services, pipeline, first, start), never, *([] if monthly is None else [monthly])]
    compared = compare(services, rows, strategies)
    gaps = {c.strategy.name: auc_gap(rows, compared[0], c) for c in compared[1:]}
    return Replay(pipeline.name, start, end, per_day, seconds, count, disturbances, rows, compared, gaps)


def _as_served(services: Services, pipeline: Pipeline, first: ModelVersion, start: int) -> Strategy:
    """What this replay served: the first model, and every promoted candidate from when its request was closed."""
    catalog, principal = services.catalog, services.principal
    began: dict[int, int] = {}
    for p in catalog.predictions(principal, pipeline.name, start, moment_of(END) + 1, limit=1_000_000):
        if p.asked_at is not None:
            began[p.model_version] = min(p.asked_at, began.get(p.model_version, p.asked_at))
    turns, seconds, trainings = [Turn(start, first)], 0.0, 0
    for request in catalog.retrain_requests(principal, pipeline.name):
        trainings += request.run_id is not None
        seconds += request.cost_seconds or 0.0
        if request.state == "promoted" and request.candidate_version in began:
            version = catalog.model_version(principal, pipeline.name, request.candidate_version)
            turns.append(Turn(began[version.version], version))
    return Strategy("Headway", tuple(turns), trainings, seconds)


if __name__ == "__main__":
    sys.exit(main())
