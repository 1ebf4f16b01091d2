"""Point-in-time join: the kernel against pandas, polars and DuckDB on the same data.

The kernel answers the bitemporal question (event time and availability), the others the simpler one on event time
alone. Every measurement is a process of its own: it loads the columns in its library's own form, runs the join once on
a small slice (compiling, starting threads), then runs it once in full under the clock. Order alternates between rounds.

    python -m benchmarks.bench_join [--scale 1.0] [--rounds 3] [--docs docs/benchmarks.md]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 20_000_000
LABELS = 5_000_000
KEYS = 100_000
YEAR = 365 * 86_400 * 1_000_000
DAY = 86_400 * 1_000_000
COLUMNS = ("a", "b", "c")
WARM = 1_000
START = "<!-- bench-join: generated below -->"
END = "<!-- bench-join: end -->"

Join = Callable[[], Any]


def generate(folder: Path, scale: float) -> None:
    """Write the columns of both data sets, the same for the same scale: .npy per column, Parquet per table."""
    n, m, keys = (max(int(size * scale), 10) for size in (ROWS, LABELS, KEYS))
    for name in ("uniform", "hot"):
        target = folder / name
        if (target / "done").exists():
            continue
        target.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(20130101)
        row_key = random.integers(0, keys, n)
        label_key = random.integers(0, keys, m)
        if name == "hot":
            row_key[random.random(n) < 0.5] = 0
            label_key[random.random(m) < 0.5] = 0
        event = random.integers(0, YEAR, n)
        available = event + random.integers(0, DAY, n)
        label_time = random.integers(0, YEAR, m)
        values = {column: random.normal(size=n) for column in COLUMNS}
        np.save(target / "key.npy", row_key)
        np.save(target / "event.npy", event)
        np.save(target / "available.npy", available)
        np.save(target / "label_key.npy", label_key)
        np.save(target / "label_time.npy", label_time)
        for column, value in values.items():
            np.save(target / f"{column}.npy", value)
        save_table(target / "rows.parquet", {"key": row_key, "t": event, **values})
        save_table(target / "labels.parquet", {"key": label_key, "t": label_time})
        (target / "done").write_text("")


def save_table(path: Path, columns: dict[str, np.ndarray]) -> None:
    """Write one table for the libraries that read tables."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path, compression="none", use_dictionary=False)


def load(folder: Path, name: str) -> np.ndarray:
    """One column."""
    return np.load(folder / f"{name}.npy")


def ours(folder: Path) -> tuple[Join, Join]:
    """Numpy columns to three joined numpy columns with null masks; both clocks."""
    from headway.features.kernel import Observations, Rows, latest

    key, event, available = (load(folder, c) for c in ("key", "event", "available"))
    label_key, label_time = load(folder, "label_key"), load(folder, "label_time")
    values = {c: load(folder, c) for c in COLUMNS}
    groups = int(key.max()) + 1

    def join(n: int, m: int) -> Any:  # noqa: ANN401 - whatever the library returns
        rows = Rows(
            key[:n],
            event[:n],
            available[:n],
            np.broadcast_to(np.int64(0), n),
            np.broadcast_to(np.False_, n),
        )
        observations = Observations(label_key[:m], label_time[:m], np.broadcast_to(np.True_, m))
        found = latest(
            rows,
            observations,
            groups=groups,
            boundary="lt",
            lookback=None,
            null_policy="row_wins",
            null=None,
            tie_break_row_id=False,
        )
        joined = {c: v.take(found.row, mode="clip") for c, v in values.items()}
        return joined, found.row < 0

    return lambda: join(WARM, WARM), lambda: join(len(key), len(label_key))


def with_pandas(folder: Path) -> tuple[Join, Join]:
    """Two data frames, sorted by time as merge_asof demands, to one; event time only."""
    import pandas as pd

    right = pd.DataFrame(
        {"key": load(folder, "key"), "t": load(folder, "event"), **{c: load(folder, c) for c in COLUMNS}}, copy=False
    )
    left = pd.DataFrame({"key": load(folder, "label_key"), "t": load(folder, "label_time")}, copy=False)

    def join(n: int, m: int) -> Any:  # noqa: ANN401
        return pd.merge_asof(
            left.iloc[:m].sort_values("t"), right.iloc[:n].sort_values("t"), on="t", by="key", allow_exact_matches=False
        )

    return lambda: join(WARM, WARM), lambda: join(len(right), len(left))


