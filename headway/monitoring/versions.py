"""The drift reference of a model version, made once from its artifact and its training snapshots and kept by digest.

The document in the store names the sample (Parquet: the inputs, entity, observation time and segments of whole blocks
of training rows) and holds the calibration. Made again from the same version and levels it has the same digest.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headway.artifacts.manifest import read_manifest
from headway.artifacts.store import Blob
from headway.catalog.registry_facts import ModelVersion
from headway.declaration import PipelineSpec
from headway.features.assemble import parquet_bytes
from headway.features.clocks import instants
from headway.features.reading import read_values
from headway.loading import Pipeline
from headway.monitoring.calibrate import calibrate, sizes_up_to
from headway.monitoring.drift import DriftPolicy
from headway.monitoring.reference import (
    SAMPLE_ROWS,
    SCORE,
    Bins,
    Calibration,
    Column,
    Kind,
    Reference,
    ReferenceUnusable,
    Window,
    column_of,
    frozen_bins,
    numeric_column,
    sampled_blocks,
    text_column,
)
from headway.monitoring.windows import WEEK_US, week_key
from headway.services import Services
from headway.serving.requests import serving_of
from trainer.blobs import Json, canonical_json

FORMAT = "headway.drift_reference/1"
ENTITY = "__entity"
TIME = "__time"
SEGMENT = "segment__"
MISSING = "(missing)"
_ALONE = "row "
_SEPARATOR = "\x1f"


def version_reference(
    services: Services, pipeline: Pipeline, version: ModelVersion, policy: DriftPolicy, digest: str | None
) -> tuple[Reference, tuple[Blob, ...]]:
    """The version's reference and the blobs that hold it.

    Args:
        services: catalog and store.
        pipeline: the declaration.
        version: the model version.
        policy: levels that the calibration belongs to.
        digest: of the document, when an earlier report names it; made anew if that was for other levels.

    Raises:
        ReferenceUnusable: the artifact holds no reference, or no training snapshot can be read.
    """
    if digest is not None:
        document = json.loads(services.store.get_bytes(digest))
        if document["levels"] == _levels(policy):
            return _read(services, version, document, digest)
    sample = _sample(services, pipeline.spec, version)
    stored = services.store.put_bytes(parquet_bytes(_sample_table(sample)), "application/vnd.apache.parquet")
    # Read back, so that a reference made now and one found later are the same to the last bit.
    sample = _read_sample(services, stored.digest, version)
    reference = Reference(_bins(services, version, sample), sample, None, version.facts.feature_set_version)
    sizes = sizes_up_to(policy.minimum, max(policy.minimum, sample.rows))
    calibration = calibrate(reference, policy.psi, policy.distance, sizes, span=WEEK_US, days=policy.days)
    document: dict[str, Json] = {
        "format": FORMAT,
        "model": version.model_id,
        "version": version.version,
        "artifact": version.manifest_digest,
        "sample": stored.digest,
        "rows": sample.rows,
        "levels": _levels(policy),
        "calibration": {
            **asdict(calibration),
            "thresholds": {str(k): v for k, v in calibration.thresholds.items()},
            "rates": {str(k): v for k, v in calibration.rates.items()},
            "seasons": {k: list(v) for k, v in calibration.seasons.items()},
        },
    }
    blob = services.store.put_bytes(canonical_json(document), "application/json")
    return replace(reference, calibration=calibration, digest=blob.digest), (blob, stored)


def _levels(policy: DriftPolicy) -> dict[str, Json]:
    return {"minimum": policy.minimum, "psi": policy.psi, "distance": policy.distance}


def _read(
    services: Services, version: ModelVersion, document: Mapping[str, Any], digest: str
) -> tuple[Reference, tuple[Blob, ...]]:
    sample = _read_sample(services, document["sample"], version)
    made = document["calibration"]
    calibration = Calibration(
        {int(k): v for k, v in made["thresholds"].items()},
        {int(k): v for k, v in made["rates"].items()},
        made["pairs"],
        made["seed"],
        {k: (v[0], v[1]) for k, v in made["seasons"].items()},
        made["windows"],
        made["season_rate"],
    )
    bins = _bins(services, version, sample)
    reference = Reference(bins, sample, calibration, version.facts.feature_set_version, digest)
    blobs = tuple(b for d in (digest, document["sample"]) if (b := services.store.stat(d)) is not None)
    return reference, blobs


def _bins(services: Services, version: ModelVersion, sample: Window) -> dict[str, Bins]:
    """The frozen bins of the contract's inputs and of the score."""
    document = reference_document(services, version)
    found: dict[str, Bins] = {}
    for item in contract_inputs(version):
        name, kind = item
        if name not in document["features"]:
            raise ReferenceUnusable(f"{_name(version)} has no histogram of {name!r}", "train the version again")
        found[name] = frozen_bins(name, document["features"][name], kind, sample.columns.get(name))
    found[SCORE] = frozen_bins(SCORE, document["score"], "float64", None)
    return found


def reference_document(services: Services, version: ModelVersion) -> Mapping[str, Any]:
    """The artifact's `reference.json`. Raises `ReferenceUnusable`."""
    entry = read_manifest(services.store, version.manifest_digest).entry("reference.json")
    document = json.loads(services.store.get_bytes(entry.sha256))
    if not isinstance(document, dict) or not isinstance(document.get("features"), dict) or "score" not in document:
        raise ReferenceUnusable(
            f"the artifact of {_name(version)} holds no reference histograms", "train the version again"
        )
    return cast("Mapping[str, Any]", document)


