"""Reads the stored values of a published snapshot."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq

from headway.artifacts.manifest import read_manifest
from headway.catalog import FeatureSnapshot
from headway.services import Services
from headway.text.layout import DOCUMENTS_ENTRY


def read_values(services: Services, snapshot: FeatureSnapshot) -> pa.Table:
    """The snapshot's values, one row per label; of text its documents, one row each. Bytes are verified on the way."""
    manifest = read_manifest(services.store, snapshot.manifest_digest)
    name = DOCUMENTS_ENTRY if "text" in snapshot.facts.metadata else "values.parquet"
    return pq.read_table(io.BytesIO(services.store.get_bytes(manifest.entry(name).sha256)))