def with_polars(folder: Path) -> tuple[Join, Join]:
    """Two data frames, sorted by time as join_asof demands, to one; event time only."""
    import polars as pl

    right = pl.read_parquet(folder / "rows.parquet")
    left = pl.read_parquet(folder / "labels.parquet")

    # Sortedness inside groups follows from the sort by time; polars warns that it does not look.
    warnings.filterwarnings("ignore", message="Sortedness of columns cannot be checked")

    def join(n: int, m: int) -> Any:  # noqa: ANN401
        return (
            left[:m]
            .sort("t")
            .join_asof(right[:n].sort("t"), on="t", by="key", strategy="backward", allow_exact_matches=False)
        )

    return lambda: join(WARM, WARM), lambda: join(len(right), len(left))


def with_duckdb(folder: Path) -> tuple[Join, Join]:
    """Two tables in DuckDB's own memory to a third; event time only."""
    import duckdb

    connection = duckdb.connect()
    connection.execute(f"CREATE TABLE r AS SELECT * FROM '{folder / 'rows.parquet'}'")
    connection.execute(f"CREATE TABLE l AS SELECT * FROM '{folder / 'labels.parquet'}'")

    def join(name: str, limit: str) -> Any:  # noqa: ANN401
        return connection.execute(
            f"CREATE TABLE {name} AS SELECT l.key, l.t, r.a, r.b, r.c FROM (SELECT * FROM l {limit}) l "
            f"ASOF LEFT JOIN (SELECT * FROM r {limit}) r ON l.key = r.key AND l.t > r.t"
        )

    return lambda: join("warm", f"LIMIT {WARM}"), lambda: join("joined", "")


def our_windows(folder: Path) -> tuple[Join, Join]:
    """Count, mean and standard deviation of one column over 1, 7 and 37 days (a tenth of a year)."""
    from headway.features.kernel import Observations, Rows, window

    key, event, available, values = (load(folder, c) for c in ("key", "event", "available", "a"))
    label_key, label_time = load(folder, "label_key"), load(folder, "label_time")
    groups = int(key.max()) + 1

    def join(n: int, m: int) -> Any:  # noqa: ANN401
        return window(
            Rows(
                key[:n],
                event[:n],
                available[:n],
                np.broadcast_to(np.int64(0), n),
                np.broadcast_to(np.False_, n),
                np.arange(n),
            ),
            Observations(label_key[:m], label_time[:m], np.broadcast_to(np.True_, m)),
            values[:n],
            np.broadcast_to(np.False_, n),
            groups=groups,
            boundary="lt",
            durations=[DAY, 7 * DAY, 37 * DAY],
            aggregates=["count", "mean", "std"],
        )

    return lambda: join(WARM, WARM), lambda: join(len(key), len(label_key))


CONTENDERS: dict[str, Callable[[Path], tuple[Join, Join]]] = {
    "headway": ours,
    "duckdb": with_duckdb,
    "polars": with_polars,
    "pandas": with_pandas,
    "headway-windows": our_windows,
}
JOINS = ("headway", "duckdb", "polars", "pandas")


@dataclass(frozen=True)
class Measured:
    """Medians of one contender on one data set."""

    seconds: float
    cpu_seconds: float
    peak_mb: float
    loaded_mb: float


def peak_mb() -> float:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def child(name: str, folder: Path) -> None:
    """Run one contender once and print what it took as JSON."""
    warm, full = CONTENDERS[name](folder)
    warm()
    loaded = peak_mb()
    wall, cpu = time.perf_counter(), time.process_time()
    result = full()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert result is not None
    print(json.dumps({"seconds": wall, "cpu_seconds": cpu, "peak_mb": peak_mb(), "loaded_mb": loaded}))


