"""`make demo`: a year of flights to proven snapshots and a judged model, by Dagster, with progress and a summary.

The job runs in a child process; this one watches the catalog, so what it prints is what is committed. Both end with
the terminal that started them, and a run that was killed is closed and continued by the next call.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from assets.demo_model import AS_OF, model_job, set_clock, settle, show_new_events
from assets.keys import dataset_key, snapshot_key
from headway.home import Settings, load_settings, write_dagster_instance
from headway.loading import Pipeline, load_pipeline
from headway.processes import die_with_parent
from headway.replay.home import keep_untrained
from headway.services import Services, open_services
from headway.training.launchers import launcher_for

if TYPE_CHECKING:
    import dagster as dg

PIPELINE = "flight_delay"
RUN_TAG = "headway/demo"
_LINE_EVERY_S = 5.0


def main() -> int:
    """Run or watch the demo; the exit status is 0 when every partition ended as it should."""
    arguments = _arguments()
    die_with_parent(arguments.parent or os.getppid())
    settings = load_settings()
    write_dagster_instance(settings)
    os.environ["DAGSTER_HOME"] = str(settings.dagster_home)
    os.environ["HEADWAY_HOME"] = str(settings.home)
    pipeline = load_pipeline(PIPELINE)
    partitions = _partitions(pipeline, arguments.first, arguments.last)
    if arguments.parent:
        return _execute_model(pipeline) if arguments.model else _execute(pipeline, partitions)
    with only_one(settings.home / "demo.lock"):
        return _watch(settings, pipeline, partitions, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--first", help="first partition, for instance 2013-01-01 (default: the year's first)")
    parser.add_argument("--last", help="last partition (default: the year's last)")
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--model", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _partitions(pipeline: Pipeline, first: str | None, last: str | None) -> list[str]:
    from headway.datasets.partitions import PartitionScheme

    declared = pipeline.spec.sources[pipeline.spec.label.source].partition
    assert declared is not None
    keys = PartitionScheme.from_spec(declared).keys()
    return [k for k in keys if (first or keys[0]) <= k <= (last or keys[-1])]


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Hold the demo's lock; it is given back by the system even when the holder is killed."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"error: another demo is running on {path.parent}; wait for it or set HEADWAY_HOME elsewhere")
        yield


# --- the child: Dagster executes ----------------------------------------------------------------------------------


def _execute(pipeline: Pipeline, partitions: Sequence[str]) -> int:
    """Execute all assets: whole tables and the partition range in one run."""
    import dagster as dg

    with dg.DagsterInstance.get() as instance:
        close_dead_runs(instance, pipeline.name)
        job = dg.reconstructable(pipeline_job)
        result = dg.execute_job(
            job,
            instance=instance,
            tags={
                RUN_TAG: pipeline.name,
                "dagster/asset_partition_range_start": partitions[0],
                "dagster/asset_partition_range_end": partitions[-1],
            },
        )
        return 0 if result.success else 1


def _execute_model(pipeline: Pipeline) -> int:
    """Execute training run and model version of the demo's `as_of`, and bring the features online."""
    import dagster as dg

    with dg.DagsterInstance.get() as instance:
        close_dead_runs(instance, pipeline.name)
        tags = {RUN_TAG: pipeline.name, "dagster/partition": AS_OF}
        job = dg.reconstructable(demo_model_job)
        return 0 if dg.execute_job(job, instance=instance, tags=tags).success else 1


def demo_model_job() -> dg.JobDefinition:
    """Training and judgement of the demo's pipeline."""
    return model_job(PIPELINE)


def pipeline_job() -> dg.JobDefinition:
    """Dataset versions and snapshots of the code location as one job, two steps at a time."""
    import dagster as dg

    from assets.definitions import defs

    sources = load_pipeline(PIPELINE).spec.sources
    selection = dg.AssetSelection.assets(*(dataset_key(PIPELINE, s) for s in sources), snapshot_key(PIPELINE))
    job = dg.define_asset_job(
        PIPELINE, selection=selection, executor_def=dg.multiprocess_executor.configured({"max_concurrent": 2})
    )
    return dg.Definitions.merge(defs(), dg.Definitions(jobs=[job])).resolve_job_def(PIPELINE)


def close_dead_runs(instance: dg.DagsterInstance, pipeline: str) -> None:
    """Runs of an earlier demo that was killed are still shown as running: the lock says that nobody executes them."""
    import dagster as dg

    unfinished = [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.NOT_STARTED]
    for run in instance.get_runs(dg.RunsFilter(tags={RUN_TAG: pipeline}, statuses=unfinished)):
        instance.report_run_failed(run, "The process that executed this run was killed; the next demo run continued.")


