"""`make bench-trainer`: what the trainer costs beside bare torch, on this machine; ratios, with the load at the time.

Parts: `overhead` (our loop against a bare torch step, in turns inside one process), `stall` (saves beside the training
against durable ones that it waits for), `scaling` (two ranks of an engine against two bare processes that know nothing
of each other, in turns), `restart` (kill -9 of a rank to the first new step against a cold start, through the whole
platform; needs the demo's home).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Before torch is imported: every rank computes with one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from trainer.forked import fork_ranks

ENGINES: Mapping[str, tuple[str, int, float]] = {
    "ddp": ("ddp", 0, 0.90),
    "fsdp2": ("fsdp2", 0, 0.90),
    "ZeRO-1": ("deepspeed", 1, 0.90),
    "ZeRO-2": ("deepspeed", 2, 0.90),
    "ZeRO-3": ("deepspeed", 3, 0.80),
}
"""Engine, ZeRO stage, and the efficiency that is aimed at with 8,192 tokens per rank and step."""

_DEADLINE_S = 3600.0


def decoder(dim: int, layers: int, sequence: int, vocab: int = 1000) -> dict[str, Any]:
    """Options of a decoder-only transformer."""
    heads = max(dim // 64, 2)
    sizes = {"vocab": vocab, "sequence": sequence, "dim": dim, "layers": layers}
    return {**sizes, "heads": heads, "kv_heads": heads, "hidden": 8 * dim // 3 // 8 * 8}


def main() -> int:
    """Measure the parts that are asked for, and print a table for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_trainer", description=__doc__)
    parts: dict[str, Callable[[argparse.Namespace], None]] = {
        "overhead": overhead,
        "stall": stall,
        "scaling": scaling,
        "restart": restart,
    }
    parser.add_argument("--part", choices=tuple(parts), action="append", help="only this part; may be given repeatedly")
    parser.add_argument("--quick", action="store_true", help="small models and few repetitions: does it run at all")
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each kind, in turns (default 5)")
    parser.add_argument("--steps", type=int, default=200, help="steps of either kind in `overhead` (default 200)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per rank and step of `scaling` (default 8192)")
    parser.add_argument("--engine", choices=tuple(ENGINES), action="append", help="only this engine in `scaling`")
    asked = parser.parse_args()
    import trainer.engines.fsdp2  # pyright: ignore[reportUnusedImport] - imported once, before the ranks are forked
    import trainer.engines.zero  # pyright: ignore[reportUnusedImport]  # noqa: F401

    for name in asked.part or parts:
        print(f"\n## {name} (load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)", flush=True)
        began = time.monotonic()
        parts[name](asked)
        print(f"\n{time.monotonic() - began:.0f} s, load average {os.getloadavg()[0]:.1f}", flush=True)
    return 0


def overhead(asked: argparse.Namespace) -> None:
    """Our loop against a bare torch step, in turns inside one process."""
    steps = 20 if asked.quick else asked.steps
    model = decoder(64, 2, 32) if asked.quick else decoder(256, 4, 128)
    rows = 4
    print(f"{steps} steps of {rows * model['sequence']:,} tokens each, one rank, ddp, {_size(model)}\n")
    print("| step | CPU ms, median | over bare |")
    print("|---|---:|---:|")
    found = _ranks("overhead", 1, model=model, rows=rows, steps=steps)[0]
    bare = found["bare_s"]
    for name, key in (("bare torch", "bare_s"), ("engine", "engine_s"), ("engine and loop", "loop_s")):
        print(f"| {name} | {1e3 * found[key]:.2f} | {found[key] / bare - 1:+.1%} |")
    print(f"\ngoal: at most +2 %; the loop alone adds {1e3 * (found['loop_s'] - found['engine_s']):.3f} ms")


def stall(asked: argparse.Namespace) -> None:
    """Saves beside the training against durable saves that it waits for."""
    model = decoder(64, 2, 32) if asked.quick else decoder(512, 8, 128, vocab=8000)
    saves = 2 if asked.quick else 5
    print(f"2 ranks, {saves} saves of either kind in turns, 8 steps after each save beside, {_size(model)}\n")
    print("| engine | durable s | stall beside s | ratio | step alone s | step beside s |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in ("fsdp2", "ZeRO-2"):
        engine, zero, _ = ENGINES[name]
        with tempfile.TemporaryDirectory(prefix="bench-saves-", dir="/var/tmp") as folder:
            ranks = _ranks(
                "saves", 2, engine=engine, zero=zero, model=model, rows=8, saves=saves, between=8, folder=folder
            )
        # Training goes on when the last rank does.
        slow = {key: [max(both) for both in zip(*(rank[key] for rank in ranks), strict=True)] for key in ranks[0]}
        middle = {key: statistics.median(values) for key, values in slow.items()}
        print(
            f"| {name} | {middle['durable_s']:.3f} | {middle['beside_stall_s']:.3f} | "
            f"{middle['beside_stall_s'] / middle['durable_s']:.2f} | {middle['alone_s']:.3f} | "
            f"{middle['beside_s']:.3f} |",
            flush=True,
        )
    print("\ngoal: a ratio of at most 0.10")


def scaling(asked: argparse.Namespace) -> None:
    """Two ranks of an engine against two bare processes at a time, in turns."""
    model = decoder(64, 2, 32) if asked.quick else decoder(256, 4, 128)
    rows = 4 if asked.quick else max(1, asked.tokens // model["sequence"])
    steps, pairs = (3, 1) if asked.quick else (3, asked.pairs)
    print(f"{rows * model['sequence']:,} tokens per rank and step, {pairs} pairs, {_size(model)}\n")
    print("| engine | efficiency, median | range | two bare, s per step | two ranks, s per step | goal |")
    print("|---|---:|---|---:|---:|---:|")
    for name in asked.engine or ENGINES:
        engine, zero, goal = ENGINES[name]
        ratios, ceilings, own = list[float](), list[float](), list[float]()
        for _ in range(pairs):
            ceilings.append(max(_ranks("bare_steps", 2, model=model, rows=rows, steps=steps)))
            own.append(max(_ranks("engine_steps", 2, engine=engine, zero=zero, model=model, rows=rows, steps=steps)))
            ratios.append(ceilings[-1] / own[-1])
        print(
            f"| {name} | {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} | "
            f"{statistics.median(ceilings):.3f} | {statistics.median(own):.3f} | {goal:.2f} |",
            flush=True,
        )


def restart(asked: argparse.Namespace) -> None:
    """Kill -9 of a rank to the first new step, against a cold start of the same job."""
    from benchmarks.bench_restart import measure, print_table

    print_table(measure(rounds=1 if asked.quick else 3, profiles=("local",), victim="rank"))
    print("\ngoal: at most 1.5 times the cold start")


def _ranks(function: str, world: int, **arguments: object) -> Sequence[Any]:
    import benchmarks.trainer_ranks

    return fork_ranks(getattr(benchmarks.trainer_ranks, function), world, arguments, deadline_s=_DEADLINE_S)


def _size(model: Mapping[str, Any]) -> str:
    block = 4 * model["dim"] ** 2 + 3 * model["dim"] * model["hidden"]
    count = model["layers"] * block + 2 * model["vocab"] * model["dim"]
    return f"a decoder of {count / 1e6:.1f} M parameters (dim {model['dim']}, {model['layers']} layers)"


if __name__ == "__main__":
    raise SystemExit(main())
