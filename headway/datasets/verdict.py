"""The verdict on one partition: released or quarantined, which rows are kept back, and the evidence for it.

Row-level faults (failing rows of critical rules, row checks, rejected rows) are weighed against the declared budget.
Critical faults of the whole (a rule about the table, a rule that could not be evaluated, nothing evaluated, lost
identities) quarantine the version whatever the budget.
"""

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headway.datasets.quality import Evaluation
from headway.datasets.refusal import RejectedRow, counts_by_code
from headway.datasets.suites import Suite
from headway.declaration import SourceSpec
from trainer.blobs import Json, digest_json

REPORT_FORMAT = "headway.validation/1"
POSITION, REASON = "_position", "_reason"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`quarantined` maps a reason to row positions; `report` is the stored evidence and holds no value of the data."""

    is_released: bool
    reason: str
    quarantined: dict[str, NDArray[np.int64]]
    evaluation: Evaluation
    report: dict[str, Json]

    @property
    def quarantined_rows(self) -> int:
        """How many rows are kept back."""
        return len(_distinct(self.quarantined))


def rules_digest(suite: Suite, spec: SourceSpec, rejected: Sequence[RejectedRow]) -> str:
    """What a verdict depends on besides the content: suite, budgets, and what was rejected on reading."""
    return rules_digest_of(suite, spec, dict(counts_by_code(rejected)))


def rules_digest_of(suite: Suite, spec: SourceSpec, rejected: Json) -> str:
    """As `rules_digest`, with the rejected rows given as counts by code."""
    quality: dict[str, Json] = spec.quality.model_dump(mode="json", exclude={"suite", "max_quarantined_partitions"})
    return digest_json({"format": REPORT_FORMAT, "suite": suite.digest, "quality": quality, "rejected": rejected})


def judge(
    spec: SourceSpec,
    suite: Suite,
    evaluation: Evaluation,
    faults: dict[str, NDArray[np.int64]],
    rejected: Sequence[RejectedRow],
    rows: int,
    exact_duplicates: int,
    identity_loss: float | None,
) -> Verdict:
    """Weigh everything that was found on one partition of `rows` rows."""
    quarantined = dict(faults)
    for result in evaluation.results:
        if result.is_about_rows and result.severity == "critical" and result.evaluated and not result.passed:
            quarantined[f"rule {result.number} {result.type}"] = evaluation.failing[result.number]
    bad = len(_distinct(quarantined)) + len({(r.file, r.row) for r in rejected})
    total = rows + len({(r.file, r.row) for r in rejected})
    problems = _problems_of_the_whole(evaluation)
    limit = spec.quality.max_identity_loss
    if identity_loss is not None and limit is not None and identity_loss > limit:
        problems.append(f"identity_loss: {identity_loss:.1%} of the known row identities are gone (limit {limit:.1%})")
    share = bad / total if total else 0.0
    budget = spec.quality.max_quarantined_share
    counts = {reason: len(p) for reason, p in quarantined.items()} | counts_by_code(rejected)
    if share > budget:
        listed = ", ".join(f"{reason} {count}" for reason, count in counts.items())
        problems.append(f"{bad} of {total} rows fail (limit {budget:.1%}): {listed}")
    reason = "; ".join(problems) or (f"{bad} of {total} rows kept back" if bad else "all rules held")
    report: dict[str, Json] = {
        "format": REPORT_FORMAT,
        "suite": {"name": suite.name, "file": suite.file, "digest": suite.digest},
        "verdict": "quarantined" if problems else "released",
        "reason": reason,
        "declared": evaluation.declared,
        "evaluated": evaluation.evaluated,
        "failed": evaluation.failed,
        "rows": rows,
        "quarantined": {reason: len(p) for reason, p in quarantined.items()},
        "rejected": counts_by_code(rejected),
        "exact_duplicates": exact_duplicates,
        "identity_loss": identity_loss,
        "budget": budget,
        "expectations": [{**asdict(r), "columns": list(r.columns)} for r in evaluation.results],
    }
    return Verdict(not problems, reason, quarantined, evaluation, report)


def quarantine_table(
    table: pa.Table, spec: SourceSpec, quarantined: dict[str, NDArray[np.int64]], rejected: Sequence[RejectedRow]
) -> bytes | None:
    """The quarantine as Parquet, or None when nothing is kept back.

    One line per row and reason: `_position` in the stored rows with its row identity, or, for a row that was rejected
    on reading, `_file`, `_row` and `_column`; always `_reason`. No other value of the row is in it.
    """
    if not quarantined and not rejected:
        return None
    pairs = [(int(position), reason) for reason, positions in quarantined.items() for position in positions]
    pairs.sort()
    where = pa.array([p for p, _ in pairs], type=pa.int64())
    lost = len(rejected)
    columns: dict[str, pa.Array] = {
        POSITION: pa.concat_arrays([where, pa.nulls(lost, pa.int64())]),
        REASON: pa.array([r for _, r in pairs] + [r.code for r in rejected], type=pa.string()),
        "_file": pa.array([None] * len(pairs) + [r.file for r in rejected], type=pa.string()),
        "_row": pa.array([None] * len(pairs) + [r.row for r in rejected], type=pa.int64()),
        "_column": pa.array([None] * len(pairs) + [r.column for r in rejected], type=pa.string()),
    }
    for name in (n for n in spec.row_id if n in table.column_names):
        kind = table.schema.field(name).type
        ids = table.column(name).take(where).combine_chunks()
        ids = ids if isinstance(ids, pa.Array) else pa.concat_arrays(ids.chunks)
        columns[name] = pa.concat_arrays([ids, pa.nulls(lost, kind)])
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="zstd")
    return buffer.getvalue()


def _problems_of_the_whole(evaluation: Evaluation) -> list[str]:
    problems: list[str] = []
    if evaluation.evaluated == 0:
        problems.append(f"none of {evaluation.declared} declared expectations was evaluated")
    for result in evaluation.results:
        if result.severity != "critical" or result.passed:
            continue
        if not result.evaluated or not result.is_about_rows:
            named = f" on {', '.join(result.columns)}" if result.columns else ""
            problems.append(f"rule {result.number} {result.type}{named}: {result.why}")
    return problems


def _distinct(quarantined: dict[str, NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.unique(np.concatenate(list(quarantined.values()))) if quarantined else np.zeros(0, dtype=np.int64)
