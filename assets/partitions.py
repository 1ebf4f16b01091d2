"""Dagster's view of declared partitions, and which source partitions a snapshot partition depends on."""

from datetime import UTC, date, datetime, timedelta

import dagster as dg

from headway.declaration import PartitionSpec, PipelineSpec
from headway.features.reach import bounds, longest_memory
from headway.training.window import declared_as_of, declared_training

_UNIT_US = {
    "hourly": 3_600_000_000,
    "daily": 86_400_000_000,
    "weekly": 7 * 86_400_000_000,
    "monthly": 28 * 86_400_000_000,
}

# Beyond this the UI and the daemon slow down; a declaration that needs more is cut too finely.
MAX_PARTITIONS = 20_000


class TooManyPartitions(ValueError):
    """A declared calendar has more partitions than Dagster's UI and daemon handle well."""


def partitions_definition(spec: PartitionSpec) -> dg.TimeWindowPartitionsDefinition:
    """Dagster partitions with the same keys and windows as the declared calendar.

    Raises `TooManyPartitions` above 20,000.
    """
    end = datetime.fromisoformat(spec.end) if spec.end else datetime.now(UTC).replace(tzinfo=None)
    count = (end - datetime.fromisoformat(spec.start)).total_seconds() * 1_000_000 // _UNIT_US[spec.cadence]
    if count > MAX_PARTITIONS:
        raise TooManyPartitions(
            f"{spec.cadence} partitions from {spec.start} are {int(count):,}, the limit is {MAX_PARTITIONS:,}: "
            "start later or choose a coarser cadence"
        )
    common = {"timezone": spec.zone, "end_date": spec.end}
    if spec.cadence == "hourly":
        start = datetime.fromisoformat(spec.start).strftime("%Y-%m-%d-%H:%M")
        stop = datetime.fromisoformat(spec.end).strftime("%Y-%m-%d-%H:%M") if spec.end else None
        return dg.HourlyPartitionsDefinition(start, end_date=stop, timezone=spec.zone)
    if spec.cadence == "weekly":
        return dg.WeeklyPartitionsDefinition(spec.start, day_offset=1, **common)
    if spec.cadence == "monthly":
        return dg.MonthlyPartitionsDefinition(spec.start, **common)
    return dg.DailyPartitionsDefinition(spec.start, **common)


def snapshot_dependency(spec: PipelineSpec, name: str) -> dg.PartitionMapping | None:
    """How snapshot partitions map to partitions of a source; None for a source without partitions.

    Offsets are in units of the snapshot's cadence (dagster counts them so) and cover the declared reach. The exact
    reach, and the refusal when part of it is missing, are the snapshot builder's: Dagster shortens a window at the
    edges without a word.
    """
    source = spec.sources[name]
    if source.partition is None:
        return None
    label = spec.sources[spec.label.source].partition
    assert label is not None
    unit = _UNIT_US[label.cadence]
    before, after = bounds(source)
    back = longest_memory(spec, name) + after
    return dg.TimeWindowPartitionMapping(
        start_offset=-_units(back, unit),
        end_offset=_units(before, unit),
        allow_nonexistent_upstream_partitions=True,
    )


def training_dependency(spec: PipelineSpec) -> dg.PartitionMapping:
    """How a training run maps to snapshot partitions: those of the declared months before its own.

    The first months have shorter windows; the run says how many months it had.
    """
    return dg.TimeWindowPartitionMapping(
        start_offset=-declared_training(spec).window, end_offset=-1, allow_nonexistent_upstream_partitions=True
    )


def week_calendar(spec: PipelineSpec) -> PartitionSpec:
    """The weeks in which answers are followed: from the first `as_of` to the end of the label source's calendar.

    Weeks are Monday to Monday in UTC, whatever zone the data live in.
    """
    label = spec.sources[spec.label.source].partition
    assert label is not None
    first = _monday(date.fromisoformat(declared_as_of(spec).start))
    end = None if label.end is None else _monday(date.fromisoformat(label.end) + timedelta(days=6))
    return PartitionSpec(
        column=label.column, cadence="weekly", zone="UTC", start=str(first), end=None if end is None else str(end)
    )


def weekly_dependency() -> dg.PartitionMapping:
    """How a week maps to partitions of the label source: those that lie in it, as far as the calendar has them."""
    return dg.TimeWindowPartitionMapping(allow_nonexistent_upstream_partitions=True)


def _monday(day: date) -> date:
    return day - timedelta(days=day.weekday())


def _units(span: int, unit: int) -> int:
    return -(-span // unit)
