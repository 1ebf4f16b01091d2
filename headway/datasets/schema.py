"""The canonical schema of a source: what is stored, in which order, and its digest."""

import pyarrow as pa

from headway.datasets.text import ARROW_TYPES
from headway.declaration import SourceSpec
from trainer.blobs import digest_json

SCHEMA_FORMAT = "headway.schema/1"


def stored_columns(spec: SourceSpec) -> dict[str, str]:
    """Column -> logical type of what is stored: the declared columns without dropped personal ones, sorted by name."""
    return {
        name: column.type for name, column in sorted(spec.columns.items()) if spec.privacy.personal.get(name) != "drop"
    }


def arrow_schema(spec: SourceSpec) -> pa.Schema:
    """The Arrow schema of stored rows; timestamps are microseconds in UTC."""
    return pa.schema([pa.field(name, ARROW_TYPES[kind]) for name, kind in stored_columns(spec).items()])


def schema_hash(spec: SourceSpec) -> str:
    """Digest of what a reader relies on: columns with type and nullability, identity, keys and clocks."""
    columns = [[n, kind, spec.columns[n].required] for n, kind in stored_columns(spec).items()]
    return digest_json(
        {
            "format": SCHEMA_FORMAT,
            "columns": columns,
            "row_id": list(spec.row_id),
            "keys": list(spec.keys),
            "event_time": _clock(spec.event_time),
            "available_time": _clock(spec.available_time),
            "sequence": spec.sequence,
            "deleted": spec.deleted,
            "hashed": sorted(n for n, treatment in spec.privacy.personal.items() if treatment == "hash"),
        }
    )


def _clock(clock: object) -> str:
    if isinstance(clock, str):
        return f"column {clock}"
    for name in ("delay", "static_from"):
        value = getattr(clock, name, None)
        if value is not None:
            return f"{name} {value}"
    raise TypeError(f"{clock!r} is no declared clock")
