"""Two or more runs side by side: in what they differ (configuration, data, code, environment), and what came of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.artifacts.errors import StoreError
from headway.artifacts.manifest import read_manifest
from headway.errors import HeadwayError
from headway.services import Services
from headway.training.curves import MOST_RUNS
from headway.training.measured import Measured, measured
from trainer.blobs import InvalidManifest, Json

if TYPE_CHECKING:
    from headway.catalog.run_facts import TrainingRun

_MOST_POINTS = 500


class TooManyRuns(HeadwayError):
    """Fewer than two runs, the same one twice, or more than one plot shows."""


@dataclass(frozen=True)
class Line:
    """One thing by its name, with what each run has there; None where it has nothing."""

    name: str
    values: tuple[Json, ...]

    @property
    def differs(self) -> bool:
        """Whether not all runs have the same there."""
        return any(value != self.values[0] for value in self.values)


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. `config`, `data`, `code` and `environment` hold only what differs.

    `results` are status, cost, metrics and speeds, all of them; `measured` by run in the order asked for. `unknown`
    says what could not be looked into, and why.
    """

    runs: tuple[TrainingRun, ...]
    config: tuple[Line, ...]
    data: tuple[Line, ...]
    code: tuple[Line, ...]
    environment: tuple[Line, ...]
    results: tuple[Line, ...]
    measured: tuple[Measured, ...]
    unknown: tuple[str, ...]

    def to_json(self) -> dict[str, Json]:
        """As one document, with at most 500 points of each curve."""
        parts = ("config", "data", "code", "environment", "results")
        return {
            "runs": [run.run_id for run in self.runs],
            **{part: {line.name: list(line.values) for line in getattr(self, part)} for part in parts},
            "curves": [_curve(found) for found in self.measured],
            "unknown": list(self.unknown),
        }


def compare(services: Services, runs: Sequence[TrainingRun]) -> Comparison:
    """Compare runs.

    Raises:
        TooManyRuns: fewer than two, one twice, or more than a plot shows.
    """
    if not 2 <= len(runs) <= MOST_RUNS or len({run.run_id for run in runs}) < len(runs):
        raise TooManyRuns(
            f"{len(runs)} runs, {len({run.run_id for run in runs})} of them different",
            f"name 2 to {MOST_RUNS} different runs",
        )
    unknown: list[str] = []
    found = tuple(measured(services, run) for run in runs)
    specs = [_document(services, run, unknown) for run in runs]
    return Comparison(
        runs=tuple(runs),
        config=_differing([_config(spec) for spec in specs]),
        data=_differing([_data(services, run) for run in runs]),
        code=_code(services, runs, specs, unknown),
        environment=_differing([_environment(services, run, unknown) for run in runs]),
        results=_side_by_side([_results(run, m) for run, m in zip(runs, found, strict=True)]),
        measured=found,
        unknown=tuple(dict.fromkeys(unknown)),
    )


def _side_by_side(documents: Sequence[Mapping[str, Json]]) -> tuple[Line, ...]:
    names = dict.fromkeys(name for document in documents for name in document)
    return tuple(Line(name, tuple(document.get(name) for document in documents)) for name in names)


def _differing(documents: Sequence[Mapping[str, Json]]) -> tuple[Line, ...]:
    return tuple(line for line in _side_by_side(documents) if line.differs)


def _document(services: Services, run: TrainingRun, unknown: list[str]) -> dict[str, Any]:
    """The run spec as it is stored; a field that it does not name has its default."""
    try:
        return dict(json.loads(services.store.get_bytes(run.facts.spec_digest)))
    except StoreError as error:
        unknown.append(f"configuration of {run.run_id}: {error}")
        return {}


def _config(spec: Mapping[str, Any]) -> dict[str, Json]:
    """The fields of a run spec by their paths, without what data and code say better."""
    kept = {name: value for name, value in spec.items() if name not in ("data", "model")}
    model = {name: spec.get("model", {}).get(name) for name in ("file", "function", "options")}
    data = {name: value for name, value in spec.get("data", {}).items() if name != "files"}
    return _flat({**kept, "model": model, "data": data})


