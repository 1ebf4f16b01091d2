"""Snapshots that cannot be because their label rows are in quarantine."""

from __future__ import annotations

from collections.abc import Sequence

from headway.declaration import PipelineSpec
from headway.services import Services

QUARANTINED = "input quarantined"


def refuse_quarantined_labels(services: Services, spec: PipelineSpec, partitions: Sequence[str]) -> None:
    """Record for every partition that its snapshot is refused because its own label rows are quarantined."""
    for partition in partitions:
        record_refusal(services, spec, partition, QUARANTINED, (f"{spec.learned_source} {partition}".rstrip(),), None)


def record_refusal(
    services: Services,
    spec: PipelineSpec,
    partition: str,
    reason: str,
    blocking: tuple[str, ...],
    evidence_digest: str | None,
) -> None:
    """Record a refusal by name; one that stands already is left as it is."""
    states = services.catalog.current_snapshots(services.principal, spec.name, [partition])
    state = states.get(partition)
    if state is not None and (state.status, state.reason, state.blocking) == ("refused", reason, blocking):
        return
    services.catalog.refuse_snapshot(services.principal, None, spec.name, partition, reason, blocking, evidence_digest)
