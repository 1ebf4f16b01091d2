"""Removes an entity from an online store for good."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.errors import HeadwayError
from headway.features.online.scopes import entity_of, scopes_of
from headway.features.online.store import OnlineStore, StoreKey
from headway.features.plan import compile_plan
from headway.loading import Pipeline


class NothingToErase(HeadwayError):
    """A key that names no entity of a source: other columns, or a part is null."""


def erase_entity(
    pipeline: Pipeline, online: OnlineStore, tenant: str, source: str, key: Mapping[str, Any], at: int
) -> int:
    """Remove every row of an entity, under whatever key it is filed; no later delivery brings it back.

    Args:
        pipeline: the declaration, whose feature sets are looked through.
        online: the store.
        tenant: whose rows.
        source: the source that the entity is of.
        key: value by source column, all columns of one declared view key.
        at: when it was asked for, microseconds UTC.

    Returns:
        Row versions removed.

    Raises:
        NothingToErase: no view looks up that source by these columns, or a part is null.
        OnlineBusy: another process fills the store.
        OnlineUnavailable: the store cannot be used.
    """
    scopes = {s.scope_id: s.subject for s in scopes_of(compile_plan(pipeline)).of_source(source)}
    columns = tuple(sorted(key))
    entity = entity_of(key, columns)
    if (source, columns) not in scopes.values() or not entity:
        known = sorted({", ".join(c) for _, c in scopes.values() if c})
        raise NothingToErase(
            f"no entity of {source!r} is named by {', '.join(columns) or 'nothing'}",
            f"give a value for each column of one of these keys: {'; '.join(known) or 'none'}",
        )
    removed = 0
    for state in online.states(tenant, pipeline.spec.name):
        place = StoreKey(tenant, pipeline.spec.name, state.feature_set_version)
        with online.syncing(place):
            removed += online.erase(place, (source, columns), entity, scopes, at)
    return removed
