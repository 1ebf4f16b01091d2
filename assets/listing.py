"""All definitions of the code location as text, one thing a line: `python -m assets.listing FILE` writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import dagster as dg


def listing(found: dg.Definitions) -> str:
    """Assets with what they depend on and check, then what asks by itself; nothing that changes from day to day."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: dg.Definitions) -> Iterator[str]:
    assets = {key: a for a in found.assets or [] if isinstance(a, dg.AssetsDefinition) for key in a.keys}
    for spec in sorted(found.resolve_all_asset_specs(), key=lambda s: s.key.to_user_string()):
        asset = assets.get(spec.key)
        yield f"asset {spec.key.to_user_string()}"
        yield f"  owners {', '.join(spec.owners)}; kinds {', '.join(sorted(spec.kinds))}; group {spec.group_name}"
        yield f"  partitions {_partitions(spec.partitions_def)}"
        if asset is not None and asset.backfill_policy is not None:
            policy = asset.backfill_policy
            yield f"  backfill {policy.policy_type.value.lower()} {policy.max_partitions_per_run or ''}".rstrip()
        if spec.automation_condition is not None:
            yield "  follows updates"
        for dep in sorted(spec.deps, key=lambda d: d.asset_key.to_user_string()):
            yield f"  from {dep.asset_key.to_user_string()}{_mapping(dep.partition_mapping)}"
        for check in sorted(asset.check_specs if asset is not None else (), key=lambda c: c.name):
            if check.asset_key == spec.key:
                yield f"  check {check.name}{' (blocks)' if check.blocking else ''}"
    for sensor in sorted(found.sensors or [], key=lambda s: s.name):
        yield f"sensor {sensor.name}: {sensor.default_status.value.lower()}"
    for schedule in sorted(found.schedules or [], key=lambda s: s.name):
        assert isinstance(schedule, dg.ScheduleDefinition)
        yield f"schedule {schedule.name}: {schedule.cron_schedule}, {schedule.default_status.value.lower()}"
    for name in sorted(found.resources or {}):
        yield f"resource {name}"


def _partitions(definition: dg.PartitionsDefinition | None) -> str:
    if definition is None:
        return "none"
    if isinstance(definition, dg.TimeWindowPartitionsDefinition):
        end = f" to {definition.end:%Y-%m-%d}" if definition.end is not None else ", open-ended"
        return f"{definition.cron_schedule} {definition.timezone} from {definition.start:%Y-%m-%d}{end}"
    return type(definition).__name__


def _mapping(mapping: dg.PartitionMapping | None) -> str:
    if mapping is None:
        return ""
    if isinstance(mapping, dg.TimeWindowPartitionMapping):
        return f" [{mapping.start_offset:+d}, {mapping.end_offset:+d}]"
    return f" [{type(mapping).__name__}]"


if __name__ == "__main__":
    from assets.definitions import defs

    Path(sys.argv[1]).write_text(listing(defs()), encoding="utf-8")
