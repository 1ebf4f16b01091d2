"""Which partitions a training run learns from, and which it is evaluated on.

An `as_of` partition is a month of the label source's calendar: training ends where it starts, and the month itself is
what the trained model has never seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from headway.datasets.partitions import PartitionScheme
from headway.declaration import AsOfSpec, PartitionSpec, PipelineSpec, TrainingSpec, duration_us
from headway.errors import HeadwayError

WHOLE = ""
"""The one partition of what has no partitions, as of an unpartitioned source."""


class NoTraining(HeadwayError):
    """The pipeline declares no training."""


class WindowEmpty(HeadwayError):
    """No snapshot partition lies before the asked `as_of`."""


@dataclass(frozen=True)
class Window:
    """The partitions of one `as_of`. Times are int64 microseconds UTC.

    `train` holds the snapshot partitions before `cut`, `evaluate` those of the month after it; `validation_from` is
    where the part of the training window begins that decides when to stop.
    """

    as_of: str
    train: tuple[str, ...]
    evaluate: tuple[str, ...]
    cut: int
    validation_from: int
    ends: int
    months: int
    declared_months: int


def declared_training(spec: PipelineSpec) -> TrainingSpec:
    """The pipeline's training declaration.

    Raises:
        NoTraining: there is none.
    """
    if spec.training is None:
        raise NoTraining(
            f"pipeline {spec.name!r} declares no training", "add `training`, `evaluation` and `promotion` to defs.yaml"
        )
    return spec.training


def declared_as_of(spec: PipelineSpec) -> AsOfSpec:
    """The months that the pipeline trains for.

    Raises:
        NoTraining: it declares no training, or learns from text and has no months.
    """
    declared = declared_training(spec).as_of
    if declared is None:
        raise NoTraining(
            f"pipeline {spec.name!r} learns from text: it trains on its whole snapshot, not by month",
            "ask for its training without an as_of",
        )
    return declared


def whole_window() -> Window:
    """The window of a pipeline that learns from text: its one snapshot, judged on the documents kept apart in it."""
    return Window(
        as_of=WHOLE, train=(WHOLE,), evaluate=(), cut=0, validation_from=0, ends=0, months=0, declared_months=0
    )


def as_of_calendar(spec: PipelineSpec) -> PartitionSpec:
    """The calendar of `as_of` partitions: months in the zone of the label source."""
    declared = declared_as_of(spec)
    label = _label_calendar(spec)
    return PartitionSpec(
        column=label.column, cadence="monthly", zone=label.zone, start=declared.start, end=declared.end
    )


def window_of(spec: PipelineSpec, as_of: str) -> Window:
    """The window of one `as_of` such as `2013-11-01`.

    Raises:
        NoTraining: the pipeline declares no training.
        UnknownPartition: the calendar has no such month.
        WindowEmpty: nothing lies before it.
    """
    training = declared_training(spec)
    label = PartitionScheme.from_spec(_label_calendar(spec))
    cut, ends = PartitionScheme.from_spec(as_of_calendar(spec)).window(as_of)
    first_month = _months_before(date.fromisoformat(as_of), training.window)
    start = max(first_month, label.start)
    opened = PartitionScheme("monthly", label.zone, start.replace(day=1), None, frozenset()).window(
        start.replace(day=1).isoformat()
    )[0]
    train = tuple(k for k in label.keys_between(opened, cut - 1) if label.window(k)[1] <= cut)
    if not train:
        raise WindowEmpty(
            f"no snapshot partition of {spec.name!r} ends before as_of {as_of}",
            f"choose a later as_of; the label source starts at {label.start}",
        )
    return Window(
        as_of=as_of,
        train=train,
        evaluate=label.keys_between(cut, ends - 1),
        cut=cut,
        validation_from=cut - duration_us(training.early_stopping.last),
        ends=ends,
        months=_months_between(start, date.fromisoformat(as_of)),
        declared_months=training.window,
    )


def _label_calendar(spec: PipelineSpec) -> PartitionSpec:
    calendar = spec.sources[spec.label.source].partition
    assert calendar is not None
    return calendar


def _months_before(day: date, months: int) -> date:
    index = max(day.year * 12 + day.month - 1 - months, 12)
    return date(index // 12, index % 12 + 1, 1)


def _months_between(first: date, last: date) -> int:
    return (last.year - first.year) * 12 + last.month - first.month