def measure(names: tuple[str, ...], folder: Path, rounds: int) -> dict[str, Measured]:
    """Alternate the contenders, each run in a process of its own, and take medians."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.bench_join", "--child", name, "--data", str(folder)],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            run = json.loads(done.stdout.splitlines()[-1])
            print(f"  {folder.name:8} {name:16} {run['seconds']:7.2f} s {run['peak_mb']:7.0f} MB", flush=True)
            runs[name].append(run)
    fields = ("seconds", "cpu_seconds", "peak_mb", "loaded_mb")
    return {name: Measured(*(statistics.median(r[f] for r in taken) for f in fields)) for name, taken in runs.items()}


def table(results: dict[str, dict[str, Measured]]) -> list[str]:
    """Markdown of the joins and the windows."""
    lines = [
        "| data | join | question | seconds | CPU s | peak MB | of which loaded |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for data, measured in results.items():
        for name, m in measured.items():
            question = "event time only"
            if name == "headway":
                question = "bitemporal latest"
            elif name == "headway-windows":
                question = "bitemporal windows: count, mean, std over 1, 7, 37 days"
            lines.append(
                f"| {data} | {name} | {question} | {m.seconds:.2f} | {m.cpu_seconds:.2f} | {m.peak_mb:.0f} "
                f"| {m.loaded_mb:.0f} |"
            )
    lines.append("")
    for data, measured in results.items():
        best_time = min(measured[n].seconds for n in JOINS[1:])
        best_peak = min(measured[n].peak_mb for n in JOINS[1:])
        lines.append(
            f"- {data}: {measured['headway'].seconds / best_time:.2f} of the best other time, "
            f"{measured['headway'].peak_mb / best_peak:.2f} of the best other peak memory (goal: at most 0.70 in both)."
        )
        least = min(measured[n].cpu_seconds for n in JOINS[1:])
        ratio = measured["headway"].cpu_seconds / least
        lines.append(f"  In CPU seconds, which other work on the machine disturbs less: {ratio:.2f}.")
    uniform, hot = results["uniform"]["headway"], results["hot"]["headway"]
    lines.append(
        f"- The hot key takes {hot.seconds / uniform.seconds:.2f} times as long as uniform keys (goal: at most 3), "
        f"{hot.cpu_seconds / uniform.cpu_seconds:.2f} times the CPU seconds."
    )
    return lines


def report(results: dict[str, dict[str, Measured]], scale: float, rounds: int) -> str:
    """The generated part of the page."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("duckdb", "polars", "pandas", "numpy", "numba"))
    head = [
        f"{int(LABELS * scale):,} labels, {int(ROWS * scale):,} rows, {int(KEYS * scale):,} keys, one year, rows in "
        f"random order, availability up to a day after the event, three float64 columns. Median of {rounds} rounds.",
        f"{processor()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, {versions}.",
        "",
    ]
    return "\n".join(head + table(results)) + "\n"


def version(name: str) -> str:
    """Installed version of a package."""
    from importlib.metadata import version as installed

    return installed(name)


def processor() -> str:
    """Name of the processor."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def write(page: Path, generated: str) -> None:
    """Replace the generated part of the page."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(START, 1)
    after = rest.split(END, 1)[1]
    page.write_text(f"{before}{START}\n\n{generated}\n{END}{after}", encoding="utf-8")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="size of the data, 1.0 is the full one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="folder that keeps the generated columns (default: a temporary one)")
    parser.add_argument("--docs", type=Path, help="page whose generated part is rewritten")
    parser.add_argument("--child", choices=sorted(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--generate", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.generate:
        generate(asked.generate, asked.scale)
        return
    if asked.child:
        child(asked.child, asked.data)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = (asked.data or Path(scratch)) / f"scale-{asked.scale:g}"
        # In a process of its own: a child starts with its parent's peak memory, and the data are generated once.
        again = [sys.executable, "-m", "benchmarks.bench_join", "--generate", str(folder), "--scale", str(asked.scale)]
        subprocess.run(again, check=True)
        results = {name: measure(JOINS, folder / name, asked.rounds) for name in ("uniform", "hot")}
        for name, measured in results.items():
            measured.update(measure(("headway-windows",), folder / name, 1))
    text = report(results, asked.scale, asked.rounds)
    print(text)
    if asked.docs:
        write(asked.docs, text)


if __name__ == "__main__":
    main()
