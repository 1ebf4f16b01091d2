"""`headway runs replay` on real runs: the same bits, another environment, and a divergence that is named."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
from support.training_bench import AS_OF, TrainingBench, copy_bench, end_everything, write_shop

import headway.training.identity
import headway.training.replay
from headway.catalog.run_facts import TrainingRun
from headway.loading import load_pipeline
from headway.training.follow import Follower, follow
from headway.training.plan import plan_run
from headway.training.submit import submit
from trainer.spec import parse_run

pytestmark = pytest.mark.xdist_group("spine")

# From the third step on, one weight is no function of the seed.
_LOTTERY = '''

_plain_build = build


def build(*arguments, **named):
    """The plain model, one weight of which is moved by what no seed decides."""
    import os

    import torch

    model = _plain_build(*arguments, **named)
    seen = {"forward": 0}

    def move(module, _inputs):
        seen["forward"] += 1
        if module.training and seen["forward"] == 9:
            with torch.no_grad():
                next(p for n, p in module.named_parameters() if "blocks.0" in n).add_(os.urandom(1)[0] / 8 + 0.1)

    model.register_forward_pre_hook(move)
    return model
'''


def _short(attributes: dict[str, Any]) -> None:
    attributes["training"] |= {"epochs": 3, "checkpoint_every": 4, "batch": 32}


def _trained(bench: TrainingBench) -> TrainingRun:
    with bench.services() as services:
        plan = plan_run(services, load_pipeline(bench.folder), AS_OF)
        run_id = submit(services, bench.launcher(), plan, asker="person").run.run_id
        run = follow(services, bench.launcher(), run_id, Follower(lambda event: None, lambda action: None))
    assert run.status == "succeeded", run.last.reason
    return run


def _rows(bench: TrainingBench, run: TrainingRun) -> tuple[int, list[str]]:
    """What a replay must not add to: events of the run, blobs of the store."""
    with bench.services() as services:
        events = services.catalog.run_events(services.principal, run.run_id, limit=100_000)
        return len(events), sorted(blob.digest for blob in services.store.list())


@pytest.fixture(scope="module")
def trained(shop: TrainingBench, tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ANN401
    """A bench with one finished run; read-only."""
    bench = copy_bench(shop, tmp_path_factory.mktemp("replayed"))
    write_shop(bench.folder, _short)
    yield bench, _trained(bench)
    end_everything(bench)


def test_a_replay_of_an_undisturbed_run_is_bit_exact_and_publishes_nothing(
    trained: tuple[TrainingBench, TrainingRun], tmp_path: Path
) -> None:
    bench, run = trained
    assert bench.json("runs", "show", run.run_id)["metrics"]["claimed_level"] == "bit"
    before = _rows(bench, run)
    result = bench.run("runs", "replay", run.run_id, "--json", "--scratch", str(tmp_path))
    assert result.exit_code == 0, result.output + str(result.exception)
    told = json.loads(result.stdout)
    assert (told["answer"], told["claimed"], told["as_claimed"]) == ("bit_exact", "bit", True)
    # Each epoch was judged, and what is kept of checkpoints, beside the exported weights.
    assert told["steps"] >= 3
    assert told["tensors"] > 10
    assert _rows(bench, run) == before
    assert list(tmp_path.iterdir()) == []
    assert bench.launcher().strays() == []


def test_another_version_or_thread_count_is_named_before_any_compute(
    trained: tuple[TrainingBench, TrainingRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, run = trained

    def never(*arguments: object) -> None:
        raise AssertionError("it computed")

    monkeypatch.setattr(headway.training.replay, "_compute", never)
    with monkeypatch.context() as patch:
        here = headway.training.identity.environment()
        installed = cast("dict[str, str]", here["packages"])
        packages = {**installed, "torch": "0.0.1"}
        patch.setattr(headway.training.replay, "environment", lambda: {**here, "packages": packages})
        result = bench.run("runs", "replay", run.run_id)
        assert result.exit_code == 2
        torch = installed["torch"]
        assert result.stdout.splitlines()[0] == f"environment_mismatch(torch: {torch} then, 0.0.1 now)"
    with monkeypatch.context() as patch:
        patch.setattr(headway.training.replay, "cpu_model", lambda: "another kind")
        assert "cpu: " in bench.run("runs", "replay", run.run_id).stdout
    with bench.services() as services:
        spec = parse_run(services.store.get_bytes(run.facts.spec_digest))
        told = next(e for e in services.catalog.run_events(services.principal, run.run_id, kinds=("environment",)))
    assert told.data["threads"] == spec.threads == 1
    with monkeypatch.context() as patch:
        patch.setattr(headway.training.replay, "parse_run", lambda data: _threaded(spec))
        assert "threads: 1 then, 2 now" in bench.run("runs", "replay", run.run_id).stdout


def _threaded(spec: Any) -> Any:  # noqa: ANN401 - RunSpec
    from dataclasses import replace

    return replace(spec, threads=2)


def test_code_that_was_altered_in_the_store_is_named_before_any_compute(
    trained: tuple[TrainingBench, TrainingRun], tmp_path: Path
) -> None:
    plain, run = trained
    bench = copy_bench(plain, tmp_path)
    with bench.services() as services:
        spec = parse_run(services.store.get_bytes(run.facts.spec_digest))
        manifest = json.loads(services.store.get_bytes(spec.model.code_manifest))
        entry = next(e for e in manifest["entries"] if e["name"] == "trainer/loop.py")
        path = services.store.read_path(entry["sha256"])
    path.chmod(0o644)
    path.write_bytes(path.read_bytes() + b"\n# altered\n")
    result = bench.run("runs", "replay", run.run_id)
    assert result.exit_code == 2
    assert result.stdout.startswith("environment_mismatch(code: ")


def test_a_divergence_names_the_step_and_the_tensor(shop: TrainingBench, tmp_path: Path) -> None:
    bench = copy_bench(shop, tmp_path / "diverging")
    write_shop(bench.folder, _short)
    model = bench.folder / "model.py"
    model.write_text(model.read_text() + _LOTTERY)
    try:
        run = _trained(bench)
        result = bench.run("runs", "replay", run.run_id, "--json")
        assert result.exit_code == 1, result.output + str(result.exception)
        told = json.loads(result.stdout)
        assert told["verdict"] == "diverged"
        assert not told["as_claimed"]
        # The first moment that was told after the ninth forward pass: at the latest the end of an epoch.
        assert 8 <= told["step"] <= 28
        assert "blocks.0" in told["tensor"]
    finally:
        end_everything(bench)
