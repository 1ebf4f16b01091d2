"""`make demo-lm`: the standard library's text to a judged language model, by Dagster, with progress and a summary.

The job runs in a child process; this one watches the catalog, so what it prints is what is committed. Both end with
the terminal that started them, and a run that was killed is closed and continued by the next call.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from assets.demo import RUN_TAG, Watch, close_dead_runs, failed, only_one, run_child
from assets.keys import dataset_key, model_version_key, snapshot_key, training_key
from headway.home import Settings, load_settings, write_dagster_instance
from headway.loading import Pipeline, load_pipeline
from headway.processes import die_with_parent
from headway.services import Services, open_services
from headway.training.window import WHOLE, declared_training
from trainer.blobs import Json

if TYPE_CHECKING:
    import dagster as dg

    from headway.catalog.registry_facts import ModelVersion
    from headway.catalog.run_facts import RunEvent

PIPELINE = "stdlib_lm"
JOB = "language_model"
_STEP_EVERY_S = 20.0


def main() -> int:
    """Run or watch the demo; the exit status is 0 when a version was judged, whatever its gates say."""
    parser = argparse.ArgumentParser(prog="make demo-lm", description=__doc__)
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent or os.getppid())
    settings = load_settings()
    write_dagster_instance(settings)
    os.environ["DAGSTER_HOME"] = str(settings.dagster_home)
    os.environ["HEADWAY_HOME"] = str(settings.home)
    if arguments.parent:
        return _execute()
    with only_one(settings.home / "demo.lock"):
        return _watch(settings, load_pipeline(PIPELINE))


def language_job() -> dg.JobDefinition:
    """Every stage of the language model as one job."""
    import dagster as dg

    from assets.definitions import defs

    keys = [dataset_key(PIPELINE, "modules"), snapshot_key(PIPELINE), training_key(PIPELINE)]
    selection = dg.AssetSelection.assets(*keys, model_version_key(PIPELINE))
    job = dg.define_asset_job(JOB, selection=selection)
    return dg.Definitions.merge(defs(), dg.Definitions(jobs=[job])).resolve_job_def(JOB)


def _execute() -> int:
    """The child: execute the job."""
    import dagster as dg

    with dg.DagsterInstance.get() as instance:
        close_dead_runs(instance, PIPELINE)
        job = dg.reconstructable(language_job)
        return 0 if dg.execute_job(job, instance=instance, tags={RUN_TAG: PIPELINE}).success else 1


def _watch(settings: Settings, pipeline: Pipeline) -> int:
    log = settings.home / "demo-lm.log"
    watch = Watch()
    declared = declared_training(pipeline.spec)
    print(
        f"{PIPELINE}: dataset, tokens, {declared.steps} steps on {declared.nodes} nodes, judgement; log: {log}",
        flush=True,
    )
    with open_services(settings) as services, log.open("wb") as output:
        before = _judged(services)
        progress = _Progress(services, watch)
        status = run_child(settings, watch, output, "assets.demo_lm", [], progress.show, 1.0)
        judged = _judged(services)
        # A refusal by a gate fails the Dagster run, and not the demo.
        if not judged or (status != 0 and judged == before):
            return failed(watch, log)
        served = _settle(services, judged[-1])
        memory = f"; peak memory {watch.peak_bytes / 2**30:.1f} GiB" if watch.peak_bytes else ""
        ended = "done" if judged != before else "everything is up to date"
        print(f"\n{ended} after {watch.seconds:.0f} s{memory}")
        if not served:
            print("no version is promoted: its gates, above, say why")
        print("look at it:            make ui      (then open http://127.0.0.1:3000)")
        return 0


@dataclass
class _Progress:
    """What was told so far: stages, and the last event of each run."""

    services: Services
    watch: Watch
    stages: set[str] = field(default_factory=set[str])
    seen: dict[str, int] = field(default_factory=dict[str, int])
    told_step_at: float = 0.0
    bits_per_nat: float = math.nan

    def show(self) -> None:
        """Print what was committed since the last call."""
        self._show_stages()
        catalog, principal = self.services.catalog, self.services.principal
        kinds = ("step", "epoch", "error", "artifact", "node_end")
        for run in catalog.runs(principal, PIPELINE):
            if run.status != "open" and run.run_id not in self.seen:
                continue
            after = self.seen.setdefault(run.run_id, 0)
            for event in catalog.run_events(principal, run.run_id, after=after, kinds=kinds):
                self._show_event(event)
                self.seen[run.run_id] = event.seq

    def _show_stages(self) -> None:
        from headway.datasets.rows import dataset_name

        catalog, principal = self.services.catalog, self.services.principal
        version = catalog.current(principal, dataset_name(PIPELINE, "modules"), WHOLE)
        if version is not None and version.status == "released":
            self._stage("dataset", f"version {version.version}, {version.rows} documents")
        state = catalog.current_snapshots(principal, PIPELINE, [WHOLE]).get(WHOLE)
        if state is not None and state.snapshot is not None and "tokens" not in self.stages:
            from headway.registry.text_candidates import VALID, read_documents_table

            table = read_documents_table(self.services, state.snapshot).to_pylist()
            sizes = {
                split: (len(found), sum(r["bytes"] for r in found), sum(r["tokens"] for r in found))
                for split in ("train", VALID, "held_out")
                if (found := [r for r in table if r["split"] == split])
            }
            told = "; ".join(f"{s} {n} documents, {b:,} bytes, {t:,} tokens" for s, (n, b, t) in sizes.items())
            _, size, tokens = sizes[VALID]
            self.bits_per_nat = tokens / (math.log(2) * size)
            self._stage("tokens", f"{told}; proved")

    def _stage(self, name: str, told: str) -> None:
        if name not in self.stages:
            self.stages.add(name)
            self._line(f"{name}: {told}")

    def _show_event(self, event: RunEvent) -> None:
        from headway.training.describe import event_line

        data = event.data
        if event.kind == "step":
            if self.watch.seconds - self.told_step_at >= _STEP_EVERY_S:
                self.told_step_at = self.watch.seconds
                self._line(
                    f"step {data.get('step')}: loss {_rounded(data, 'loss', 1.0):.3f} nats per token, "
                    f"{_rounded(data, 'tokens_per_s', 1.0):,.0f} tokens/s"
                )
        elif event.kind == "epoch":
            bits = _rounded(data, "valid_loss", self.bits_per_nat)
            self._line(f"validation after step {data.get('step')}: {bits:.4f} bits per byte")
        else:
            self._line(event_line(event))

    def _line(self, text: str) -> None:
        print(f"[{self.watch.seconds:5.0f} s] {text}", flush=True)


def _rounded(data: Mapping[str, Json], name: str, factor: float) -> float:
    value = data.get(name)
    return value * factor if isinstance(value, int | float) else math.nan


def _judged(services: Services) -> list[ModelVersion]:
    """The versions of the pipeline that were judged, in order."""
    catalog, principal = services.catalog, services.principal
    versions = catalog.model_versions(principal, PIPELINE)
    return [v for v in versions if catalog.gate_results(principal, v.model_id, v.version)]


def _settle(services: Services, version: ModelVersion) -> bool:
    """Show the card and what the model writes; promote it if its evidence allows. Returns whether it is promoted."""
    from assets.demo_model import run_headway
    from headway.registry.judge import evaluation_report
    from headway.registry.text_card import records

    name = f"{version.model_id}@{version.version}"
    run_headway("models", "show", name)
    endpoint = services.catalog.endpoint(services.principal, PIPELINE)
    promoted = endpoint is not None and endpoint.stable == version.version
    promoted = promoted or run_headway("promote", name) == 0
    for sample in records(evaluation_report(services, version) or {}, "samples"):
        print(f"\n--- {name} goes on from this prompt:\n{sample['prompt']}\n--- with:\n{sample['text']}")
    return promoted


if __name__ == "__main__":
    sys.exit(main())
