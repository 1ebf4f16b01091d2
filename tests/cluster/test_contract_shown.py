"""What a person sees of a run on a cluster: why it waits or ended, what every rank printed, what it would look like."""

from __future__ import annotations

import json

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner, Result
from support.cluster_bench import ClusterBench
from support.cluster_sound import assert_sound

from headway.cli.main import main
from tests.cluster.cluster_env import wait_until


def headway(bench: ClusterBench, *arguments: str) -> Result:
    """The `headway` command in this home, on this cluster."""
    kubeconfig = str(bench.kubeconfig or bench.cluster.kubeconfig)
    return CliRunner().invoke(main, list(arguments), env={**bench.environment, "KUBECONFIG": kubeconfig})


def test_what_every_rank_printed_is_kept_over_attempts(bench: ClusterBench) -> None:
    """The pods of attempt 1 are gone with the Job that failed; each rank's last line of it is there all the same."""
    run_id = bench.start(ranks=2, orders={"ranks": {"3": {"at": 5, "attempts": [1], "do": "kill"}}})
    bench.succeeded(run_id)
    assert_sound(bench)
    for rank in range(4):
        first = headway(bench, "runs", "logs", run_id, "--rank", str(rank), "--attempt", "1")
        # The others may be ended before they say that they are at the step at which rank 3 dies.
        assert f"rank {rank} step {5 if rank == 3 else 4}" in first.output
        second = headway(bench, "runs", "logs", run_id, "--rank", str(rank))
        assert second.output.splitlines()[0] == f"rank {rank} step 4"
        assert second.output.splitlines()[-1] == f"rank {rank} step 6"


def test_following_one_rank_ends_with_the_run(bench: ClusterBench) -> None:
    run_id = bench.start(ranks=2, orders={"steps": 12})
    shown = headway(bench, "runs", "logs", "-f", "--rank", "3", run_id)
    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines() == [f"rank 3 step {step}" for step in range(1, 13)]
    assert bench.run(run_id).status == "succeeded"


def test_what_the_nodes_themselves_said_is_kept_too(bench: ClusterBench) -> None:
    """The log of each pod, of both attempts, lies beside the events before its pod is deleted."""
    run_id = bench.start(orders={"ranks": {"1": {"at": 5, "attempts": [1], "do": "kill"}}})
    bench.succeeded(run_id)
    for attempt in (1, 2):
        folder = bench.attempt_file(run_id, attempt).parent / "logs"
        assert {file.name.split(".")[0] for file in folder.glob("*.log")} == {"node-0", "node-1"}


def test_why_it_waits_and_why_it_ended_is_shown(bench: ClusterBench) -> None:
    bench.changes.update(node_selector={"headway.dev/none": "here"})
    run_id = bench.start()
    bench.until(run_id, lambda run: "unschedulable" in str(run.last.waiting), "the reason of waiting")
    shown = headway(bench, "runs", "show", run_id)
    assert "unschedulable" in shown.output
    with bench.services() as services:
        services.catalog.request_cancel(services.principal, None, run_id, "no such node")
    bench.finished(run_id)
    bench.changes.clear()
    failing = bench.ask(seed=2, orders={"ranks": {"1": {"do": "exit", "code": 65}}})
    launcher = bench.launcher()
    wait_until(lambda: bench.reconcile(failing, launcher) is None or bench.run(failing).status != "open", "the end")
    document = json.loads(headway(bench, "runs", "show", failing, "--json").stdout)
    assert "code_failed" in json.dumps(document)
    assert "told to exit with 65" in headway(bench, "runs", "show", failing).output


def test_the_command_line_cancels_and_waits_until_nothing_is_left(bench: ClusterBench) -> None:
    run_id = bench.start(orders={"hold": True})
    bench.stepping(run_id)
    cancelled = headway(bench, "runs", "cancel", run_id)
    assert cancelled.exit_code == 0, cancelled.output
    assert bench.run(run_id).status == "cancelled"
    assert_sound(bench)


@pytest.mark.parametrize("backend", ["job", "jobset", "trainjob"])
def test_every_backend_renders_what_the_schemas_take(bench: ClusterBench, backend: str) -> None:
    """Of a run that stands in the catalog; what is core Kubernetes is held against its published schema as well."""
    run_id = bench.ask()
    rendered = headway(bench, "kube", "render", run_id, "--backend", backend)
    assert rendered.exit_code == 0, rendered.output
    documents = list(yaml.safe_load_all(rendered.stdout))
    kinds = [document["kind"] for document in documents]
    wanted = {"job": ["Job", "Service"], "jobset": ["JobSet"], "trainjob": ["ClusterTrainingRuntime", "TrainJob"]}
    assert set(kinds) <= {*wanted[backend], "TrainingRuntime"}
    assert wanted[backend][-1] in kinds
    for document in documents:
        if document["apiVersion"] in ("v1", "batch/v1"):
            kubernetes_validate.validate(document, "1.36", strict=True)
    assert bench.empty()
