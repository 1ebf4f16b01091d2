"""Released rows for readers, and refusals by name for everything else."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headway.artifacts.manifest import read_manifest
from headway.catalog import DatasetVersion
from headway.datasets.verdict import POSITION
from headway.errors import HeadwayError
from headway.services import Services

ROWS_ENTRY = "rows.parquet"


class NotReleased(HeadwayError):
    """A dataset version, or a partition without one, that nothing may read."""

    def __init__(self, dataset: str, partition: str, status: str, reason: str = "") -> None:
        self.dataset, self.partition, self.status = dataset, partition, status
        place = f"{dataset} {partition}" if partition else dataset
        super().__init__(
            f"{place} is {status}{f' ({reason})' if reason else ''}, so it cannot be read",
            f"look at it with `headway datasets show {place.replace(' ', '/')}`"
            if status != "missing"
            else "ingest it",
        )


def dataset_name(pipeline: str, source: str) -> str:
    """The catalog's name of a source's dataset."""
    return f"{pipeline}/{source}"


def load_rows(services: Services, version: DatasetVersion, columns: Sequence[str] | None = None) -> pa.Table:
    """The released rows of a version: bytes verified, quarantined rows left out, in canonical order.

    Text columns come dictionary-encoded; times are microseconds in UTC.

    Raises:
        NotReleased: names dataset, partition and status.
        BlobMissing, BlobCorrupt: the store does not hold what the catalog says.
    """
    if version.status != "released":
        raise NotReleased(version.dataset, version.partition, version.status, version.status_reason)
    digest = None if version.evidence is None else version.evidence.quarantine_digest
    return pinned_rows(services, version, digest, columns)


def pinned_rows(
    services: Services, version: DatasetVersion, quarantine_digest: str | None, columns: Sequence[str] | None = None
) -> pa.Table:
    """The rows of a version without those that the named quarantine table keeps back, as when it was read then.

    Raises:
        BlobMissing, BlobCorrupt: the store does not hold what the catalog says.
    """
    table = stored_rows(services, version, columns)
    if quarantine_digest is None:
        return table
    return table.take(pa.array(kept_positions(services, table.num_rows, quarantine_digest)))


def kept_positions(services: Services, rows: int, quarantine_digest: str | None) -> NDArray[np.int64]:
    """Positions, ascending, of the stored rows that the named quarantine table does not keep back."""
    kept = np.ones(rows, dtype=np.bool_)
    if quarantine_digest is not None:
        kept[_positions(services, quarantine_digest)] = False
    return np.flatnonzero(kept)


def stored_rows(services: Services, version: DatasetVersion, columns: Sequence[str] | None = None) -> pa.Table:
    """All stored rows of a version whatever its status, quarantined ones among them: for validation and for people."""
    manifest = read_manifest(services.store, version.manifest_digest)
    entry = manifest.entry(ROWS_ENTRY)
    with services.store.open(entry.sha256) as source:
        reader = pq.ParquetFile(source)
        names = reader.schema_arrow.names if columns is None else list(columns)
        text = [n for n in names if pa.types.is_string(reader.schema_arrow.field(n).type)]
        source.seek(0)
        return pq.ParquetFile(source, read_dictionary=text).read(columns=names)


def quarantine(services: Services, version: DatasetVersion) -> pa.Table | None:
    """The quarantine table of a version's evidence, None when nothing is kept back."""
    digest = None if version.evidence is None else version.evidence.quarantine_digest
    return None if digest is None else _quarantine_table(services, digest)


def _quarantine_table(services: Services, digest: str) -> pa.Table:
    with services.store.open(digest) as source:
        return pq.ParquetFile(source).read()


def _positions(services: Services, digest: str) -> NDArray[np.int64]:
    """Positions of the stored rows that are kept back, ascending."""
    positions = _quarantine_table(services, digest).column(POSITION).drop_null().to_numpy().astype(np.int64)
    return np.unique(positions)
