"""Does a layout train as one process does? `python -m trainer.parity --engine fsdp2 --layout shard=4 --json`.

The same small transformer learns from the same global batches in one process of plain torch and under the layout. The
losses and the gradient norms of every step and rank have to agree within a limit, replicas have to hold the same bits,
and the layout has to be real: bytes per rank, layers, heads and experts owned, collectives issued. A layout that has no
such run is not supported.

AdamW hides a constant factor in the gradients, which is why norms are compared beside losses. Limits of a loss, over 20
steps: fp32 1e-5; bf16 2e-3 to one process under the same policy and 5e-3 to fp32, fp16 5e-4 and 1e-3. Measured were
2e-7, 2e-4 and 1e-5. The model's gradient norms are about 1, on both sides of the clipping.

This module imports no torch before it has found the layout to be supported; `trainer.parity_ranks` does the work. The
process that calls `run_parity` is the one that ranks are forked from: it runs no autograd itself.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, cast

from trainer.blobs import Json
from trainer.forked import RankFailed, RanksLate, fork_ranks
from trainer.spec import (
    LAYOUT_OPTIONS,
    STAGES_PER_RANK,
    BatchSpec,
    DataFile,
    DataSpec,
    LayoutSpec,
    ModelSpec,
    OptimizerSpec,
    Precision,
    RestartSpec,
    RunSpec,
    ScheduleSpec,
    SpecRefused,
    check_parallel,
    describe_choice,
    layout_text,
    model_facts,
    parse_layout,
)

STEPS, SEED, GLOBAL_BATCH, CLIP_NORM = 20, 11, 8, 1.0
HASH_EVERY = 5
MODEL: Mapping[str, Any] = {
    "vocab": 64,
    "sequence": 16,
    "dim": 32,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 64,
}
EXPERTS: Mapping[str, Any] = {"experts": 4, "top_k": 2, "hidden": 32}
OPTIMIZER = OptimizerSpec(lr=3e-3, weight_decay=0.01, clip_norm=CLIP_NORM)

Policy = Literal["fp32", "bf16 autocast", "bf16 weights", "fp16 autocast", "fp16 weights"]
Sabotage = Literal["", "gradient", "data", "replica"]

_LIMITS: Mapping[str, float] = {"fp32": 1e-5, "bf16": 2e-3, "fp16": 5e-4}
_LIMITS_TO_FP32: Mapping[str, float] = {"bf16": 5e-3, "fp16": 1e-3}
_NORM_LIMITS: Mapping[str, float] = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-3}
# Which expert a token takes hangs on the last bits of half precision, and one that changes weighs more.
_EXPERTS_FACTOR = 3.0
_NEAR = 0.15
_WORD = 4


@dataclass(frozen=True)
class Case:
    """One run: a layout with what it is run by.

    `sabotage` is for tests of the test: what rank `world - 1` does wrong; it drops its `gradient`, learns from shifted
    `data`, or changes the last digits of one number of its `replica`.
    """

    layout: LayoutSpec
    precision: Precision = "fp32"
    accumulation: int = 1
    steps: int = STEPS
    seed: int = SEED
    sabotage: Sabotage = ""

    @property
    def name(self) -> str:
        """The case in words."""
        more = f", accumulation {self.accumulation}" if self.accumulation > 1 else ""
        return describe_choice(self.layout, self.precision) + more

    @property
    def model(self) -> Mapping[str, Any]:
        """Options of the transformer: with experts where the layout divides them, less deep where it is compiled."""
        more = {**(EXPERTS if self.layout.ep > 1 else {}), **({"layers": 2} if self.layout.compile else {})}
        return {**MODEL, **more}

    @property
    def policy(self) -> Policy:
        """How one process computes in the same precision as the engine."""
        if self.precision == "fp32":
            return "fp32"
        how = "autocast" if self.layout.engine == "ddp" else "weights"
        return cast("Policy", f"{self.precision} {how}")

    def spec(self) -> RunSpec:
        """The case as an engine gets it."""
        return RunSpec(
            pipeline="parity",
            data=DataSpec(
                files=(DataFile("parity", "sha256:" + "0" * 64, 1, 1),),
                identity=("id",),
                target="next",
                observed_at="observed",
                known_at="known",
                cut=2,
                validation_from=1,
                categorical=("token",),
                numeric=(),
            ),
            model=ModelSpec(
                file="trainer/models/decoder.py",
                function="Decoder",
                code_digest="sha256:" + "0" * 64,
                options=self.model,
            ),
            seed=self.seed,
            layout=self.layout,
            optimizer=OPTIMIZER,
            batch=BatchSpec(global_size=GLOBAL_BATCH, accumulation=self.accumulation),
            schedule=ScheduleSpec(),
            restart=RestartSpec(),
            precision=self.precision,
        )

    def check(self) -> None:
        """Refuse what no engine supports, or what the small model and its batch do not divide by.

        Raises:
            SpecRefused: names the fields and the nearest valid choice.
        """
        spec = self.spec()
        check_parallel(spec.layout, spec.precision, CLIP_NORM, spec.batch, model_facts(self.model))


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: `value` must not exceed `limit`."""

    name: str
    value: float
    limit: float
    where: str = ""

    @property
    def passed(self) -> bool:
        """NaN is no pass."""
        return self.value <= self.limit


