"""Reports about an endpoint's weeks: each once, the newest of a kind, version and week in force."""

from collections.abc import Iterable

import sqlalchemy as sa

from headway.catalog.commands import Document, Step, chunks, dump, next_seq
from headway.catalog.documents import blob_documents
from headway.catalog.encoding import encode
from headway.catalog.endpoints import read as read_endpoint
from headway.catalog.errors import UnknownReport
from headway.catalog.lineage import keep_blobs
from headway.catalog.monitoring_documents import report_of_row
from headway.catalog.monitoring_facts import Report, ReportFacts, ReportKind
from headway.catalog.tables import report

OWNER = "report"


def aggregate(endpoint_id: str) -> str:
    """Return the aggregate of an endpoint's reports."""
    return f"reports:{endpoint_id}"


def record(step: Step, facts: ReportFacts) -> Document:
    """Return the report with this identity, recorded as the newest of its kind, version and week when there is none."""
    found = find(step.connection, step.tenant, facts.report_id)
    if found is None:
        _insert(step, facts)
        keep_blobs(step, facts.blobs, OWNER, facts.report_id)
        found = read(step.connection, step.tenant, facts.report_id)
    return encode(found)


def find(connection: sa.Connection, tenant: str, report_id: str) -> Report | None:
    """Return a report, None when there is none."""
    mine = (report.c.tenant_id == tenant, report.c.report_id == report_id)
    row = connection.execute(sa.select(report).where(*mine)).first()
    return None if row is None else report_of_row(row)


def read(connection: sa.Connection, tenant: str, report_id: str) -> Report:
    """Return a report.

    Raises:
        UnknownReport: there is none.
    """
    found = find(connection, tenant, report_id)
    if found is None:
        raise UnknownReport(report_id)
    return found


def check_known(connection: sa.Connection, tenant: str, report_ids: Iterable[str]) -> None:
    """Refuse a report that was never recorded. Raises: UnknownReport."""
    wanted = sorted(set(report_ids))
    for chunk in chunks(wanted):
        mine = (report.c.tenant_id == tenant, report.c.report_id.in_(chunk))
        known = set(connection.execute(sa.select(report.c.report_id).where(*mine)).scalars())
        for report_id in chunk:
            if report_id not in known:
                raise UnknownReport(report_id)


def read_in_force(
    connection: sa.Connection, tenant: str, endpoint_id: str, kind: ReportKind | None, model_version: int | None
) -> list[Report]:
    """Return the newest report per kind, version and week, in order of week, kind and version."""
    columns = report.c
    mine = [columns.tenant_id == tenant, columns.endpoint_id == endpoint_id]
    if kind is not None:
        mine.append(columns.kind == kind)
    if model_version is not None:
        mine.append(columns.version == model_version)
    order = (columns.time_window, columns.kind, columns.version, columns.seq)
    rows = connection.execute(sa.select(report).where(*mine).order_by(*order))
    newest = {(row.time_window, row.kind, row.version): report_of_row(row) for row in rows}
    return [newest[key] for key in sorted(newest)]


def _insert(step: Step, facts: ReportFacts) -> None:
    read_endpoint(step.connection, step.tenant, facts.endpoint_id)
    columns = report.c
    version = facts.model_version or 0
    series = (
        columns.tenant_id == step.tenant,
        columns.endpoint_id == facts.endpoint_id,
        columns.kind == facts.kind,
        columns.version == version,
        columns.time_window == facts.window,
    )
    step.insert(
        report,
        report_id=facts.report_id,
        kind=facts.kind,
        endpoint_id=facts.endpoint_id,
        version=version,
        time_window=facts.window,
        seq=step.connection.execute(sa.select(next_seq(report, "seq", *series))).scalar_one(),
        start_at=facts.start,
        end_at=facts.end,
        verdict=facts.verdict,
        reason=facts.reason,
        document_digest=facts.document_digest,
        metrics=dump(facts.metrics),
        blobs=dump(blob_documents(facts.blobs)),
        made_at=facts.made_at,
        created_at=step.now,
        command_key=step.key,
    )
