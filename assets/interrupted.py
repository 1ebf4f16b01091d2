"""A step over many partitions that is cancelled half-way still shows the half that it did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dagster as dg

# Where Dagster keeps the data version of an event that no output brings.
_DATA_VERSION = "dagster/data_version"


@contextmanager
def telling_what_is_done(
    context: dg.AssetExecutionContext,
    key: dg.AssetKey,
    done: Callable[[], Mapping[str, tuple[str, Mapping[str, Any]]]],
) -> Iterator[None]:
    """When the step is interrupted, report what `done` gives: partition to (data version, metadata).

    Those partitions are in the catalog already; without this the page would call them missing until the next run.
    """
    try:
        yield
    except (dg.DagsterExecutionInterruptedError, KeyboardInterrupt):
        for partition, (version, metadata) in done().items():
            tags = {_DATA_VERSION: version}
            context.log_event(dg.AssetMaterialization(key, partition=partition or None, metadata=metadata, tags=tags))
        raise
