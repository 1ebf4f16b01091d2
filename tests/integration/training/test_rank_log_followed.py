"""One rank's output, followed while it is printed, over a gang restart, to the end of the run."""

import json
from pathlib import Path

import pytest
import yaml
from support.training_bench import AS_OF, TrainingBench
from support.training_waits import is_stepping, wait_for

from headway.loading import load_pipeline
from headway.training.launch import LauncherUnavailable
from headway.training.plan import Overrides, plan_run
from headway.training.rank_logs import NoRankLog, follow_rank_log
from headway.training.reconcile import Action, Reconciler
from headway.training.submit import submit


def test_a_rank_is_followed_over_a_restart_to_the_end(
    bench: TrainingBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = tmp_path / "toy-code" / "trainer" / "worker.py"
    hello = "    print(f\"hello from {os.environ['HEADWAY_ATTEMPT'][-2:]} of rank {rank}, ä\", flush=True)\n    sink ="
    worker.write_text(worker.read_text().replace("    sink =", hello, 1))
    with bench.services() as services:
        launcher = bench.launcher()
        plan = plan_run(services, load_pipeline(bench.folder), AS_OF, Overrides())
        run_id = plan.facts.run_id(services.principal.tenant)
        bench.control(run_id, "hold", "")
        submit(services, launcher, plan, asker="person")
        run = services.catalog.run(services.principal, run_id)
        pieces = follow_rank_log(services, launcher, run, 1, follow=True)
        assert next(pieces) == "hello from /1 of rank 1, ä\n"
        wait_for(lambda: Reconciler(services, launcher).run(run_id) is not None and is_stepping(bench, run_id))
        bench.control(run_id, "exit", "76")
        away, whole = iter([True, True]), Reconciler.run

        def run_unless_away(self: Reconciler, run_id: str) -> list[Action]:
            if next(away, False):
                raise LauncherUnavailable("it does not answer")
            return whole(self, run_id)

        monkeypatch.setattr(Reconciler, "run", run_unless_away)
        assert next(pieces) == "--- attempt 2 ---\n"
        assert next(pieces) == "hello from /2 of rank 1, ä\n"
        bench.control(run_id, "hold", None)
        assert list(pieces) == []
        run = services.catalog.run(services.principal, run_id)
        assert (run.status, len(run.attempts)) == ("succeeded", 2)
        assert list(follow_rank_log(services, launcher, run, 0)) == ["hello from /2 of rank 0, ä\n"]
        assert bench.run("runs", "logs", run_id, "--rank", "0").stdout == "hello from /2 of rank 0, ä\n"
        assert list(follow_rank_log(services, launcher, run, 1, attempt=1)) == ["hello from /1 of rank 1, ä\n"]
        for rank, attempt, words in ((2, None, "its ranks are 0 to 1"), (-1, 1, "no rank -1"), (0, 3, "no attempt 3")):
            with pytest.raises(NoRankLog, match=words):
                list(follow_rank_log(services, launcher, run, rank, attempt))
        folder = launcher.run_dir(run_id) / "attempts" / "2"
        (folder / "node-1" / "stdout-rank-1.log").unlink()
        with pytest.raises(NoRankLog, match="left no output"):
            list(follow_rank_log(services, launcher, run, 1))
        (folder / "logs").mkdir()
        (folder / "logs" / "node-1.5f0c.log").write_text("ModuleNotFoundError: No module named 'trainer'\n")
        shown = bench.run("kube", "render", run_id[:8])
        assert shown.exit_code == 0, shown.output
        job, service = yaml.safe_load_all(shown.stdout)
        assert job["metadata"]["annotations"]["headway.dev/run-id"] == run_id
        assert job["metadata"]["labels"]["headway.dev/attempt"] == "2"
        assert f"{launcher.run_dir(run_id)}/attempts/2/attempt.json" in shown.stdout
        sent = launcher.run_dir(run_id) / "attempts" / "2" / "attempt.json"
        assert (
            json.loads(sent.read_bytes())["environment"].items()
            <= {
                entry["name"]: entry.get("value") for entry in job["spec"]["template"]["spec"]["containers"][0]["env"]
            }.items()
        )
        assert service["metadata"]["name"] == job["metadata"]["name"]
        assert "ModuleNotFoundError" in "".join(follow_rank_log(services, launcher, run, 1))
