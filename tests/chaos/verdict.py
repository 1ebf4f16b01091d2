"""What must be true after everything healed and one reconcile."""

import time
from collections import Counter

from chaos.processes import of_home
from chaos.workload import Workload
from chaos.world import AS_OF, DAYS, until

from headway.catalog.budgets import period_of
from headway.loading import load_pipeline
from headway.serving.ship import ship

_LOOK_S = 3.0


def settle(workload: Workload) -> None:
    """Bring every acknowledged command to its end, asking again for what was lost with a killed process."""
    world = workload.world
    world.keep()
    until(lambda: _settled(workload), 900.0)
    until(lambda: not workload.in_flight() and not world.workers())


def _settled(workload: Workload) -> bool:
    """Whether every effect is there; what nobody works on any more is asked for again."""
    world = workload.world
    world.keep()
    # What the daemon's sensor does every half minute.
    world.bench.run("reconcile")
    seeds, days = _lost(workload)
    if not seeds and not days:
        return True
    if not workload.in_flight() and not world.workers():
        for seed in seeds:
            workload.train(seed)
        for day in days:
            workload.materialize(day)
    # Looking costs more than waiting.
    time.sleep(_LOOK_S)
    return False


def _lost(workload: Workload) -> tuple[list[int], list[str]]:
    """Trainings that have not succeeded, and days that are not what was delivered."""
    with workload.world.bench.services() as services:
        catalog, who = services.catalog, services.principal
        done = {r.facts.seed for r in catalog.runs(who, "shop", AS_OF, limit=10_000) if r.status == "succeeded"}
        current = catalog.current_many(who, "pipeline/labels")
        states = catalog.current_snapshots(who, "pipeline")
        days = [
            day
            for day in DAYS
            if day not in current
            or current[day].rows != 4 + workload.delivered[day]
            or current[day].status != "released"
            or day not in states
            or not _is_of(states[day].snapshot, current[day].content_digest)
        ]
    return sorted(workload.trained - done), days


def _is_of(snapshot: object, digest: str) -> bool:
    return snapshot is not None and any(i.content_digest == digest for i in snapshot.inputs)  # pyright: ignore[reportAttributeAccessIssue]


def problems(workload: Workload) -> list[str]:
    """Everything that is wrong; empty when nothing is."""
    return [
        *_after_reconcile(workload),
        *_one_effect_each(workload),
        *_exact_budget(workload),
        *_answers_in_the_log(workload),
        *_sound(workload),
        *_orphans(workload),
    ]


def _after_reconcile(workload: Workload) -> list[str]:
    bench = workload.world.bench
    bench.run("reconcile")
    left = bench.json("reconcile")["actions"]
    return [f"a second reconcile still acts: {left}"] if left else []


def _one_effect_each(workload: Workload) -> list[str]:
    found: list[str] = []
    with workload.world.bench.services() as services:
        catalog, who = services.catalog, services.principal
        runs = [r for r in catalog.runs(who, "shop", AS_OF, limit=10_000) if r.facts.seed in workload.trained]
        times = Counter(r.facts.seed for r in runs)
        found += [f"training {seed}: {times[seed]} runs" for seed in workload.trained if times[seed] != 1]
        for run in runs:
            ends = [a.state for a in run.attempts]
            if ends.count("succeeded") != 1 or run.status != "succeeded":
                found.append(f"run {run.run_id} of training {run.facts.seed}: attempts ended {ends}")
        endpoint = catalog.endpoint(who, "shop")
        assert endpoint is not None
        if (endpoint.stable, endpoint.epoch) != (workload.stable, workload.epoch):
            shown = f"{endpoint.stable} at epoch {endpoint.epoch}"
            found.append(f"endpoint serves {shown}, acknowledged was {workload.stable} at epoch {workload.epoch}")
        moves = [e.epoch for e in catalog.endpoint_events(who, "shop")]
        if sorted(moves) != list(range(1, workload.epoch + 1)):
            found.append(f"moves of the endpoint: {moves}")
        for day in DAYS:
            contents = [v.content_digest for v in catalog.versions(who, "pipeline/labels", day)]
            if len(set(contents)) != len(contents) or len(contents) > 1 + workload.delivered[day]:
                found.append(f"{day}: {len(contents)} versions of {1 + workload.delivered[day]} deliveries")
    return found


def _exact_budget(workload: Workload) -> list[str]:
    """Reservations are given back, and of every attempt each kind of entry is there once."""
    found: list[str] = []
    with workload.world.bench.services() as services:
        catalog, who = services.catalog, services.principal
        runs = catalog.runs(who, "shop", limit=10_000)
        for period in {period_of(r.created_at) for r in runs}:
            state = catalog.budget(who, "shop", period)
            entries = catalog.budget_entries(who, "shop", period)
            if state is None or state.reserved != 0:
                found.append(f"budget of {period}: {state} after everything ended")
            twice = [k for k, n in Counter((e.owner_id, e.kind) for e in entries).items() if n > 1]
            attempts = sum(len(r.attempts) for r in runs if period_of(r.created_at) == period)
            if twice or len(entries) != 3 * attempts:
                found.append(f"budget of {period}: {len(entries)} entries of {attempts} attempts, twice: {twice}")
    return found


def _answers_in_the_log(workload: Workload) -> list[str]:
    """Every acknowledged answer is recorded once, and every acknowledged label is there once."""
    world = workload.world
    pipeline = load_pipeline(world.bench.folder)
    found: list[str] = []
    with world.bench.services() as services:
        ship(services, lambda name: pipeline if name == pipeline.name else None, world.bench.settings.serving_folder)
        catalog, who = services.catalog, services.principal
        known = catalog.predictions_by_id(who, workload.answers)
        lost = sorted(set(workload.answers) - known.keys())
        found += [f"acknowledged answer {prediction} is not in the log" for prediction in lost]
        if len(set(workload.answers)) != len(workload.answers):
            found.append("two answers were acknowledged under one id")
        for prediction, label in workload.labels.items():
            ids = [known_label.label_id for known_label in catalog.labels(who, prediction)]
            if ids != [label]:
                found.append(f"prediction {prediction}: labels {ids}, acknowledged was {label}")
    return found


def _sound(workload: Workload) -> list[str]:
    result = workload.world.bench.run("fsck")
    return [] if result.exit_code == 0 else [f"fsck: {result.output[-3000:]}"]


def _orphans(workload: Workload) -> list[str]:
    """No attempt has a living process, and no home's process is outside the services that are kept."""
    world = workload.world
    strays = world.bench.launcher().strays()
    words = ("headway.training", "trainer.")
    left = {p: line for p, line in of_home(world.bench.home).items() if any(word in line for word in words)}
    return [f"left over: {strays} {left}"] if strays or left else []