@dataclass(frozen=True)
class ParityResult:
    """What came out, with every number.

    `reference` is one process under the same policy, `fp32` one process in fp32; `ranks` what each rank said.
    """

    case: Case
    checks: tuple[Check, ...]
    reference: Mapping[str, Any]
    fp32: Mapping[str, Any]
    ranks: tuple[Mapping[str, Any], ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether every check did."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Json]:
        """Every number and every limit."""
        case, document = self.case, cast("dict[str, Json]", {})
        document |= {"passed": self.passed, "engine": case.layout.engine, "layout": layout_text(case.layout)}
        document |= {"precision": case.precision, "policy": case.policy, "schedule": case.layout.schedule}
        document |= {"offload": case.layout.offload, "accumulation": case.accumulation}
        document |= {name: getattr(case.layout, name) for name in LAYOUT_OPTIONS}
        document |= {"world_size": case.layout.world_size, "steps": case.steps, "seed": case.seed}
        document["checks"] = [{**asdict(check), "passed": check.passed} for check in self.checks]
        document["reference"] = dict(self.reference)
        document["fp32_losses"] = self.fp32["losses"]
        document["ranks"] = [dict(rank) for rank in self.ranks]
        return document


def run_parity(
    engine: str,
    layout: str,
    precision: Precision = "fp32",
    accumulation: int = 0,
    schedule: str = "1f1b",
    offload: str = "",
    steps: int = STEPS,
    seed: int = SEED,
    options: Sequence[str] = (),
    sabotage: Sabotage = "",
    say: Callable[[str], None] = lambda _: None,
) -> ParityResult:
    """Train under a layout and in one process, and compare.

    Args:
        engine: `ddp`, `fsdp2` or `deepspeed`.
        layout: Degrees, such as `dp=2,tp=2`.
        precision: Of the run.
        accumulation: Micro-batches per step; 0 for as many as the pipeline has stages, else one.
        schedule: Of a pipeline.
        offload: What stays in host memory.
        steps: Optimizer steps.
        seed: Of weights and tokens.
        options: `activation_checkpointing`, `compile`.
        sabotage: See `Case`.
        say: Takes one line per stage of the work.

    Raises:
        SpecRefused: the layout is not supported; nothing was started.
        RankFailed: a rank raised; the message has its traceback.
        RanksLate: ranks hang.
    """
    given = parse_layout(engine, layout)
    changes: Any = {"schedule": schedule, "offload": offload, **dict.fromkeys(options, True)}
    case = Case(replace(given, **changes), precision, accumulation or given.pp, steps, seed, sabotage)
    case.check()
    return run_case(case, say)


def parity_json(**arguments: Any) -> dict[str, Json]:  # noqa: ANN401 - those of `run_parity`
    """`run_parity` as JSON; for `trainer.forked.Warm`."""
    return run_parity(**arguments).to_json()


_references: dict[tuple[object, ...], Mapping[str, Any]] = {}


def run_case(case: Case, say: Callable[[str], None] = lambda _: None) -> ParityResult:
    """`run_parity` of a case that was found to be supported."""
    worker = _warm(case.layout)
    fp32 = _reference(worker, case, "fp32", say)
    reference = _reference(worker, case, case.policy, say)
    say(f"{case.name}: {case.steps} steps on {case.layout.world_size} ranks")
    ranks = fork_ranks(worker.train, case.layout.world_size, {"case": case})
    return ParityResult(case, tuple(compare(case, reference, fp32, ranks)), reference, fp32, tuple(ranks))


def _warm(layout: LayoutSpec) -> Any:  # noqa: ANN401 - a module of this package, imported late for its torch
    """Import what the ranks will need: each of these costs seconds, and every rank would pay them."""
    engines = {"ddp": "trainer.engines.ddp", "fsdp2": "trainer.engines.fsdp2", "deepspeed": "trainer.engines.zero"}
    parts = {"tp": "trainer.parallel.tensor", "pp": "trainer.engines.pipeline", "ep": "trainer.parallel.expert"}
    worker = importlib.import_module("trainer.parity_ranks")
    for module in (engines[layout.engine], *(name for degree, name in parts.items() if getattr(layout, degree) > 1)):
        importlib.import_module(module)
    if layout.compile:
        importlib.import_module("torch._inductor.compile_fx")
    return worker


def _reference(worker: Any, case: Case, policy: Policy, say: Callable[[str], None]) -> Mapping[str, Any]:  # noqa: ANN401
    """What one process does, once for all cases that compare with it."""
    key = (policy, case.steps, case.seed, *case.model.items())
    if key not in _references:
        say(f"one process, {policy}: {case.steps} steps")
        (_references[key],) = fork_ranks(worker.reference, 1, {"case": case, "policy": policy})
    return _references[key]


def compare(
    case: Case, reference: Mapping[str, Any], fp32: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]
) -> list[Check]:
    """All checks of what the ranks said; torch-free, of JSON."""
    precision, half = case.precision, case.precision != "fp32"
    norms = _NORM_LIMITS[precision] * (_EXPERTS_FACTOR if half and case.layout.ep > 1 else 1.0)
    checks = [
        _curve("loss", "losses", ranks, reference, _LIMITS[precision]),
        _curve("gradient norm", "grad_norms", ranks, reference, norms),
    ]
    if half:
        checks.append(_curve("loss to fp32", "losses", ranks, fp32, _LIMITS_TO_FP32[precision]))
    skipped = [step for step, was in enumerate(ranks[0]["skipped"]) if was]
    checks.append(Check("skipped steps", len(skipped), 0, f"steps {skipped}" if skipped else ""))
    checks += [*_replicas(case, ranks), *_real(case, reference, ranks)]
    return checks


