"""What the comparison finds in what ranks said, without ranks; and the command's words and exit codes."""

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainer.parity as parity
from trainer.parity import Case, Check, ParityResult, compare
from trainer.spec import Precision, SpecRefused, parse_layout

ROOT = Path(__file__).parents[3]
SIZES = {"embed.weight": 4000, "layers.0.norm.weight": 0, "layers.1.wq": 4000}
REFERENCE: dict[str, Any] = {"losses": [4.0, 3.0], "grad_norms": [2.0, 0.5], "sizes": SIZES}


def case(engine: str, layout: str, precision: Precision = "fp32") -> Case:
    return Case(parse_layout(engine, layout), precision, steps=2)


def ranks(world: int, parts: int, collectives: dict[str, int], **facts: object) -> list[dict[str, Any]]:
    """What ranks say that do as one process does, each with one of `parts` parts of everything."""
    size = 4 * 8000 // parts
    told = {"parameter_bytes": size, "gradient_bytes": size, "optimizer_bytes": 2 * size}
    told |= {"layers": list("0123"), "heads": 4, "experts": 0, "collectives": collectives, **facts}
    return [
        {
            "losses": [4.0, 3.0],
            "grad_norms": [2.0, 0.5],
            "scales": [1.0, 1.0],
            "skipped": [False, False],
            "hashes": {"2": {f"embed at {rank % parts}": "a"}},
            "facts": copy.deepcopy(told),
        }
        for rank in range(world)
    ]


def failed(case: Case, said: list[dict[str, Any]]) -> list[str]:
    return [check.name for check in compare(case, REFERENCE, REFERENCE, said) if not check.passed]


REPLICAS = case("ddp", "dp=2")
SHARDS = case("fsdp2", "shard=2")
GATHERS = {"all_gather": 9, "reduce_scatter": 5}


def test_ranks_that_do_as_one_process_does_pass() -> None:
    assert failed(REPLICAS, ranks(2, 1, {"all_reduce": 2})) == []
    assert failed(SHARDS, ranks(2, 2, GATHERS)) == []


def lose(said: dict[str, Any]) -> None:
    said["losses"][1] += 2e-5


def outgrow(said: dict[str, Any]) -> None:
    said["grad_norms"][0] *= 1 + 2e-5


def become_nan(said: dict[str, Any]) -> None:
    said["losses"][0] = math.nan


def stop_early(said: dict[str, Any]) -> None:
    del said["losses"][1]


def drift(said: dict[str, Any]) -> None:
    said["hashes"]["2"]["embed at 0"] = "b"


