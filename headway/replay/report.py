"""The report of a replay: what was asked and answered, what was noticed, what was retrained, and what it gave."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.catalog.clock import utc_text
from headway.catalog.monitoring_facts import Report, RetrainRequest
from headway.datasets.zones import HOUR_US
from headway.registry.metrics import Interval
from headway.replay.compare import AnsweredRows, Compared
from headway.replay.feed import Disturbance, FeedCount
from headway.services import Services

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (8.0, 3.2)


@dataclass(frozen=True)
class Replay:
    """What a replay did: its span (microseconds UTC), the feed's counts, and the strategies on the same rows.

    `compared[0]` is what Headway did; `gaps` holds its AUC less each other strategy's, with the paired interval.
    """

    pipeline: str
    start: int
    end: int
    per_day: int
    seconds: float
    count: FeedCount
    disturbances: Sequence[Disturbance]
    rows: AnsweredRows
    compared: Sequence[Compared]
    gaps: Mapping[str, Interval | None]


def write_report(folder: Path, services: Services, replay: Replay) -> Path:
    """Write `report.md` and its plots into `folder`, and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    catalog, principal = services.catalog, services.principal
    weeks = {kind: catalog.reports(principal, replay.pipeline, kind=kind) for kind in ("drift", "quality", "labels")}
    requests = catalog.retrain_requests(principal, replay.pipeline)
    sections = [
        _head(replay),
        _requests(replay),
        _labels(services, replay),
        _quality(replay),
        _alarms(weeks["drift"], replay),
        _retrains(services, replay, requests),
        _strategies(replay),
    ]
    _plot(folder / "quality.png", lambda axes: _draw_quality(axes, replay))
    _plot(folder / "alarms.png", lambda axes: _draw_alarms(axes, weeks["drift"]))
    file = folder / "report.md"
    file.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return file


def _head(replay: Replay) -> str:
    days = (replay.end - replay.start) / (24 * HOUR_US)
    return (
        f"# {replay.pipeline}: {_day(replay.start)} to {_day(replay.end)}, replayed\n\n"
        f"{days:.0f} days in {replay.seconds / 60:.1f} minutes: {replay.count.requests:,} requests over HTTP, "
        f"{replay.per_day} sampled events a day, each asked at its time on a clock that the replay moved."
    )


def _requests(replay: Replay) -> str:
    count = replay.count
    answered = count.answers[200]
    rows = [
        ("requests", f"{count.requests:,}"),
        ("answered", f"{answered:,}"),
        ("availability", _share(answered, count.requests)),
        ("sent a second time (503 or 504 at first)", f"{count.retried:,}"),
        *((f"refused: {code}", f"{n:,}") for code, n in count.refused.most_common()),
        *((f"answered degraded: {code}", f"{n:,}") for code, n in count.degraded.most_common()),
    ]
    went_wrong = "\n".join(f"- {d.name}: {utc_text(d.start)} to {utc_text(d.end)}" for d in replay.disturbances)
    return f"## Requests\n\n{_table(('', ''), rows)}\n\nWhat went wrong on purpose:\n\n{went_wrong or '- nothing'}"


def _labels(services: Services, replay: Replay) -> str:
    principal, catalog = services.principal, services.catalog
    total = catalog.prediction_count(principal, replay.pipeline, replay.start, replay.end)
    joined = catalog.labels_between(principal, replay.pipeline, replay.start, replay.end)
    ids = [prediction_id for prediction_id, _ in joined]
    found = catalog.predictions_by_id(principal, ids).values()
    asked = {p.prediction_id: p.asked_at for p in found if p.asked_at is not None}
    hours = [(label.received_at - asked[i]) / HOUR_US for i, label in joined if i in asked]
    inbox = catalog.label_inbox(principal, replay.pipeline)
    quantiles = np.quantile(hours, [0.5, 0.9, 0.99]) if hours else [float("nan")] * 3
    rows = [
        ("answers with a label", f"{len(set(ids)):,} of {total:,} ({_share(len(set(ids)), total)})"),
        ("hours from request to label, median / 90 % / 99 %", " / ".join(f"{q:.1f}" for q in quantiles)),
        ("waiting in the inbox", f"{len(inbox):,}"),
        *((f"reports {status}", f"{n:,}") for status, n in replay.count.labels.most_common()),
    ]
    return f"## Labels\n\n{_table(('', ''), rows)}\n\nCancelled and diverted flights never get one."


def _quality(replay: Replay) -> str:
    months = replay.compared[0].months
    rows = [
        (m, f"{q.rows:,}", f"{q.rate:.3f}", _number(q.auc), _number(q.log_loss), _number(q.calibration_error))
        for m, q in months.items()
    ]
    head = ("month", "labelled answers", "late rate", "AUC", "log loss", "calibration error")
    return f"## Quality by month, as answered\n\n{_table(head, rows)}\n\n![quality](quality.png)"