def _curve(
    name: str, key: str, ranks: Sequence[Mapping[str, Any]], reference: Mapping[str, Any], limit: float
) -> Check:
    """The largest difference over steps and ranks."""
    worst, where = -1.0, ""
    for rank, said in enumerate(ranks):
        if len(said[key]) != len(reference[key]):
            return Check(name, math.inf, limit, f"rank {rank} told of {len(said[key])} steps")
        for step, (value, wanted) in enumerate(zip(said[key], reference[key], strict=True)):
            difference = abs(value - wanted)
            if not difference <= worst:
                worst, where = difference, f"step {step + 1}, rank {rank}: {value!r}, one process {wanted!r}"
            if math.isnan(difference):
                return Check(name, worst, limit, where)
    return Check(name, worst, limit, where)


def _replicas(case: Case, ranks: Sequence[Mapping[str, Any]]) -> Iterable[Check]:
    """Every tensor part that several ranks hold has to have the same bits on each."""
    compared, different = 0, list[str]()
    for step in ranks[0]["hashes"]:
        holders: dict[str, list[str]] = {}
        for said in ranks:
            for part, digest in said["hashes"][step].items():
                holders.setdefault(part, []).append(digest)
        for part, digests in holders.items():
            compared += len(digests) > 1
            if len(set(digests)) > 1:
                different.append(f"step {step}: {part}")
    where = "; ".join([*different[:3], f"{compared} parts are on several ranks"])
    yield Check("different replicas", len(different), 0, where)
    # ZeRO 3 divides over all ranks that FSDP2 would replicate over, and leaves nothing to compare.
    layout = case.layout
    wanted = layout.zero < 3 and layout.dp * layout.sp * layout.tp > 1
    if wanted:
        yield Check("replicas that were not compared", float(compared == 0), 0)