def skip(said: dict[str, Any]) -> None:
    said["skipped"][1] = True


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lose, "loss"),
        (outgrow, "gradient norm"),
        (become_nan, "loss"),
        (stop_early, "loss"),
        (drift, "different replicas"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_and_step_counts(change: Callable[[dict[str, Any]], None], found: str, rank: int) -> None:
    said = ranks(2, 1, {"all_reduce": 2})
    change(said[rank])
    assert failed(REPLICAS, said) == [found]


def test_a_skipped_step_is_told() -> None:
    said = ranks(2, 1, {"all_reduce": 2})
    for one in said:
        skip(one)
    assert failed(REPLICAS, said) == ["skipped steps"]


def test_replicas_that_share_nothing_were_not_compared() -> None:
    said = ranks(2, 2, {"all_reduce": 2}, parameter_bytes=32000, gradient_bytes=32000, optimizer_bytes=64000)
    assert failed(REPLICAS, said) == ["replicas that were not compared"]


@pytest.mark.parametrize("kind", ["parameter", "gradient", "optimizer"])
def test_a_shard_that_is_whole_is_no_shard(kind: str) -> None:
    said = ranks(2, 2, GATHERS)
    said[1]["facts"][f"{kind}_bytes"] *= 2
    assert failed(SHARDS, said) == [f"{kind} bytes"]


@pytest.mark.parametrize("missing", sorted(GATHERS))
def test_a_shard_that_is_never_gathered_or_scattered_is_no_shard(missing: str) -> None:
    said = ranks(2, 2, {kind: count for kind, count in GATHERS.items() if kind != missing})
    assert len(failed(SHARDS, said)) == 1


@pytest.mark.parametrize(
    ("engine", "layout", "facts"),
    [
        ("ddp", "pp=2", {"layers": ["0", "1"]}),
        ("fsdp2", "tp=2", {"heads": 2}),
        ("ddp", "sp=2", {"heads": 2}),
        ("fsdp2", "ep=2", {"experts": 2}),
    ],
)
def test_who_owns_everything_shares_nothing(engine: str, layout: str, facts: dict[str, Any]) -> None:
    asked = case(engine, layout)
    sends = {"all_reduce": 99, "all_to_all": 99, "send": 99, "recv": 99, **GATHERS}
    (name,) = facts
    whole = {"layers": list("0123"), "heads": 4, "experts": 4}
    assert f"ranks with other {name}" not in failed(asked, ranks(2, 1, sends, **facts))
    assert f"ranks with other {name}" in failed(asked, ranks(2, 1, sends, **{name: whole[name]}))
    silent = [
        check for check in failed(asked, ranks(2, 1, {}, **facts)) if check.startswith("ranks without collectives")
    ]
    assert silent


def test_zero_stages_divide_one_kind_after_the_other() -> None:
    whole = {"parameter_bytes": 32000, "gradient_bytes": 32000, "optimizer_bytes": 64000}
    half = {kind: size // 2 for kind, size in whole.items()}
    divided = {0: [], 1: ["optimizer"], 2: ["gradient", "optimizer"], 3: ["parameter", "gradient", "optimizer"]}
    for stage, kinds in divided.items():
        facts = {f"{kind}_bytes": half[f"{kind}_bytes"] for kind in kinds}
        said = ranks(2, 1, {"all_reduce": 9, "all_gather": 9}, **{**whole, **facts})
        assert failed(case("deepspeed", f"dp=2,zero={stage}"), said) == []
        for kind in kinds:
            wrong = copy.deepcopy(said)
            wrong[0]["facts"][f"{kind}_bytes"] = 4 * whole[f"{kind}_bytes"]
            assert failed(case("deepspeed", f"dp=2,zero={stage}"), wrong) == [f"{kind} bytes"]


def test_half_precision_is_held_against_its_own_kind_and_against_fp32() -> None:
    asked = case("ddp", "dp=2", precision="bf16")
    said = ranks(2, 1, {"all_reduce": 2})
    for one in said:
        one["losses"] = [4.0, 3.004]
    other = {**REFERENCE, "losses": [4.0, 3.004]}
    names = [c.name for c in compare(asked, other, REFERENCE, said) if not c.passed]
    assert names == []
    names = [c.name for c in compare(asked, other, {**REFERENCE, "losses": [4.0, 2.98]}, said) if not c.passed]
    assert names == ["loss to fp32"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("fsdp2", "sp=2"), "nearest valid choice"),
        (("ddp", "dp=2,zero=1"), "layout.zero"),
        (("deepspeed", "dp=2,zero=0", "bf16"), "2.4e-2"),
        (("ddp", "dp=3"), "do not divide by 3"),
        (("ddp", "pp=2", "fp32", 1), "batch.accumulation"),
        (("horovod", "dp=2"), "horovod"),
    ],
)
def test_what_is_not_supported_is_refused_before_anything_starts(
    arguments: tuple[Any, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "fork_ranks", lambda *_, **__: pytest.fail("a rank was started"))
    # An import of torch would fail; other tests of this process may have imported it.
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SpecRefused, match=said):
        parity.run_parity(*arguments)


def result(value: float) -> ParityResult:
    return ParityResult(REPLICAS, (Check("loss", value, 1e-5, "step 1"),), REFERENCE, REFERENCE)


@pytest.mark.parametrize(("value", "code"), [(1e-6, 0), (1e-5, 0), (2e-5, 1), (math.nan, 1)])
def test_the_exit_code_is_the_verdict(
    value: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parity, "run_parity", lambda *_, **__: result(value))
    assert parity.main(["--engine", "ddp", "--layout", "dp=2", "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["passed"] is (code == 0)
    assert told["checks"][0]["limit"] == 1e-5
    assert parity.main(["--engine", "ddp", "--layout", "dp=2"]) == code
    assert ("NOT" in capsys.readouterr().out) is (code == 1)


def test_no_check_is_no_pass() -> None:
    assert not ParityResult(REPLICAS, (), REFERENCE, REFERENCE).passed


def headway(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "headway.cli.main", "train", "parity", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_the_command_tells_every_number() -> None:
    done = headway("--engine", "ddp", "--layout", "dp=2", "--steps", "3", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["passed"]
    assert (told["engine"], told["layout"], told["world_size"]) == ("ddp", "dp=2", 2)
    assert len(told["reference"]["losses"]) == len(told["ranks"][1]["grad_norms"]) == 3
    assert "3 steps on 2 ranks" in done.stderr, "progress"


def test_the_command_refuses_with_the_nearest_layout() -> None:
    done = headway("--engine", "deepspeed", "--layout", "sp=2,zero=2")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "leaves gradients unreduced" in done.stderr
    assert "deepspeed sp=2,zero=3 fp32" in done.stderr