def _alarms(reports: Sequence[Report], replay: Replay) -> str:
    rows = [
        (r.window, "" if r.model_version is None else f"@{r.model_version}", r.verdict, r.reason or "")
        for r in reports
        if r.verdict not in ("none", "too_few")
    ]
    quiet = sum(r.verdict in ("none", "too_few") for r in reports)
    table = _table(("week", "version", "verdict", "cause"), rows) if rows else "none"
    return f"## Alarms\n\n{quiet} quiet weeks of {len(reports)}.\n\n{table}\n\n![alarms](alarms.png)"


def _retrains(services: Services, replay: Replay, requests: Sequence[RetrainRequest]) -> str:
    rows = [
        (
            utc_text(r.facts.made_at)[:16],
            r.facts.cause,
            r.facts.reason or "",
            r.as_of or "",
            _number(r.facts.expected_gain),
            "" if r.cost_seconds is None else f"{r.cost_seconds:.0f}",
            r.state,
            r.reason,
        )
        for r in requests
    ]
    head = ("asked", "cause", "evidence", "as of", "expected gain (AUC)", "worker s", "outcome", "why")
    decisions = services.catalog.decisions(services.principal, replay.pipeline)
    told = [(utc_text(d.made_at)[:16], d.decision, d.reason or "") for d in sorted(decisions, key=lambda d: d.seq)]
    budgets = _budgets(services, requests)
    return (
        f"## Retraining\n\n{_table(head, rows) if rows else 'No request.'}\n\n"
        f"### Budget\n\n{budgets}\n\n"
        f"### What the sensor decided, and why\n\n{_table(('when', 'decision', 'reason'), told) if told else 'nothing'}"
    )


def _budgets(services: Services, requests: Sequence[RetrainRequest]) -> str:
    found: list[tuple[str, ...]] = []
    for budget_id, period in dict.fromkeys((r.facts.budget_id, r.facts.period) for r in requests):
        state = services.catalog.budget(services.principal, budget_id, period)
        if state is not None:
            found.append((budget_id, period, f"{state.limit}", f"{state.reserved}", f"{state.committed}"))
    return _table(("budget", "month", "limit (s)", "reserved", "spent"), found) if found else "nothing was reserved"


def _strategies(replay: Replay) -> str:
    rows: list[tuple[str, ...]] = []
    for compared in replay.compared:
        whole, strategy = compared.whole, compared.strategy
        gap = replay.gaps.get(strategy.name)
        rows.append(
            (
                strategy.name,
                ", ".join(f"@{t.version.version} from {_day(t.start)}" for t in strategy.turns),
                f"{strategy.trainings}",
                f"{strategy.worker_seconds:.0f}",
                "" if whole is None else _number(whole.auc),
                "" if whole is None else _number(whole.log_loss),
                "" if gap is None else f"{gap.value:+.4f} [{_number(gap.lower)}, {_number(gap.upper)}]",
            )
        )
    head = ("habit", "versions", "trainings", "worker s", "AUC", "log loss", "AUC of the first row less this")
    months = sorted({m for c in replay.compared for m in c.months})
    by_month = [
        (m, *(_number(q.auc) if (q := c.months.get(m)) is not None else "" for c in replay.compared)) for m in months
    ]
    names = ("month", *(c.strategy.name for c in replay.compared))
    return (
        "## Beside other habits, on the same rows\n\n"
        "Every version scored the very feature values that the server logged. Intervals are paired, over days.\n\n"
        f"{_table(head, rows)}\n\nAUC by month:\n\n{_table(names, by_month)}"
    )


def _draw_quality(axes: Axes, replay: Replay) -> None:
    for compared in replay.compared:
        known = {m: q.auc for m, q in compared.months.items() if q.auc is not None}
        axes.plot(list(known), list(known.values()), marker="o", label=compared.strategy.name)
    rates = {m: q.rate for m, q in replay.compared[0].months.items()}
    beside = axes.twinx()
    beside.bar(list(rates), list(rates.values()), color="0.85", zorder=0)
    beside.set_ylabel("late rate")
    axes.set_zorder(beside.get_zorder() + 1)
    axes.patch.set_visible(False)
    axes.set_ylabel("AUC")
    axes.legend(frameon=False, fontsize=8)


def _draw_alarms(axes: Axes, reports: Sequence[Report]) -> None:
    colours = {"none": "0.8", "too_few": "0.9", "season": "tab:blue", "data_incident": "tab:orange", "drift": "tab:red"}
    weeks = list(dict.fromkeys(r.window for r in reports))
    for verdict in dict.fromkeys(r.verdict for r in reports):
        mine = [weeks.index(r.window) for r in reports if r.verdict == verdict]
        axes.bar(mine, [1.0] * len(mine), color=colours.get(verdict, "tab:purple"), label=verdict)
    axes.set_yticks([])
    axes.set_xticks(range(len(weeks)), weeks, rotation=60, fontsize=7)
    if weeks:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _plot(file: Path, draw: Callable[[Any], None]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure.add_subplot())
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    file.write_bytes(image.getvalue())


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "no requests"


def _day(moment: int) -> str:
    return utc_text(moment)[:10]
