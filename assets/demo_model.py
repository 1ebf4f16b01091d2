"""The second half of `make demo`: train on two nodes, judge, promote on evidence or say why not, predict, explain."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

from assets.keys import model_version_key, training_key
from headway.home import Settings
from headway.loading import Pipeline
from headway.services import Services
from headway.world import move_clock, replayed_time

if TYPE_CHECKING:
    import dagster as dg

AS_OF = "2013-11-01"
# The month after `as_of` judges the model, so it answers from December on: 60 minutes before a morning's departures.
NOW = "2013-12-02T11:30:00Z"
MODEL_JOB = "train_and_judge"
_REQUESTS = 3


def model_job(pipeline: str) -> dg.JobDefinition:
    """Training run and model version of the code location as one job."""
    import dagster as dg

    from assets.definitions import defs

    selection = dg.AssetSelection.assets(training_key(pipeline), model_version_key(pipeline))
    job = dg.define_asset_job(MODEL_JOB, selection=selection)
    return dg.Definitions.merge(defs(), dg.Definitions(jobs=[job])).resolve_job_def(MODEL_JOB)


def set_clock(settings: Settings) -> None:
    """Let the world's clock stand where the demo's model starts to answer, unless a feed moved it on."""
    moment = round(datetime.fromisoformat(NOW).timestamp() * 1_000_000)
    if replayed_time(settings.clock_file) is None:
        move_clock(settings.clock_file, moment)
        print(f"\nthe world's clock of this home stands at {NOW}; `headway demo feed` moves it", flush=True)


def show_new_events(services: Services, pipeline: str, seen: dict[str, int]) -> None:
    """Print what the runs of the demo's `as_of` reported since the last call; `seen` holds the last event by run."""
    from headway.training.describe import event_line

    told = ("node_start", "epoch", "error", "artifact", "node_end")
    for run in services.catalog.runs(services.principal, pipeline, AS_OF):
        if run.status != "open" and run.run_id not in seen:
            continue
        after = seen.setdefault(run.run_id, 0)
        for event in services.catalog.run_events(services.principal, run.run_id, after=after, kinds=told):
            print(f"  {event_line(event)}", flush=True)
            seen[run.run_id] = event.seq


def settle(settings: Settings, services: Services, pipeline: Pipeline) -> bool:
    """Show the card, promote the newest version of the demo's `as_of` if its evidence allows, predict and explain.

    Each step is a command that a person would type, shown before its output. Returns whether a version serves.
    """
    from headway.registry.candidates import newest_run

    run = newest_run(services, pipeline.name, AS_OF)
    mine = [v for v in services.catalog.model_versions(services.principal, pipeline.name) if v.run_id == run.run_id]
    for version in mine:
        run_headway("models", "show", f"{version.model_id}@{version.version}")
    endpoint = services.catalog.endpoint(services.principal, pipeline.name)
    serves = endpoint is not None and endpoint.stable == mine[-1].version
    if not serves and run_headway("promote", f"{pipeline.name}@{mine[-1].version}") != 0:
        return False
    file = settings.home / "demo-requests.json"
    file.write_text(json.dumps(_requests(services, pipeline), indent=2) + "\n")
    if run_headway("predict", "--file", str(file)) != 0:
        return False
    newest = services.catalog.prediction_ids(services.principal, "")[-1]
    return run_headway("explain", newest, "--feature", "weather_at_origin__temp") == 0


def run_headway(*arguments: str) -> int:
    """Run a command of the command line in this process, below the line that a person would type."""
    from headway.cli.main import main

    print(f"\n$ headway {' '.join(arguments)}", flush=True)
    try:
        main(list(arguments), prog_name="headway")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def _requests(services: Services, pipeline: Pipeline) -> list[dict[str, Any]]:
    """A few flights of the month after `as_of`, as a caller knows them 60 minutes ahead."""
    from headway.datasets.rows import dataset_name, load_rows

    current = services.catalog.current(services.principal, dataset_name(pipeline.name, "flights"), "2013-11-15")
    assert current is not None
    rows = load_rows(services, current).slice(100, _REQUESTS).to_pylist()
    return [
        {
            "carrier": row["carrier"],
            "flight": row["flight"],
            "origin": row["origin"],
            "dest": row["dest"],
            "tailnum": row["tailnum"],
            "sched_dep_time": row["scheduled_departure"].isoformat(),
            "sched_arr_time": row["scheduled_arrival"].isoformat(),
        }
        for row in rows
    ]
