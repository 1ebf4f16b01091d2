"""What a training says of itself while it runs: where the time went, who is slow, what each rank holds, a trace."""

import gzip
import json
from pathlib import Path

import pytest
from support.trainer_runs import ENGINES, Run, toy_spec, with_options

from trainer.profile_request import PROFILE_FILE, Wanted
from trainer.timing import PARTS


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_event_says_where_the_time_went(engine: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", toy_spec(engine))
    assert run.finish() == [0, 0]
    steps = [event.data for event in run.events("step")]
    assert len(steps) == 15
    for data in steps:
        assert set(data["split"]) <= set(PARTS)
        assert sum(data["split"].values()) == pytest.approx(data["step_s"], rel=1e-6)
        assert {"forward", "backward", "optimizer", "data", "communication"} <= set(data["split"])
        assert data["mfu"] > 0
        assert data["steps_total"] == 15
    # The other rank's first report may come a step later.
    assert all(data["peak_bytes"] > 1 << 20 for data in steps[1:])
    # Saves hold this run up, and epochs are judged: both are named, and neither is every step's.
    assert sum("checkpoint" in data["split"] for data in steps) > 2
    assert sum(data["split"].get("validation", 0) > 0 for data in steps) == 2
    # Warm-up of one step, then down.
    rates = [data["lr"] for data in steps]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(0.01)
    work = run.events("work")[0].data
    # Four inputs, an embedding of three: 7 x 9, 9 x 7 and 7 weights, six operations each, eight rows.
    assert work["flops_per_step"] == 6 * (7 * 9 + 9 * 7 + 7) * 8
    assert work["ranks"] == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_say_what_they_hold(engine: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", toy_spec(engine))
    assert run.finish() == [0, 0]
    told = run.events("ranks")[-1].data
    assert (told["step"], told["of"]) == (15, 2)
    ranks = told["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    parameters = 4 * (5 * 3 + 7 * 9 + 9 + 9 * 7 + 7 + 7 + 1)
    degree = "shard" if engine == "fsdp2" else "dp"
    for index, rank in enumerate(ranks):
        assert rank["place"] == {degree: index}
        assert rank["peak_bytes"] >= rank["base_bytes"] > 1 << 20
        if engine != "fsdp2":
            assert rank["parameter_bytes"] == parameters
    if engine == "fsdp2":
        assert sum(rank["parameter_bytes"] for rank in ranks) == parameters
    if engine == "ddp":
        assert [rank["optimizer_bytes"] for rank in ranks] == [2 * parameters] * 2


@pytest.mark.parametrize("engine", ENGINES)
def test_the_slow_rank_is_seen_and_the_others_wait_for_it(engine: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", with_options(toy_spec(engine), slow_rank=1, slow_s=0.15))
    assert run.finish() == [0, 0]
    steps = [event.data for event in run.events("step")]
    seen = [data["slowest"]["rank"] for data in steps if "slowest" in data]
    assert seen.count(1) > len(seen) // 2
    waited = sorted(data["split"]["communication"] for data in steps)
    assert waited[len(waited) // 2] > 0.1


def test_the_steps_asked_for_are_traced_and_told_as_an_artifact(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", toy_spec("ddp"))
    (run.folder / PROFILE_FILE).write_bytes(Wanted(3, 5).to_json())
    assert run.finish() == [0, 0]
    told = next(event.data for event in run.events("artifact") if event.data["name"] == "profile")
    folder = run.folder / told["path"]
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert manifest["facts"]["steps"] == [3, 5]
    file = folder / manifest["entries"][0]["name"]
    assert file.stat().st_size == told["bytes"]
    trace = json.loads(gzip.decompress(file.read_bytes()))
    names = [event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"]
    assert {name for name in names if name.startswith("step ")} == {"step 3", "step 4", "step 5"}
    # Inside of the steps, and nothing of others: three products forward in each, and the optimizer.
    assert sum(name == "aten::addmm" for name in names) == 9
    assert any("AdamW" in name for name in names)
    # The training is the same as without a trace.
    plain = Run(tmp_path / "plain", toy_spec("ddp"))
    assert plain.finish() == [0, 0]
    assert plain.losses() == run.losses()


def test_steps_that_have_passed_are_told_and_the_training_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", toy_spec("ddp", 1))
    run.begin(pause_s=0.05)
    run.wait_for_step(4)
    (run.folder / PROFILE_FILE).write_bytes(Wanted(1, 2).to_json())
    from support.trainer_runs import warm

    assert warm().wait(run.started) == [0]
    refused = [event.data for event in run.events("error")]
    assert [error["kind"] for error in refused] == ["ProfileRefused"]
    assert "steps 1 to 2 were asked for after step" in refused[0]["message"]
    assert not any(event.data["name"] == "profile" for event in run.events("artifact"))
