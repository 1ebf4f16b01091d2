"""What the weekly stages share: which weeks a step may do, one result per week, and how they are reported.

A step over a range of weeks does them one by one: what one week cannot do never stops another.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dagster as dg

from assets.describe import MAX_INLINE_IMAGE_BYTES, guarded, table
from assets.runs import asked_partitions, report_partitions
from headway.errors import HeadwayError
from headway.loading import Pipeline
from headway.monitoring.windows import week_bounds
from headway.services import Services
from trainer.blobs import digest_json

if TYPE_CHECKING:
    from headway.artifacts.store import LocalStore

NO_PREDICTIONS = "no_predictions"

# A week follows whatever of it was updated above, by itself; never merely because it is missing.
FOLLOWS = (
    dg.AutomationCondition.any_deps_updated().since_last_handled()
    & ~dg.AutomationCondition.any_deps_in_progress()
    & ~dg.AutomationCondition.in_progress()
    & dg.AutomationCondition.all_deps_blocking_checks_passed()
)


class WeekNotBegun(HeadwayError):
    """A week that still lies ahead in the world's time."""


@dataclass(frozen=True)
class Week:
    """One week of an endpoint: [start, end) and now, microseconds UTC of the world. `so_far`: it is not over yet."""

    key: str
    endpoint_id: str
    start: int
    end: int
    now: int

    @property
    def so_far(self) -> bool:
        """Whether more may still come."""
        return self.now < self.end


@dataclass(frozen=True)
class WeekResult:
    """What a stage made of a week: `status` in a word, the digest of what it stored, and what the page shows.

    `row` is its line in the table of a range; `found` holds what the stage's checks look at.
    """

    week: str
    status: str
    reason: str
    digest: str
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    row: Mapping[str, object] = field(default_factory=dict[str, object])
    found: Any = None
    error: Exception | None = None


def do_weeks(
    context: dg.AssetExecutionContext,
    services: Services,
    pipeline: Pipeline,
    work: Callable[[Week], WeekResult],
) -> list[WeekResult]:
    """Do the step's weeks in order; a week that fails becomes a result with its error.

    Without anything promoted, or without an answer in the week, there is nothing to do, which is a result too.
    """
    now = services.world()
    promoted = _is_promoted(services, pipeline.name)
    results: list[WeekResult] = []
    for key in asked_partitions(context) or []:
        start, end = week_bounds(key)
        week = Week(key, pipeline.name, start, end, now)
        result = _one(week, work, promoted=promoted)
        results.append(result)
        context.log.info(f"{key} {result.status}" + (f": {result.reason}" if result.reason else ""))
    return results


def nothing(week: Week, reason: str = "nothing was asked in this week") -> WeekResult:
    """The result of a week in which nothing was answered."""
    digest = digest_json([NO_PREDICTIONS, week.endpoint_id, week.key])
    facts: dict[str, Any] = {"status": NO_PREDICTIONS, "reason": reason, "endpoint": week.endpoint_id}
    return WeekResult(week.key, NO_PREDICTIONS, reason, digest, facts, {"week": week.key, "status": NO_PREDICTIONS})


def told(status: str, reason: str) -> dict[str, str]:
    """The first lines of the page: what became of the week, and why where there is something to say."""
    return {"status": status, **({"reason": reason} if reason else {})}


def numbers(metrics: Mapping[str, float | int | None]) -> dict[str, float | int]:
    """Metrics as the page shows them: five digits of a fraction, and what is not known is left out."""
    return {n: round(v, 5) if isinstance(v, float) else v for n, v in metrics.items() if v is not None}


def week_table(results: Sequence[WeekResult]) -> dict[str, dg.TableMetadataValue]:
    """One line per week of the step; weeks without answers have empty cells."""
    columns = dict.fromkeys(name for result in results for name in result.row)
    return table("table_by_week", [{name: result.row.get(name) for name in columns} for result in results])


def stored_plots(store: "LocalStore", plots: Mapping[str, bytes], *, inline: bool) -> dict[str, Any]:
    """Where each plot (PNG by name) lies in the store; the first one shown on the page too, if it is small."""
    found: dict[str, Any] = {}
    for place, (name, image) in enumerate(plots.items()):
        blob = store.put_bytes(image, "image/png")
        found[f"plot/{name}"] = dg.MetadataValue.path(store.read_path(blob.digest))
        if inline and place == 0 and len(image) <= MAX_INLINE_IMAGE_BYTES:
            encoded = base64.b64encode(image).decode()
            found["plot"] = dg.MetadataValue.md(f"![{name}](data:image/png;base64,{encoded})")
    return found


def report_weeks(context: dg.AssetExecutionContext, key: dg.AssetKey, results: Sequence[WeekResult]) -> dg.DataVersion:
    """Report every week that was done, and give the data version of all; ends the step when a week was not done.

    Raises:
        dg.Failure: names the weeks that failed and why; the others are reported before.
    """
    failed = [r for r in results if r.error is not None]
    if failed:
        for result in results:
            if result.error is None:
                shown = guarded(result.metadata)
                context.log_event(dg.AssetMaterialization(key, partition=result.week, metadata=shown))
        told = "; ".join(f"{r.week}: {r.reason}" for r in failed[:10])
        raise dg.Failure(f"{len(failed)} of {len(results)} weeks not done: {told}", allow_retries=False) from (
            failed[0].error
        )
    report_partitions(context, key, {r.week: guarded(r.metadata) for r in results})
    digests = [r.digest for r in results]
    return dg.DataVersion(digests[0] if len(digests) == 1 else digest_json(digests))


def _one(week: Week, work: Callable[[Week], WeekResult], *, promoted: bool) -> WeekResult:
    try:
        if week.start > week.now:
            raise _not_begun(week)
        return work(week) if promoted else nothing(week, f"nothing was promoted to endpoint {week.endpoint_id} yet")
    except Exception as error:  # noqa: BLE001 - kept in the result, and the step fails with it after the other weeks
        told = str(error) if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"
        return WeekResult(week.key, "failed", told, "", error=error)


def _not_begun(week: Week) -> WeekNotBegun:
    from headway.datasets.zones import iso

    return WeekNotBegun(
        f"the week of {week.key} begins at {iso(week.start)}, and it is {iso(week.now)} in the world",
        "ask for it when it has begun",
    )


def _is_promoted(services: Services, endpoint_id: str) -> bool:
    endpoint = services.catalog.endpoint(services.principal, endpoint_id)
    return endpoint is not None and endpoint.stable is not None
