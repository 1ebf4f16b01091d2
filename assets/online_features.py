"""Stage `online_features`: the rows that a server's answers rest on, kept current up to the world's time."""

from typing import TYPE_CHECKING, Any

import dagster as dg

from assets.describe import code_references, guarded, table
from assets.keys import dataset_key, online_key
from headway.errors import HeadwayError
from headway.loading import Pipeline
from headway.processes import step_dies_with_run
from headway.words import counted
from resources.platform import Platform
from trainer.blobs import digest_json

if TYPE_CHECKING:
    from headway.features.online.sync import SyncReport
    from headway.serving.parity import Parity

PARITY = "Entities of the newest label rows get the same features online as in batch, to the last bit."

# Any new dataset version is worth a sync, which costs what changed; a partition that never came stops nothing.
KEEPS_UP = (
    dg.AutomationCondition.any_deps_updated().since_last_handled()
    & ~dg.AutomationCondition.any_deps_in_progress()
    & ~dg.AutomationCondition.in_progress()
)


def build_online_features(pipeline: Pipeline) -> dg.AssetsDefinition:
    """The online store of a pipeline's features; a step brings what changed since the last one."""
    spec = pipeline.spec
    key = online_key(spec.name)
    used = dict.fromkeys(v.source for v in spec.features.views.values())
    used |= dict.fromkeys(c.source for c in spec.features.custom.values())

    @dg.asset(
        key=key,
        group_name=spec.name,
        description=f"Rows that the features of `{spec.name}` can reach, in the online store, up to the world's time.",
        owners=[spec.owner],
        kinds={"table"},
        tags={"headway/stage": "online_features"},
        metadata={"dagster/code_references": code_references(pipeline, "serving", "features.py")},
        code_version="1",
        deps=[dataset_key(spec.name, source) for source in used],
        automation_condition=KEEPS_UP,
        check_specs=[dg.AssetCheckSpec("parity", asset=key, blocking=True, description=PARITY)],
    )
    def online_features(context: dg.AssetExecutionContext, platform: Platform) -> dg.MaterializeResult:  # pyright: ignore[reportMissingTypeArgument] - Dagster reads this
        from headway.features.online.sync import sync_online
        from headway.serving.parity import compare_online

        step_dies_with_run()
        services = platform.services()
        try:
            done = sync_online(services, pipeline, platform.online())
            context.log.info(
                f"{done.rows_read:,} rows read, {done.rows_written:,} written from {done.versions_read} versions "
                f"in {done.seconds:.2f} s"
            )
            parity = compare_online(services, pipeline, platform.online())
        except HeadwayError as error:
            raise dg.Failure(str(error), allow_retries=False) from error
        state = done.state
        return dg.MaterializeResult(
            metadata=guarded(_metadata(done)),
            data_version=dg.DataVersion(digest_json([state.inputs_digest, state.until])),
            check_results=[_check(key, parity)],
        )

    return online_features


def _metadata(done: "SyncReport") -> dict[str, Any]:
    from headway.datasets.zones import iso

    state = done.state
    rows = [
        {
            "source": source,
            "known_until": iso(until),
            "newest_row_known": "" if (mark := state.watermarks.get(source)) is None else iso(mark),
            "held": "yes" if source in done.held else "",
            "skipped": ", ".join(done.skipped.get(source, ())[:10]),
        }
        for source, until in sorted(state.known_until.items())
    ]
    return {
        "status": "clipped to the world's time" if done.clipped else "current",
        "until": iso(state.until),
        "feature_set_version": state.feature_set_version,
        "inputs_digest": state.inputs_digest,
        "rows_read": done.rows_read,
        "rows_written": done.rows_written,
        "versions_read": done.versions_read,
        "partitions_skipped": sum(map(len, done.skipped.values())),
        "seconds": round(done.seconds, 3),
        **table("sources", rows),
    }


def _check(key: dg.AssetKey, parity: "Parity") -> dg.AssetCheckResult:
    from headway.datasets.zones import iso

    differing = ", ".join(f"{column} in {counted(n, 'request')}" for column, n in list(parity.differing.items())[:10])
    said = f"{parity.rows} requests, {parity.cells:,} cells are the same to the last bit"
    return dg.AssetCheckResult(
        asset_key=key,
        check_name="parity",
        passed=not parity.differing,
        severity=dg.AssetCheckSeverity.ERROR,
        description=f"differ: {differing}" if differing else said if parity.rows else f"not compared: {parity.reason}",
        metadata={
            "requests": parity.rows,
            "cells": parity.cells,
            "cells_differing": sum(parity.differing.values()),
            "observed_at": "" if parity.observed is None else iso(parity.observed),
            "not_compared": parity.reason,
        },
    )
