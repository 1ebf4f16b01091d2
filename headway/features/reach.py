"""Which source partitions a snapshot partition may read, derived from what its features declare."""

from __future__ import annotations

from dataclasses import dataclass

from headway.datasets.partitions import PartitionScheme
from headway.declaration import FeatureViewSpec, PipelineSpec, SourceSpec, duration_us

WHOLE_TABLE = ""


@dataclass(frozen=True)
class Interval:
    """Closed interval of instants, int64 microseconds UTC."""

    first: int
    last: int


def partitions_in_reach(spec: PipelineSpec, observed: Interval | None) -> dict[str, tuple[str, ...]]:
    """Partitions of every feature source that label rows observed in an interval may need, oldest first.

    An unpartitioned source is one partition named "". Without label rows nothing is in reach but whole tables.
    """
    reach: dict[str, tuple[str, ...]] = {}
    for name in _feature_sources(spec):
        source = spec.sources[name]
        if source.partition is None:
            reach[name] = (WHOLE_TABLE,)
        elif observed is None:
            reach[name] = ()
        else:
            scheme = PartitionScheme.from_spec(source.partition)
            needed = _partition_time(source, observed, longest_memory(spec, name))
            reach[name] = tuple(scheme.keys_between(needed.first, needed.last))
    return reach


def event_interval(source: SourceSpec, window: tuple[int, int]) -> Interval:
    """Instants at which events of a source partition may lie, given the partition's half-open window."""
    before, after = bounds(source)
    return Interval(window[0] - before, window[1] - 1 + after)


def memory(view: FeatureViewSpec) -> int:
    """How far back from an observation a row can show in a cell, in microseconds.

    A window forgets after its duration. A `latest` answer expires after the look-back and stays visible as expired for
    one more.
    """
    durations = [duration_us(f.duration) for f in view.window_features().values()]
    if view.latest_features() and view.lookback is not None:
        durations.append(2 * duration_us(view.lookback))
    return max(durations, default=0)


def _feature_sources(spec: PipelineSpec) -> tuple[str, ...]:
    used = [v.source for v in spec.features.views.values()] + [c.source for c in spec.features.custom.values()]
    return tuple(dict.fromkeys(used))


def longest_memory(spec: PipelineSpec, source: str) -> int:
    """How far back from an observation any feature of a source looks, in microseconds."""
    spans = [memory(v) for v in spec.features.views.values() if v.source == source]
    spans += [duration_us(c.lookback) for c in spec.features.custom.values() if c.source == source and c.lookback]
    return max(spans, default=0)


def bounds(source: SourceSpec) -> tuple[int, int]:
    """How far events may lie before and after the partition column's time, in microseconds."""
    if source.partition is None:
        return 0, 0
    before, after = source.partition.before, source.partition.after
    return (duration_us(before) if before else 0, duration_us(after) if after else 0)


def _partition_time(source: SourceSpec, observed: Interval, remembered: int) -> Interval:
    """Times of the partition column whose events may lie between the oldest one remembered and the observation."""
    before, after = bounds(source)
    return Interval(observed.first - remembered - after, observed.last + before)
