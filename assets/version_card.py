"""How a model version looks on Dagster's page: its card in Markdown, numbers that Dagster draws, small plots."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import dagster as dg

from assets.describe import interval_plot, reliability_plot, stored_plot
from headway.catalog.registry_facts import ModelVersion
from headway.services import Services
from trainer.blobs import Json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_BINS = 10
_MOST_SEGMENTS = 24
_METRICS = {"auc": "AUC", "log_loss": "log loss", "calibration_error": "calibration error"}


def version_facts(services: Services, version: ModelVersion) -> dict[str, Any]:
    """Where the version stands, its card, its evaluation's numbers as floats (drawn over versions), and two plots.

    Calibration and AUC by segment lie in the store as PNG; a version whose evaluation has neither shows neither.
    """
    from headway.registry.card import card

    document = card(services, version)
    rows = _maps(document.get("metrics"))
    candidate = next((row for row in rows if row.get("model") == "candidate"), {})
    facts: dict[str, Any] = {
        "standing": str(document["standing"]),
        "card": dg.MetadataValue.md(card_markdown(document)),
    }
    for name in _METRICS:
        value = candidate.get(name)
        if isinstance(value, int | float):
            facts[f"metric/{name}"] = float(value)
    return facts | _plots(services, version)


def card_markdown(document: Mapping[str, Json]) -> str:
    """The card of `headway.registry.card.card` as Markdown: standing, models side by side, gates, where it is from."""
    lines = [
        f"### {document['model']}@{document['version']}: {document['standing']}",
        f"{document['kind']}, as of {document['as_of']}" if document["as_of"] else str(document["kind"]),
    ]
    rows = _maps(document.get("metrics"))
    known = [name for name in _METRICS if any(name in row for row in rows)]
    if known:
        lines.append(_table(["model", *(_METRICS[n] for n in known)], [_model_cells(row, known) for row in rows]))
    gates = _maps(document.get("gates"))
    if gates:
        cells = [[str(g["gate"]), str(g["verdict"]), str(g["reason"])] for g in gates]
        lines.append(_table(["gate", "verdict", "reason"], cells))
    lineage = cast("Mapping[str, Json]", document["lineage"])
    dirty = ", with uncommitted changes" if lineage.get("code_dirty") else ""
    lines.append(
        f"From run `{lineage['run_id']}`: {lineage['snapshots']} snapshots over {lineage['dataset_versions']} dataset "
        f"versions, seed {lineage['seed']}{dirty}. "
        f"`headway models show {document['model']}@{document['version']}` tells the same."
    )
    return "\n\n".join(lines)


def _model_cells(row: Mapping[str, Json], metrics: Sequence[str]) -> list[str]:
    return [str(row.get("model", "")), *(_number(row, name) for name in metrics)]


def _number(row: Mapping[str, Json], name: str) -> str:
    value, lower, upper = (row.get(f"{name}{end}") for end in ("", "_lower", "_upper"))
    if not isinstance(value, int | float):
        return "undefined"
    known = isinstance(lower, int | float) and isinstance(upper, int | float)
    return f"{value:.4f} [{lower:.4f}, {upper:.4f}]" if known else f"{value:.4f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + " --- |" * len(head), *lines[1:]])


def _plots(services: Services, version: ModelVersion) -> dict[str, Any]:
    from headway.registry.judge import evaluation_report

    report = evaluation_report(services, version)
    if report is None or not isinstance(report.get("segments"), Mapping):
        return {}
    facts: dict[str, Any] = {}
    segments = segment_rows(cast("Mapping[str, Json]", report["segments"]))
    if segments:
        facts["plot/auc_by_segment"] = stored_plot(services.store, interval_plot("AUC by segment", segments))
    scores, labels = _scored(services.store.get_bytes(str(report["scores_digest"])))
    predicted, observed = reliability(scores, labels)
    if len(predicted):
        image = reliability_plot("Calibration on the month after as_of", predicted, observed)
        facts["plot/calibration"] = stored_plot(services.store, image)
    return facts


def segment_rows(segments: Mapping[str, Json]) -> list[tuple[str, float, float, float]]:
    """(segment, AUC, lower, upper) of the candidate, the largest segments first; those without an AUC are left out."""
    found: list[tuple[int, tuple[str, float, float, float]]] = []
    for column, values in segments.items():
        for value, said in cast("Mapping[str, Mapping[str, Any]]", values).items():
            area = ((said.get("metrics") or {}).get("candidate") or {}).get("auc") or {}
            numbers = [n for end in ("value", "lower", "upper") if isinstance(n := area.get(end), int | float)]
            if len(numbers) == 3:
                found.append((int(said["rows"]), (f"{column}={value}", numbers[0], numbers[1], numbers[2])))
    return [row for _, row in sorted(found, key=lambda item: -item[0])[:_MOST_SEGMENTS]]


def reliability(scores: NDArray[np.float64], labels: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    """Mean score and share of positives in ten bins with equally many rows, by score; rows of one score stay together.

    The picture behind the calibration error of `headway.registry.metrics`.
    """
    import numpy as np

    unique, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    if not len(unique):
        return [], []
    middle = np.cumsum(count) - count / 2
    of_score = np.minimum((middle / len(scores) * _BINS).astype(np.int64), _BINS - 1)
    bins = of_score[place]
    rows = np.bincount(bins, minlength=_BINS)
    kept = rows > 0
    predicted = np.bincount(bins, scores, _BINS)[kept] / rows[kept]
    observed = np.bincount(bins, labels, _BINS)[kept] / rows[kept]
    return predicted.tolist(), observed.tolist()


def _scored(parquet: bytes) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Finite scores of the candidate and their labels, of an evaluation's rows."""
    import numpy as np
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(parquet), columns=["score_candidate", "label"])
    scores, labels = (table.column(n).to_numpy().astype(np.float64) for n in ("score_candidate", "label"))
    kept = np.isfinite(scores) & np.isfinite(labels)
    return scores[kept], labels[kept]


def _maps(value: Json | None) -> list[Mapping[str, Json]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