# --- the parent: watch, then sum up -------------------------------------------------------------------------------


@dataclass
class Watch:
    """What is committed so far, and the most memory that the child and its children held together."""

    started: float = field(default_factory=time.monotonic)
    peak_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Elapsed wall time."""
        return time.monotonic() - self.started


def _watch(settings: Settings, pipeline: Pipeline, partitions: Sequence[str], arguments: argparse.Namespace) -> int:
    log = settings.home / "demo.log"
    watch = Watch()
    sliced = [a for name in ("first", "last") if (v := getattr(arguments, name)) for a in (f"--{name}", v)]
    print(f"{pipeline.name}: {len(partitions)} partitions, {partitions[0]} to {partitions[-1]}; log: {log}", flush=True)
    with open_services(settings) as services, log.open("wb") as output:
        changed = not _is_up_to_date(services, pipeline, partitions)
        if changed:
            show = lambda: _print_progress(services, pipeline, partitions, watch)  # noqa: E731
            status = run_child(settings, watch, output, "assets.demo", sliced, show, _LINE_EVERY_S)
            if status != 0:
                return failed(watch, log)
        snapshots = _summary(services, pipeline, partitions)
        if not snapshots:
            return 1
        if sliced:
            _close(watch, snapshots, changed=changed, served=None)
            return 0
        before = _versions(services, pipeline)
        if before == 0:
            keep_untrained(settings)
        set_clock(settings)
        print(f"\ntraining on two nodes, as of {AS_OF}, then judging on the month after", flush=True)
        seen: dict[str, int] = {}
        show = lambda: show_new_events(services, pipeline.name, seen)  # noqa: E731
        status = run_child(settings, watch, output, "assets.demo", ["--model"], show, 1.0)
        if status != 0 and not _is_judged(services, pipeline):
            return failed(watch, log)
        served = settle(settings, services, pipeline)
        _close(watch, snapshots, changed=changed or _versions(services, pipeline) != before, served=served)
        return 0


def _versions(services: Services, pipeline: Pipeline) -> int:
    return len(services.catalog.model_versions(services.principal, pipeline.name))


def run_child(
    settings: Settings,
    watch: Watch,
    output: IO[bytes],
    module: str,
    more: Sequence[str],
    show: Callable[[], None],
    every: float,
) -> int:
    """Run a stage of a demo's module in a child process, showing progress and its memory; return its exit status."""
    command = [sys.executable, "-m", module, "--parent", str(os.getpid()), *more]
    child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    launcher = launcher_for(settings)
    shown = watch.seconds
    while child.poll() is None:
        time.sleep(0.5)
        workers = [pid for _, _, pid in launcher.strays() if isinstance(pid, int)]
        watch.peak_bytes = max(watch.peak_bytes, _resident_bytes([child.pid, *workers]))
        if watch.seconds - shown >= every:
            shown = watch.seconds
            show()
    show()
    return child.returncode


def _is_judged(services: Services, pipeline: Pipeline) -> bool:
    """Whether a version of the demo's `as_of` was judged: a refusal fails the Dagster run, and not the demo."""
    versions = services.catalog.model_versions(services.principal, pipeline.name)
    return any(
        v.facts.as_of == AS_OF and services.catalog.gate_results(services.principal, v.model_id, v.version)
        for v in versions
    )


def failed(watch: Watch, log: Path) -> int:
    """Print the end of the log; return the exit status."""
    print(f"error: the Dagster run failed after {watch.seconds:.0f} s; the last lines of {log}:", file=sys.stderr)
    print("\n".join(log.read_text(errors="replace").splitlines()[-15:]), file=sys.stderr)
    return 1


def _is_up_to_date(services: Services, pipeline: Pipeline, partitions: Sequence[str]) -> bool:
    """Whether the catalog would not change, and Dagster shows every partition of it."""
    from headway.datasets.ingest import is_up_to_date
    from headway.features.inputs import InputMissing
    from headway.features.snapshot import SnapshotBuilder

    for name, source in pipeline.spec.sources.items():
        if not is_up_to_date(services, pipeline, name, partitions if source.partition is not None else None):
            return False
    builder = SnapshotBuilder(services, pipeline)
    try:
        if not all(builder.is_up_to_date(partition) for partition in partitions):
            return False
    except InputMissing:
        return False
    return _is_shown(pipeline, partitions)


def _is_shown(pipeline: Pipeline, partitions: Sequence[str]) -> bool:
    """Whether Dagster has a materialization of every partition: a run killed after its commits has none."""
    import dagster as dg

    with dg.DagsterInstance.get() as instance:
        for name, source in pipeline.spec.sources.items():
            key = dataset_key(pipeline.name, name)
            if source.partition is None and instance.get_latest_materialization_event(key) is None:
                return False
            if source.partition is not None and not set(partitions) <= instance.get_materialized_partitions(key):
                return False
        return set(partitions) <= instance.get_materialized_partitions(snapshot_key(pipeline.name))


