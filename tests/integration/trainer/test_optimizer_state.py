"""Field report D05: optimizer groups, rates and frozen layers over a resume."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from support.trainer_runs import ENGINES, Run, toy_spec, with_options

from trainer.blobs import canonical_json
from trainer.spec import ExitCode, RunSpec

GROUPS = [
    {
        "parameters": ["middle.bias", "leave.bias"],
        "initial_lr": 0.03,
        "weight_decay": 0.0,
        "betas": {"$tuple": [0.9, 0.999]},
        "eps": 1e-8,
    },
    {
        "parameters": ["embedding.weight", "middle.weight", "leave.weight"],
        "initial_lr": 0.01,
        "weight_decay": 0.1,
        "betas": {"$tuple": [0.9, 0.999]},
        "eps": 1e-8,
    },
]


def spec_of(engine: str) -> RunSpec:
    return with_options(toy_spec(engine), groups=True, frozen=True)


def saved(run: Run, checkpoint: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The engine's document of rank 0 in a checkpoint, and the bytes of each parameter's weights on both ranks."""
    folder = run.folder / "checkpoints" / checkpoint
    document = json.loads((folder / "rank-0.json").read_bytes())["engine"]
    weights: dict[str, bytes] = {}
    for rank in (0, 1):
        tensors = safetensors.numpy.load((folder / f"rank-{rank}.safetensors").read_bytes())
        for place in sorted(tensors):
            if place.endswith("/weight"):
                name = place.split("/")[3]
                weights[name] = weights.get(name, b"") + tensors[place].tobytes()
    return document, weights


@pytest.mark.parametrize("engine", ENGINES)
def test_d05_groups_and_frozen_layers_come_back(engine: str, tmp_path: Path) -> None:
    run, undisturbed = Run(tmp_path / "run", spec_of(engine)), Run(tmp_path / "undisturbed", spec_of(engine))
    assert run.finish(kill={"rank": 1, "step": 4})[1] == -signal.SIGKILL
    before, then = saved(run, "step-00000004")
    assert before["groups"] == GROUPS
    assert before["frozen"] == ["enter.weight", "enter.bias"]
    assert run.finish() == [0, 0]
    after, now = saved(run, run.checkpoints()[-1])
    assert (after["groups"], after["frozen"]) == (before["groups"], before["frozen"])
    assert then["enter.weight"] == now["enter.weight"]
    assert then["leave.weight"] != now["leave.weight"]
    # With other rates, decays or moments after the resume, the bits would be others.
    assert undisturbed.finish() == [0, 0]
    assert run.state() == undisturbed.state()
    assert run.losses() == undisturbed.losses()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frozen": False}, "parameter 'enter.weight': frozen in the checkpoint, in group 1 now"),
        ({"groups": False}, "parameter 'embedding.weight': in group 1 in the checkpoint, in group 0 now"),
    ],
)
def test_d05_a_mismatch_names_the_parameter(engine: str, change: dict[str, bool], message: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", spec_of(engine))
    assert run.finish(kill={"rank": 1, "step": 4})[1] == -signal.SIGKILL
    changed = with_options(run.spec, **change)
    (run.folder / "spec.json").write_bytes(canonical_json(changed.to_json()))
    assert run.finish() == [ExitCode.USER_CODE, ExitCode.USER_CODE]
    for rank in (0, 1):
        assert run.error(rank)["kind"] == "ParameterMismatch"
        assert message in run.error(rank)["message"]
    assert run.checkpoints() == ["step-00000004"]