def contract_inputs(version: ModelVersion) -> list[tuple[str, Kind]]:
    """Names and types of the inputs that the model takes."""
    listed = cast("Sequence[Mapping[str, Any]]", version.contract["inputs"])
    return [(str(i["name"]), cast("Kind", i["type"])) for i in listed]


def arrow_column(column: pa.ChunkedArray) -> Column:
    """A column of a values table, by the kind that its Arrow type says."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        kind = cast("pa.DictionaryType[Any, Any, Any]", kind).value_type
        column = column.cast(kind)
    if pa.types.is_null(kind):
        return column_of([None] * len(column))
    if pa.types.is_boolean(kind):
        return column_of(column.to_pylist())
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        name: Kind = "int64" if pa.types.is_integer(kind) else "float64"
        return numeric_column(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), name)
    return text_column(column.cast(pa.string()).to_pylist())


def segment_texts(table: pa.Table, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The values of segment columns as text, "(missing)" where there is none."""
    found: dict[str, NDArray[Any]] = {}
    for name in names:
        if name in table.column_names:
            texts = table.column(name).cast(pa.string()).to_pylist()
            found[name] = np.array([MISSING if t is None else t for t in texts], object)
    return found


def entity_texts(table: pa.Table, columns: Sequence[str]) -> NDArray[Any] | None:
    """The entity of each row as one text; a row that lacks a part stands alone. None where no columns are declared."""
    if not columns:
        return None
    parts = [table.column(c).to_pylist() for c in columns]
    texts = [
        f"{_ALONE}{i}" if None in row else _SEPARATOR.join(map(str, row))
        for i, row in enumerate(zip(*parts, strict=True))
    ]
    return np.array(texts, np.str_)


def entity_fields(spec: PipelineSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Request fields that name the entity, and the label columns that they fill; empty where one fills none.

    A field that fills no label column is not known of training rows: then rows count one by one.
    """
    fields = () if spec.monitoring is None else spec.monitoring.drift.entity
    request = serving_of(spec).request
    columns = tuple(request[f].column or "" for f in fields)
    return (fields, columns) if all(columns) else ((), ())


def _sample(services: Services, spec: PipelineSpec, version: ModelVersion) -> Window:
    run = services.catalog.run(services.principal, version.run_id)
    inputs = [n for n, _ in contract_inputs(version)]
    segments = spec.monitored_segments()
    _, entity = entity_fields(spec)
    time = spec.label.observation_time
    wanted = list(dict.fromkeys([*inputs, *segments, *entity, time]))
    parts: list[pa.Table] = []
    for snapshot_id in run.facts.inputs:
        table = read_values(services, services.catalog.snapshot(services.principal, snapshot_id))
        absent = [c for c in wanted if c not in table.column_names]
        if absent:
            raise ReferenceUnusable(f"training snapshot {snapshot_id} of {_name(version)} has no columns {absent}")
        parts.append(table.select(wanted))
    if not parts or not sum(p.num_rows for p in parts):
        raise ReferenceUnusable(f"the training snapshots of {_name(version)} hold no rows")
    table = pa.concat_tables(parts).unify_dictionaries()
    times, _ = instants(table.column(time), time)
    texts = entity_texts(table, entity)
    identities = [
        f"{i}" if texts is None or texts[i].startswith(_ALONE) else f"{texts[i]}{_SEPARATOR}{week_key(int(times[i]))}"
        for i in range(table.num_rows)
    ]
    kept = np.flatnonzero(sampled_blocks(identities, SAMPLE_ROWS))
    table, times = table.take(pa.array(kept)), times[kept]
    histograms = reference_document(services, version)["features"]
    numeric = {n for n in inputs if histograms.get(n, {}).get("kind") == "numeric"}
    return Window(
        {n: _counted_column(table.column(n), n in numeric) for n in inputs},
        None if texts is None else texts[kept],
        times,
        segment_texts(table, segments),
    )


def _counted_column(column: pa.ChunkedArray, numeric: bool) -> Column:
    """A column as training counted it: numbers, or texts of categories of any type."""
    if not numeric:
        return text_column(column.cast(pa.string()).to_pylist())
    numbers = column.cast(pa.int8()) if pa.types.is_boolean(column.type) else column
    return numeric_column(numbers.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))


def _sample_table(sample: Window) -> pa.Table:
    columns: dict[str, Any] = {}
    for name, column in sample.columns.items():
        numeric = column.values.dtype == np.float64
        columns[name] = pa.array(column.values, pa.float64() if numeric else pa.string(), mask=column.missing)
    assert sample.times is not None
    columns[TIME] = pa.array(sample.times)
    if sample.entity is not None:
        columns[ENTITY] = pa.array(sample.entity.tolist(), pa.string())
    columns |= {f"{SEGMENT}{n}": pa.array(v.tolist(), pa.string()) for n, v in sample.segments.items()}
    return pa.table(columns)


def _read_sample(services: Services, digest: str, version: ModelVersion) -> Window:
    table = pq.read_table(io.BytesIO(services.store.get_bytes(digest)))
    columns: dict[str, Column] = {}
    for name, kind in contract_inputs(version):
        column = table.column(name)
        if pa.types.is_string(column.type):
            columns[name] = Column(kind, text_column(column.to_pylist()).values)
        else:
            columns[name] = numeric_column(column.to_numpy(), kind)
    named = [c for c in table.column_names if c.startswith(SEGMENT)]
    return Window(
        columns,
        np.array(table.column(ENTITY).to_pylist(), np.str_) if ENTITY in table.column_names else None,
        np.asarray(table.column(TIME).to_numpy(), np.int64),
        {c.removeprefix(SEGMENT): np.array(table.column(c).to_pylist(), object) for c in named},
    )


def _name(version: ModelVersion) -> str:
    return f"{version.model_id}@{version.version}"