def _committed(services: Services, pipeline: Pipeline, partitions: Sequence[str]) -> dict[str, int]:
    """Partitions with a settled version or a snapshot, by stage."""
    from headway.datasets.rows import dataset_name

    found: dict[str, int] = {}
    for name, source in pipeline.spec.sources.items():
        wanted = [""] if source.partition is None else list(partitions)
        versions = services.catalog.current_many(services.principal, dataset_name(pipeline.name, name), wanted)
        found[name] = sum(v.status in ("released", "quarantined") for v in versions.values())
    states = services.catalog.current_snapshots(services.principal, pipeline.name, list(partitions))
    found["snapshots"] = len(states)
    return found


def _print_progress(services: Services, pipeline: Pipeline, partitions: Sequence[str], watch: Watch) -> None:
    done = _committed(services, pipeline, partitions)
    parts = [f"{name} {count}/{_wanted(pipeline, partitions, name)}" for name, count in done.items()]
    rate = sum(done.values()) / max(1.0, watch.seconds)
    print(f"[{watch.seconds:5.0f} s] {'  '.join(parts)}  ({rate:.1f} partitions/s)", flush=True)


def _wanted(pipeline: Pipeline, partitions: Sequence[str], name: str) -> int:
    source = pipeline.spec.sources.get(name)
    return 1 if source is not None and source.partition is None else len(partitions)


def _summary(
    services: Services,
    pipeline: Pipeline,
    partitions: Sequence[str],
) -> list[str]:
    """Print what the catalog holds of the partitions; return the ids of the published snapshots."""
    from headway.datasets.rows import dataset_name

    print()
    for name, source in pipeline.spec.sources.items():
        wanted = [""] if source.partition is None else list(partitions)
        found = services.catalog.current_many(services.principal, dataset_name(pipeline.name, name), wanted)
        states = [v.status for v in found.values()]
        rows = sum(v.rows for v in found.values())
        quarantined = sum(v.evidence.quarantined_rows for v in found.values() if v.evidence)
        empty = sum(v.reason == "no_data_published" for v in found.values())
        print(
            f"{name:<10} {states.count('released'):>4} released, {states.count('quarantined')} quarantined versions; "
            f"{rows:>8,} rows, {quarantined} in quarantine" + (f"; {empty} empty as published" if empty else "")
        )
    snapshots = services.catalog.current_snapshots(services.principal, pipeline.name, list(partitions))
    published = {p: s.snapshot for p, s in snapshots.items() if s.status == "published" and s.snapshot is not None}
    excluded: dict[str, int] = {}
    for snapshot in published.values():
        for reason, count in snapshot.facts.excluded.items():
            excluded[reason] = excluded.get(reason, 0) + count
    print(
        f"{'snapshots':<10} {len(published):>4} published, each with its leakage proof, "
        f"{len(partitions) - len(published)} refused; {sum(s.rows for s in published.values()):>8,} label rows; "
        f"left out: {', '.join(f'{n:,} {r}' for r, n in sorted(excluded.items())) or 'none'}"
    )
    if not published:
        print("no snapshot was published")
    return [snapshot.snapshot_id for snapshot in published.values()]


def _close(watch: Watch, snapshots: Sequence[str], *, changed: bool, served: bool | None) -> None:
    """Print how it ended (`served` None: a slice, which trains nothing) and where to look."""
    memory = f"; peak memory {watch.peak_bytes / 2**30:.1f} GiB" if watch.peak_bytes else ""
    ended = "done" if changed else "everything is up to date"
    print(f"\n{ended} after {watch.seconds:.0f} s{memory}")
    if served is False:
        print("no version serves: its gates, above, say why")
    if served is None:
        print(f"no model for a slice: without --first and --last the demo trains on {AS_OF} as well")
    print("look at it:            make ui      (then open http://127.0.0.1:3000)")
    if served:
        print("ask it over HTTP:      make serve   (prints a request to try)")
    print(f"check one snapshot:    .venv/bin/headway snapshots verify {snapshots[0]}")


def _resident_bytes(roots: Sequence[int]) -> int:
    """Resident memory of processes and all their descendants, from /proc; 0 where there is none."""
    children: dict[int, list[int]] = {}
    pages: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            pages[int(entry.name)] = int((entry / "statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(entry.name))
    counted: set[int] = set()
    pending = list(roots)
    while pending:
        process = pending.pop()
        if process not in counted:
            counted.add(process)
            pending += children.get(process, [])
    return sum(pages.get(process, 0) for process in counted) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