def _flat(document: Mapping[str, Any], above: str = "") -> dict[str, Json]:
    flat: dict[str, Json] = {}
    for name, value in document.items():
        path = f"{above}{name}"
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{path}.")
        else:
            flat[path] = value
    return flat


def _data(services: Services, run: TrainingRun) -> dict[str, Json]:
    """Snapshots by partition, and the versions of the datasets below them."""
    catalog, principal = services.catalog, services.principal
    snapshots = [catalog.snapshot(principal, snapshot_id) for snapshot_id in run.facts.inputs]
    told: dict[str, Json] = {f"snapshot {s.partition or 'whole'}": s.snapshot_id for s in snapshots}
    told |= {"snapshots": len(snapshots), "rows": sum(s.rows for s in snapshots)}
    told |= {f"dataset {name} version {number}": content for name, number, content in run.facts.datasets}
    return told


def _code(
    services: Services, runs: Sequence[TrainingRun], specs: Sequence[Mapping[str, Any]], unknown: list[str]
) -> tuple[Line, ...]:
    """Digests of the code, and the files that differ."""
    if len({run.facts.code_digest for run in runs}) == 1 and len({run.facts.code_dirty for run in runs}) == 1:
        return ()
    documents: list[dict[str, Json]] = []
    for run, spec in zip(runs, specs, strict=True):
        told: dict[str, Json] = {"code_digest": run.facts.code_digest, "code_dirty": run.facts.code_dirty}
        manifest = spec.get("model", {}).get("code_manifest", "")
        try:
            told |= {entry.name: entry.sha256 for entry in read_manifest(services.store, manifest).entries}
        except (StoreError, InvalidManifest) as error:
            unknown.append(f"files of the code of {run.run_id}: {error}")
        documents.append(told)
    return _differing(documents)


def _environment(services: Services, run: TrainingRun, unknown: list[str]) -> dict[str, Json]:
    """The digest, and what it was made of where that was stored."""
    digest = run.facts.environment_digest
    told: dict[str, Json] = {"environment_digest": digest}
    if services.store.stat(digest) is None:
        unknown.append(f"environment of {run.run_id}: only its digest is known")
        return told
    return told | _flat(json.loads(services.store.get_bytes(digest)))


def _results(run: TrainingRun, found: Measured) -> dict[str, Json]:
    points = found.ordered
    told: dict[str, Json] = {
        "status": run.status,
        "attempts": len(run.attempts),
        "worker_seconds": run.worker_seconds,
        "nodes": ", ".join(str(attempt.layout.get("nodes")) for attempt in run.attempts),
        "seed": run.facts.seed,
    }
    if run.result is not None:
        told |= {f"metric {name}": value for name, value in run.result.metrics.items()}
        told["best_step"] = run.result.best_step
    if points:
        told |= {
            "last step": points[-1].step,
            "step_seconds": _middle(points, lambda p: p.step_s),
            f"{points[-1].unit}_per_second": _middle(points, lambda p: p.rate),
            "mfu": _middle(points, lambda p: p.mfu),
        }
        told |= {f"seconds {part}": round(seconds, 6) for part, seconds in found.split().items()}
    peak = max((int(rank["peak_bytes"]) for rank in found.ranks), default=None)
    return told | ({} if peak is None else {"peak_memory_mb": round(peak / 1e6, 1)})


def _middle(points: Sequence[Any], value: Callable[[Any], float]) -> float | None:
    kept = sorted(v for p in points if math.isfinite(v := value(p)))
    return kept[len(kept) // 2] if kept else None


def _curve(found: Measured) -> dict[str, Json]:
    """Every point of a short curve, of a long one as many as fit, at equal distances, the last one among them."""
    points = found.ordered
    every = -(-len(points) // _MOST_POINTS) or 1
    kept = points[::-1][::every][::-1]

    def of(value: Callable[[Any], float]) -> list[Json]:
        return [v if math.isfinite(v := value(point)) else None for point in kept]

    return {
        "step": [point.step for point in kept],
        "loss": of(lambda p: p.loss),
        "grad_norm": of(lambda p: p.grad_norm),
        "lr": of(lambda p: p.lr),
        "per_second": of(lambda p: p.rate),
        "validation": {str(step): loss for step, loss in found.judged.items() if math.isfinite(loss)},
    }
