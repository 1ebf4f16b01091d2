"""Blobs with their owners, and the edges from what was made to what it was made from."""

from collections import defaultdict
from collections.abc import Iterable

import sqlalchemy as sa

from headway.artifacts.store import Blob
from headway.catalog.commands import Step
from headway.catalog.errors import BlobSizeConflict
from headway.catalog.facts import BlobRow, Direction, LineageEdge
from headway.catalog.tables import blob, blob_ref, lineage_edge


def keep_blobs(step: Step, blobs: Iterable[Blob], owner_kind: str, owner_id: str) -> None:
    """Make blobs live and owned. Their bytes must be durable in the store before.

    Raises:
        BlobSizeConflict: a digest is known with another size.
    """
    for item in sorted(blobs, key=lambda item: item.digest):
        new = step.insert_once(
            blob,
            digest=item.digest,
            size=item.size,
            media_type=item.media_type,
            state="live",
            verified_at=None,
            created_at=step.now,
            epoch=1,
        )
        if not new:
            _check_size(step, item)
        step.insert_once(blob_ref, digest=item.digest, owner_kind=owner_kind, owner_id=owner_id, created_at=step.now)


def link(step: Step, child: str, parent: str, role: str) -> None:
    """Record that `child` was made from `parent`."""
    step.insert_once(lineage_edge, child=child, parent=parent, role=role, created_at=step.now)


def read_lineage(connection: sa.Connection, tenant: str, node: str, direction: Direction) -> list[LineageEdge]:
    """Return every edge on the way from `node` to its origins (upstream) or to what came of it (downstream)."""
    near, far = ("child", "parent") if direction == "upstream" else ("parent", "child")
    columns = (lineage_edge.c.child, lineage_edge.c.parent, lineage_edge.c.role)
    own = lineage_edge.c.tenant_id == tenant
    reached = sa.select(*columns).where(own, lineage_edge.c[near] == node).cte("reached", recursive=True)
    # UNION drops an edge that was reached before, so the walk ends even on a cycle.
    reached = reached.union(sa.select(*columns).join(reached, lineage_edge.c[near] == reached.c[far]).where(own))
    rows = connection.execute(sa.select(reached).order_by(reached.c.child, reached.c.parent, reached.c.role))
    return [LineageEdge(*row) for row in rows]


def read_blobs(connection: sa.Connection, tenant: str) -> list[BlobRow]:
    """Return the tenant's blobs with their owners, in order of digest."""
    owners: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for row in connection.execute(sa.select(blob_ref).where(blob_ref.c.tenant_id == tenant)):
        owners[row.digest].append((row.owner_kind, row.owner_id))
    rows = connection.execute(sa.select(blob).where(blob.c.tenant_id == tenant).order_by(blob.c.digest))
    return [
        BlobRow(Blob(row.digest, row.size, row.media_type), row.state, tuple(sorted(owners[row.digest])))
        for row in rows
    ]


def _check_size(step: Step, item: Blob) -> None:
    stored = step.connection.execute(
        sa.select(blob.c.size).where(blob.c.tenant_id == step.tenant, blob.c.digest == item.digest)
    ).scalar_one()
    if stored != item.size:
        raise BlobSizeConflict(item.digest, stored, item.size)
