"""Materializes a workbench pipeline through a real Dagster instance."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from support.workbench import Workbench

from assets.dataset_version import build_dataset_version
from assets.feature_snapshot import build_feature_snapshot
from headway.home import load_settings
from headway.loading import load_pipeline
from headway.services import open_services
from resources.platform import Platform


def definitions(bench: Workbench) -> dg.Definitions:
    """The assets of the workbench's pipeline, as the component builds them."""
    pipeline = load_pipeline(bench.folder)
    stages = [build_dataset_version(pipeline, source) for source in pipeline.spec.sources]
    return dg.Definitions(
        assets=[*stages, build_feature_snapshot(pipeline)], resources={"platform": Platform(home=str(bench.home))}
    )


def run(
    bench: Workbench,
    instance: dg.DagsterInstance,
    partitions: Sequence[str],
    selection: Sequence[str] | None = None,
) -> dg.ExecuteInProcessResult:
    """One run over one partition, or over the range from the first to the last."""
    assets = list(definitions(bench).assets or [])
    tags = (
        {}
        if len(partitions) == 1
        else {
            "dagster/asset_partition_range_start": partitions[0],
            "dagster/asset_partition_range_end": partitions[-1],
        }
    )
    return dg.materialize(
        assets,  # pyright: ignore[reportArgumentType] - exactly what Definitions took
        instance=instance,
        partition_key=partitions[0] if len(partitions) == 1 else None,
        selection=selection,
        tags=tags,
        raise_on_error=False,
        resources={"platform": Platform(home=str(bench.home))},
    )


def catalog_state(bench: Workbench) -> dict[str, Any]:
    """What the catalog says of every partition, without times and run ids."""
    spec = load_pipeline(bench.folder).spec
    with open_services(load_settings({"HEADWAY_HOME": str(bench.home)})) as services:
        catalog = services.catalog
        state: dict[str, Any] = {}
        for source in spec.sources:
            for partition, v in catalog.current_many(services.principal, f"{spec.name}/{source}").items():
                evidence = v.evidence
                state[f"{source} {partition}"] = (
                    v.status,
                    v.content_digest,
                    v.status_reason,
                    evidence and evidence.report_digest,
                )
        for partition, s in catalog.current_snapshots(services.principal, spec.name).items():
            found = s.snapshot
            state[f"snapshot {partition}"] = (
                s.status,
                s.reason,
                s.blocking,
                found and (found.snapshot_id, found.content_digest, found.rows),
            )
        return state


def events_text(root: Path) -> str:
    """Every byte that Dagster stored under a folder, as text."""
    return "\n".join(p.read_bytes().decode("latin-1") for p in sorted(root.rglob("*")) if p.is_file())
