"""On a cluster the steps of a run are pods and a backfill is many runs; on one machine neither, and nothing is paid."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import kubernetes.config
import pytest
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.executor.init import InitExecutorContext
from dagster._core.executor.step_delegating import StepDelegatingExecutor

from assets.dataset_version import build_dataset_version
from assets.executor import PARTITIONS_PER_POD, backfill_policy_for, executor_for
from assets.feature_snapshot import build_feature_snapshot
from headway.home import load_settings
from headway.loading import load_pipeline

ROOT = Path(__file__).resolve().parents[3]
CLUSTER = load_settings({"HEADWAY_PROFILE": "cluster"})
LOCAL = load_settings({})


def test_on_one_machine_dagsters_own_executor_runs_the_steps() -> None:
    assert executor_for(LOCAL) is None
    assert backfill_policy_for(LOCAL) == dg.BackfillPolicy.single_run()


def test_on_a_cluster_a_step_is_a_job_owned_by_the_pod_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes.config, "load_incluster_config", lambda: None)
    definition = executor_for(CLUSTER)
    assert definition is not None
    assert definition.executor_creation_fn is not None
    processed: Any = definition.apply_config_mapping({"config": {}}).value

    @dg.job(executor_def=definition)
    def nothing() -> None: ...

    with dg.DagsterInstance.ephemeral() as instance:
        context = InitExecutorContext(InMemoryJob(nothing), definition, processed["config"], instance)
        executor = definition.executor_creation_fn(context)
    assert isinstance(executor, StepDelegatingExecutor)
    handler: Any = executor._step_handler
    assert handler._enable_owner_references is True


@pytest.mark.parametrize(("profile", "most"), [("local", None), ("cluster", PARTITIONS_PER_POD)])
def test_a_backfill_of_datasets_and_snapshots_fans_out(
    profile: str, most: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADWAY_PROFILE", profile)
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    pipeline = load_pipeline("flight_delay")
    partitioned = [name for name, source in pipeline.spec.sources.items() if source.partition]
    built = [build_dataset_version(pipeline, name) for name in partitioned] + [build_feature_snapshot(pipeline)]
    assert len(built) >= 3
    # The same for all: Dagster takes the smallest policy of what a backfill covers.
    assert {a.backfill_policy.max_partitions_per_run for a in built if a.backfill_policy} == {most}


def test_one_machine_never_imports_the_clients_of_a_cluster() -> None:
    code = (
        "import sys; from assets.executor import executor_for; from headway.home import load_settings\n"
        "assert executor_for(load_settings({})) is None\n"
        "sys.exit(', '.join(m for m in ('kubernetes', 'dagster_k8s') if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