def _real(case: Case, reference: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> Iterable[Check]:
    """The layout is no disguise: what each rank holds, and what it sends."""
    layout, model = case.layout, model_facts(case.model)
    shares = _shares(layout, reference["sizes"])
    for kind, expected in shares.items():
        yield _bytes(kind, expected, [said["facts"][f"{kind}_bytes"] for said in ranks])
    owned = {
        "layers": model.layers // layout.pp,
        "heads": model.heads // (layout.tp * layout.sp),
        "experts": model.experts // layout.ep,
    }
    for name, wanted in owned.items():
        found = [_count(said["facts"][name]) for said in ranks]
        wrong = sum(value != wanted for value in found)
        yield Check(f"ranks with other {name}", wrong, 0, f"{found}, expected {wanted} each")
    for need, (kinds, least) in _must_issue(case).items():
        issued = [sum(said["facts"]["collectives"].get(kind, 0) for kind in kinds) for said in ranks]
        few = sum(count < least for count in issued)
        where = f"{' or '.join(kinds)}: {issued} in one step, at least {least} each"
        yield Check(f"ranks without collectives for {need}", few, 0, where)


def _count(owned: int | Sequence[str]) -> int:
    """Blocks are told by name."""
    return owned if isinstance(owned, int) else len(owned)


def _bytes(kind: str, expected: tuple[float, ...], found: Sequence[int]) -> Check:
    """How far the rank that is furthest off is from what it should hold, as a share of that."""
    off = [min(abs(value - wanted) / wanted for wanted in expected) for value in found]
    return Check(f"{kind} bytes", max(off), _NEAR, f"{list(found)}, expected {[round(e) for e in expected]} each")


def _shares(layout: LayoutSpec, sizes: Mapping[str, int]) -> dict[str, tuple[float, ...]]:
    """Bytes of each kind that a rank should hold on average; several values where an engine may count either way."""
    held = sum(size / _parts_of(layout, name) for name, size in sizes.items()) / layout.pp / layout.shard
    replicas = layout.dp * layout.sp
    parameters = held / (replicas if layout.zero == 3 else 1)
    gradients = held / (replicas if layout.zero >= 2 else 1)
    moments = 2 * held / (replicas if layout.zero >= 1 else 1)
    if layout.engine != "deepspeed":
        return {
            "parameter": (parameters * _WORD,),
            "gradient": (gradients * _WORD,),
            "optimizer": (moments * _WORD,),
        }
    # In half precision it keeps 2-byte weights and gradients, and a fp32 copy of the weights with the moments.
    return {
        "parameter": (parameters * _WORD, parameters * _WORD / 2),
        "gradient": (gradients * _WORD, gradients * _WORD / 2),
        "optimizer": (moments * _WORD, moments * _WORD * 1.5),
    }


def _parts_of(layout: LayoutSpec, name: str) -> int:
    """Into how many parts tensor and expert ranks divide a parameter of the small model; tensor ranks not its norms."""
    if ".experts." in name:
        return layout.ep
    # FSDP2 shards over the expert ranks what they do not divide.
    ranks = layout.ep if layout.engine == "fsdp2" else 1
    return ranks if "norm" in name else ranks * layout.tp


def _must_issue(case: Case) -> dict[str, tuple[tuple[str, ...], int]]:
    """For each degree the kinds of collective that it takes, and the fewest of them in a step of a rank."""
    layout, layers = case.layout, model_facts(case.model).layers // case.layout.pp
    needs: dict[str, tuple[tuple[str, ...], int]] = {}
    if layout.shard > 1 or (layout.engine == "fsdp2" and layout.ep > 1):
        # Each block, and what is in none, is gathered once at least.
        needs["shard, parameters"] = (("all_gather",), layers + 1)
        needs["shard, gradients"] = (("reduce_scatter",), layers + 1)
    if layout.zero == 3:
        needs["zero 3, parameters"] = (("all_gather",), layers)
    if layout.dp > 1:
        needs["dp, gradients"] = (("all_reduce", "reduce_scatter", "reduce"), 1)
    if layout.tp > 1:
        # After attention and feed-forward part of a block, and before them in the backward pass.
        needs["tp, activations"] = (("all_reduce",), 4 * layers * case.accumulation)
    if layout.pp > 1:
        needs["pp, activations"] = (("send", "recv"), 2 * case.accumulation)
    if layout.sp > 1:
        # Queries, keys, values and the result, there and back.
        needs["sp, heads"] = (("all_to_all",), 8 * layers * case.accumulation)
    if layout.ep > 1:
        needs["ep, tokens"] = (("all_to_all",), 4 * layers * case.accumulation)
    return needs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one case; 0 when it passed, 1 when not, 2 when it was refused."""
    asked = _parser().parse_args(arguments)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    options = [name for name in LAYOUT_OPTIONS if getattr(asked, name)]
    try:
        result = run_parity(
            asked.engine,
            asked.layout,
            asked.precision,
            asked.accumulation,
            asked.schedule,
            asked.offload,
            asked.steps,
            asked.seed,
            options,
            say=say,
        )
    except SpecRefused as error:
        say(f"refused: {error}")
        return 2
    except (RankFailed, RanksLate) as error:
        say(f"failed: {error}")
        return 1
    print(json.dumps(result.to_json(), indent=2) if asked.json else render(result))
    return 0 if result.passed else 1


def render(result: ParityResult) -> str:
    """The checks as lines."""
    lines = [
        f"{'ok' if check.passed else 'FAILED':<6}  {check.name:<34}  {check.value:.3g}, limit {check.limit:.3g}"
        + (f"  ({check.where})" if check.where else "")
        for check in result.checks
    ]
    verdict = "trains as one process does" if result.passed else "does NOT train as one process does"
    return "\n".join([*lines, f"{result.case.name} {verdict}"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m trainer.parity", description="Compare a layout with one process.")
    parser.add_argument("--engine", required=True)
    parser.add_argument("--layout", required=True, help="degrees, such as dp=2,tp=2")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--accumulation", type=int, default=0)
    parser.add_argument("--schedule", choices=tuple(STAGES_PER_RANK), default="1f1b")
    parser.add_argument("--offload", choices=("", "optimizer", "parameters"), default="")
    for name in LAYOUT_OPTIONS:
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    # Ranks import this module by its name: the classes of `__main__` would be others.
    sys.exit(importlib.import_module("trainer.parity").main())
