"""`python -m trainer.evaluate --plan plan.json --output DIR`: scores of a month's rows by every model in question.

The plan names the training run (`train`: spec, store_root, code_root), the Parquet files of the evaluated rows
(`rows`), the columns to copy (`keep`), the artifacts (`candidate`, and `logistic` if there is one), the columns of the
historical rate and the reference models. The reference models are fitted here on the training rows of the spec;
logistic regression is taken from its artifact when one is given. `DIR/scores.parquet` holds the kept columns, `label`
(0 and 1, null where the outcome is not known) and one probability column per model, one row per row of the files in
their order; `DIR/report.json` says how many rows, how long each part took, and how the reference models were made.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trainer.artifact import batch_logits, probabilities
from trainer.baselines import PRIOR_ROWS, RateColumn, boosting_scores, historical_rate, logistic_module
from trainer.command import TimedReport, plan_document, run_planned
from trainer.data import DataRefused, Dataset, Rows, Split, encode_rows, load_rows
from trainer.predictor import Predictor, input_columns, load_artifact
from trainer.spec import RunSpec, SpecRefused, parse_run

REFERENCE_MODELS = ("historical_rate", "logistic", "gradient_boosting")
ARTIFACTS = ("candidate", "logistic")


@dataclass(frozen=True)
class Plan:
    """What is evaluated; see the module."""

    spec: RunSpec
    store_root: Path
    code_root: Path
    rows: tuple[Path, ...]
    keep: tuple[str, ...]
    artifacts: Mapping[str, Path]
    historical_rate: tuple[RateColumn, ...]
    reference_models: tuple[str, ...]


@dataclass
class Report(TimedReport):
    """What `report.json` says: row counts, seconds per part, and notes on how it was made."""

    rows: int = 0
    labelled_rows: int = 0
    fit_rows: int = 0
    notes: list[str] = field(default_factory=list[str])


def evaluate(plan: Plan, output: Path) -> None:
    """Score the rows of `plan` by every model and write both files.

    Raises:
        ArtifactRefused, CodeRefused: an artifact cannot be used.
        DataRefused, EncodingRefused: rows cannot be read, or an input is missing.
    """
    report = Report()
    models = {name: load_artifact(folder, plan.code_root) for name, folder in plan.artifacts.items()}
    rows = _read_rows(plan)
    report.rows = rows.num_rows
    columns: dict[str, pa.Array | pa.ChunkedArray] = {name: rows.column(name) for name in plan.keep}
    label = _label(rows, plan.spec)
    report.labelled_rows = len(label) - label.null_count
    columns["label"] = label
    candidate = models["candidate"]
    columns["score_candidate"] = pa.array(report.timed("candidate", lambda: candidate.score(rows).probability))
    for name, scores in _reference_scores(plan, models, rows, report).items():
        columns[f"score_{name}"] = pa.array(scores)
    report.write(pa.table(columns), output)


def parse_plan(content: bytes) -> Plan:
    """Read a plan.

    Raises:
        SpecRefused: names the field and what is wrong with it.
    """
    names = {"train", "rows", "keep", "artifacts", "historical_rate", "reference_models"}
    plan = _object(plan_document(content), "plan", names)
    train = _object(plan["train"], "train", {"spec", "store_root", "code_root"})
    artifacts = {k: Path(v) for k, v in _mapping(plan["artifacts"], "artifacts").items() if v is not None}
    if "candidate" not in artifacts or set(artifacts) - set(ARTIFACTS):
        raise SpecRefused("artifacts", f"are {sorted(artifacts)}; candidate is needed, logistic may be given")
    models = _texts(plan["reference_models"], "reference_models")
    if set(models) - set(REFERENCE_MODELS):
        raise SpecRefused("reference_models", f"are {list(models)}; known are {list(REFERENCE_MODELS)}")
    rate = tuple(_rate_column(c, f"historical_rate[{i}]") for i, c in enumerate(plan["historical_rate"]))
    return Plan(
        spec=parse_run(json.dumps(train["spec"])),
        store_root=Path(train["store_root"]),
        code_root=Path(train["code_root"]),
        rows=tuple(Path(p) for p in _texts(plan["rows"], "rows")),
        keep=_texts(plan["keep"], "keep"),
        artifacts=artifacts,
        historical_rate=rate,
        reference_models=models,
    )


def _reference_scores(
    plan: Plan, models: Mapping[str, Predictor], rows: pa.Table, report: Report
) -> dict[str, NDArray[np.float64]]:
    if not plan.reference_models:
        return {}
    start = time.monotonic()
    inputs = models["candidate"].inputs
    learned = load_rows(plan.spec.rows, plan.store_root, lambda: None, [c.name for c in plan.historical_rate])
    dataset = encode_rows(learned, inputs, lambda: None)
    report.fit_rows = len(dataset.train)
    report.seconds["read"] = round(time.monotonic() - start, 3)
    report.notes.append(
        f"Reference models are fitted on the run's {len(dataset.train)} training rows, in the candidate's encoding; "
        f"its {len(dataset.valid)} validation rows stop gradient boosting, as they stopped the network."
    )
    asked = Split(*inputs.encode(rows), np.zeros(len(rows), np.float32), np.arange(len(rows), dtype=np.int64))
    makers: dict[str, Callable[[], NDArray[np.float64]]] = {
        "historical_rate": lambda: _historical(plan, learned, rows, report),
        "logistic": lambda: _logistic(models.get("logistic"), dataset, asked, rows, report),
        "gradient_boosting": lambda: _boosting(dataset, asked, plan.spec.seed, report),
    }
    return {name: report.timed(name, makers[name]) for name in plan.reference_models}


def _historical(plan: Plan, learned: Rows, rows: pa.Table, report: Report) -> NDArray[np.float64]:
    columns = ", ".join(c.name if c.width is None else f"{c.name} in bins of {c.width:g}" for c in plan.historical_rate)
    report.notes.append(
        f"historical_rate: rate of the training rows by {columns}, smoothed as if {PRIOR_ROWS} more rows of each "
        "combination had had the overall rate; a combination never seen gets the overall rate."
    )
    return historical_rate(learned.train, learned.train_target, rows, plan.historical_rate)


def _logistic(
    given: Predictor | None, dataset: Dataset, asked: Split, rows: pa.Table, report: Report
) -> NDArray[np.float64]:
    if given is not None:
        report.notes.append(f"logistic: the run's artifact {given.manifest.digest}.")
        return given.score(rows).probability
    report.notes.append("logistic: fitted here, with the same inputs as the candidate.")
    return probabilities(batch_logits(logistic_module(dataset, lambda: None)[0], asked))


def _boosting(dataset: Dataset, asked: Split, seed: int, report: Report) -> NDArray[np.float64]:
    scores, trees = boosting_scores(dataset, asked, seed)
    report.notes.append(f"gradient_boosting: scikit-learn, {trees} trees, missing values as such.")
    return scores


def _read_rows(plan: Plan) -> pa.Table:
    data = plan.spec.rows
    asked = [*plan.keep, *(c.name for c in plan.historical_rate), data.target, data.known_at]
    wanted = list(dict.fromkeys([*asked, *(c for path in plan.artifacts.values() for c in input_columns(path))]))
    tables: list[pa.Table] = []
    for path in plan.rows:
        try:
            with pq.ParquetFile(path) as file:
                lost = [c for c in wanted if c not in file.schema_arrow.names]
                if lost:
                    raise DataRefused(str(path), f"has no columns {lost}")
                tables.append(file.read(columns=wanted, use_threads=False))
        except (FileNotFoundError, pa.ArrowInvalid) as error:
            raise DataRefused(str(path), f"no Parquet file: {error}") from error
    if not tables:
        raise DataRefused("rows", "no file of rows to evaluate")
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowTypeError as error:
        raise DataRefused("rows", f"their columns have different types: {error}") from error


def _label(rows: pa.Table, spec: RunSpec) -> pa.Array:
    """The target as float64, null where it is null or was never known."""
    target = rows.column(spec.rows.target).cast(pa.float64()).to_numpy(zero_copy_only=False)
    unknown = rows.column(spec.rows.known_at).is_null().to_numpy() | np.isnan(target)
    wrong = target[~unknown & (target != 0) & (target != 1)]
    if len(wrong):
        raise DataRefused(f"column {spec.rows.target!r}", f"holds {float(wrong[0])!r}; a target is 0 or 1")
    return pa.array(target, mask=unknown)


def _rate_column(raw: object, place: str) -> RateColumn:
    if isinstance(raw, str):
        return RateColumn(raw)
    item = _object(raw, place, {"column", "width"})
    if not isinstance(item["column"], str) or not isinstance(item["width"], int | float) or item["width"] <= 0:
        raise SpecRefused(place, f"{raw!r:.80} needs a column and a positive width")
    return RateColumn(item["column"], float(item["width"]))


def _object(raw: object, place: str, names: set[str]) -> dict[str, Any]:
    document = _mapping(raw, place)
    if set(document) != names:
        raise SpecRefused(place, f"has fields {sorted(document)}, expected {sorted(names)}")
    return document


def _mapping(raw: object, place: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise SpecRefused(place, f"{raw!r:.80} is no object")
    return cast("dict[str, Any]", raw)


def _texts(raw: object, place: str) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(item, str) for item in cast("list[object]", raw)):
        raise SpecRefused(place, f"{raw!r:.80} is no list of texts")
    return tuple(cast("list[str]", raw))


def main() -> int:
    """Read the arguments and evaluate."""
    return run_planned(
        "trainer.evaluate", "Score rows by all models.", lambda plan, output: evaluate(parse_plan(plan), output)
    )


if __name__ == "__main__":
    sys.exit(main())
