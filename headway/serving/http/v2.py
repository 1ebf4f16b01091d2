"""Requests and answers of the Open Inference Protocol v2, with its binary tensor extension.

One input tensor per declared request field, of shape [n] or [n, 1]: text, dates and times as BYTES, whole numbers as
INT64, decimal ones as FP64, flags as BOOL. A missing optional field is null in every row; in JSON data null stands for
one missing value (binary data cannot say null). The output is `probability`, FP64, shape [n].

Protocol: https://github.com/open-inference/open-inference-protocol and
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import msgspec
import numpy as np
import pyarrow as pa

from headway.datasets.text import ARROW_TYPES
from headway.datasets.zones import iso
from headway.declaration import PipelineSpec, RequestColumn
from headway.serving.http.faults import Fault
from headway.serving.http.limits import Limits
from headway.serving.http.strict_json import parse_json
from headway.serving.live.types import Inference, Served
from headway.serving.requests import (
    RequestProblem,
    RequestsRefused,
    ValueRefused,
    is_personal,
    parse_value,
    serving_of,
)

DATATYPES: Mapping[str, str] = {
    "string": "BYTES",
    "date": "BYTES",
    "timestamp": "BYTES",
    "int64": "INT64",
    "float64": "FP64",
    "bool": "BOOL",
}
OUTPUT = "probability"
MAX_ID = 200

_INT64 = 2**63
_WIDTHS = {"INT64": 8, "FP64": 8, "BOOL": 1}
_SHAPES: Mapping[str, str] = {"INT64": "<i8", "FP64": "<f8"}
_TOP = ("id", "parameters", "inputs", "outputs")
_TENSOR = ("name", "shape", "datatype", "parameters", "data")
_OUTPUT = ("name", "parameters")

Parameters = Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class Asked:
    """An inference request as it was meant: the rows as `read_requests` would give them, and how to answer.

    `timeout_s` is what the `timeout` parameter said. `parameters` are those that mean nothing here; they come back
    unchanged in the answer.
    """

    rows: pa.Table
    request_id: str | None
    timeout_s: float | None
    binary: bool
    parameters: Parameters


def read_inference(body: bytes, header_length: str | None, served: Served, limits: Limits) -> Asked:
    """Read and check the body of an inference request.

    Args:
        body: JSON, followed by binary tensor data if `header_length` is given.
        header_length: the header `Inference-Header-Content-Length`.
        served: what the request is for.
        limits: of the server.

    Raises:
        Fault: the document breaks the protocol or a limit.
        RequestsRefused: fields or values that are not as declared; every row is looked at first.
    """
    head, tail = _split(body, header_length)
    document = _object(parse_json(head, limits), "the body", _TOP)
    known, others = _parameters(document, "the body", ("timeout", "binary_data_output"))
    return Asked(
        rows=read_rows(document, tail, served.spec),
        request_id=_request_id(document),
        timeout_s=_timeout(known.get("timeout")),
        binary=_outputs(document, _flag(known, "binary_data_output", "the body")),
        parameters=others,
    )


def request_body(spec: PipelineSpec, request: Mapping[str, Any]) -> dict[str, object]:
    """The body that asks for one row: a tensor of shape [1] for each field that is not null."""
    declared = serving_of(spec).request
    inputs = [
        {"name": name, "shape": [1], "datatype": DATATYPES[declared[name].type], "data": [value]}
        for name, value in request.items()
        if value is not None
    ]
    return {"inputs": inputs}


def read_rows(document: Mapping[str, Any], tail: memoryview, spec: PipelineSpec) -> pa.Table:
    """The rows of a document's `inputs`, whose binary data is `tail`. Raises as `read_inference`."""
    return _rows(_tensors(document, tail, spec), spec)


def answer(asked: Asked, answered: Sequence[Inference], request_id: str) -> tuple[bytes, int | None]:
    """The body of an answer, and how much of it is JSON when binary data follows (else None)."""
    served = answered[0].served
    output: dict[str, Any] = {"name": OUTPUT, "datatype": "FP64", "shape": [len(answered)]}
    document = {
        "model_name": served.endpoint_id,
        "model_version": str(served.version),
        "id": request_id,
        "outputs": [output],
        "parameters": answer_parameters(answered) | ({"request": asked.parameters} if asked.parameters else {}),
    }
    if not asked.binary:
        output["data"] = [a.probability for a in answered]
        return msgspec.json.encode(document), None
    data = struct.pack(f"<{len(answered)}d", *(a.probability for a in answered))
    output["parameters"] = {"binary_data_size": len(data)}
    head = msgspec.json.encode(document)
    return head + data, len(head)


def answer_parameters(answered: Sequence[Inference]) -> dict[str, Any]:
    """What every answer says of itself. What differs by row is a list with one entry per row, also for one row."""
    views = answered[0].views
    return served_parameters(answered[0].served) | {
        "degraded": list(dict.fromkeys(code for a in answered for code in a.degraded)),
        "prediction_ids": [a.prediction_id for a in answered],
        "observed_at": [iso(a.observed) for a in answered],
        "feature_status": {v: [a.views[v].status for a in answered] for v in views},
        "feature_reason": {v: [a.views[v].reason for a in answered] for v in views},
        "feature_as_of": {v: [_when(a.views[v].time) for a in answered] for v in views},
        "feature_age_ms": {v: [_milliseconds(a.views[v].age) for a in answered] for v in views},
    }


def served_parameters(served: Served) -> dict[str, Any]:
    """What answers and errors alike say of the version that answers."""
    return {
        "endpoint": served.endpoint_id,
        "model_version": served.version,
        "artifact_digest": served.artifact_digest,
        "endpoint_epoch": served.endpoint_epoch,
        "arm": served.arm,
        "contract_hash": served.contract_hash,
        "feature_set_version": served.feature_set_version,
        "degraded": list(served.degraded),
    }


def metadata(served: Served) -> dict[str, Any]:
    """Model metadata: the declared request fields as inputs, the probability as output."""
    fields = serving_of(served.spec).request
    return {
        "name": served.endpoint_id,
        "versions": [str(served.version)],
        "platform": "headway",
        "inputs": [
            {
                "name": name,
                "datatype": DATATYPES[field.type],
                "shape": [-1],
                "parameters": {"type": field.type, "required": field.required, "description": field.description},
            }
            for name, field in fields.items()
        ],
        "outputs": [{"name": OUTPUT, "datatype": "FP64", "shape": [-1]}],
        "parameters": served_parameters(served),
    }


def _when(moment: int | None) -> str | None:
    return None if moment is None else iso(moment)


def _milliseconds(age: float | None) -> int | None:
    return None if age is None else round(age * 1000)


def _split(body: bytes, header_length: str | None) -> tuple[bytes, memoryview]:
    if header_length is None:
        return body, memoryview(b"")
    if not (header_length.isascii() and header_length.isdigit()) or int(header_length) > len(body):
        text = f"Inference-Header-Content-Length is {header_length!r:.40}, the body has {len(body):,} bytes"
        raise Fault("bad_request", text)
    size = int(header_length)
    return body[:size], memoryview(body)[size:]


def _object(value: object, where: str, allowed: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Fault("bad_request", f"{where} must be an object with the members {', '.join(allowed)}")
    found = cast("dict[str, Any]", value)
    for name in found:
        if name not in allowed:
            text = f"{where} has a member {name!r:.80}, which means nothing here; known are {', '.join(allowed)}"
            raise Fault("bad_request", text, field=name[:80])
    return found


def _parameters(owner: Mapping[str, Any], where: str, known: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters that are known and those that are not; all of them are text, numbers or flags."""
    given: object = owner.get("parameters")
    if given is None:
        return {}, {}
    if not isinstance(given, dict):
        raise Fault("bad_request", f"the parameters of {where} must be an object", field="parameters")
    found = cast("dict[str, object]", given)
    for name, value in found.items():
        whole = isinstance(value, int) and not -_INT64 <= value < _INT64
        if whole or not isinstance(value, str | int | float | bool):
            text = f"parameter {name!r:.80} of {where} must be text, a number in 64 bits, true or false"
            raise Fault("bad_request", text, field="parameters")
    return {n: v for n, v in found.items() if n in known}, {n: v for n, v in found.items() if n not in known}


def _flag(parameters: Mapping[str, object], name: str, where: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise Fault("bad_request", f"parameter {name!r} of {where} must be true or false", field="parameters")
    return value


def _timeout(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _INT64:
        text = f"timeout is {value!r:.40}; it is a whole number of microseconds, more than 0"
        raise Fault("bad_request", text, field="timeout")
    return value / 1_000_000


def _request_id(document: Mapping[str, Any]) -> str | None:
    given: object = document.get("id")
    if given is None or given == "":
        return None
    if not isinstance(given, str) or len(given) > MAX_ID or not given.isprintable():
        raise Fault("bad_request", f"id must be printable text of at most {MAX_ID} characters", field="id")
    return given


def _outputs(document: Mapping[str, Any], binary: bool) -> bool:
    """Whether the output is answered as binary data; what is asked for must be the one output there is."""
    given: object = document.get("outputs")
    if given is None:
        return binary
    if not isinstance(given, list) or len(cast("list[object]", given)) > 1:
        raise Fault("bad_request", f"outputs must be a list of at most one, {OUTPUT}", field="outputs")
    for item in cast("list[object]", given):
        output = _object(item, "an output", _OUTPUT)
        if output.get("name") != OUTPUT:
            text = f"there is no output {output.get('name')!r:.80}; the only one is {OUTPUT}"
            raise Fault("bad_request", text, field="outputs")
        known, others = _parameters(output, f"output {OUTPUT}", ("binary_data",))
        if others:
            raise Fault("bad_request", f"parameters {sorted(others)!r:.120} of an output mean nothing", field="outputs")
        binary = _flag(known, "binary_data", f"output {OUTPUT}") if "binary_data" in known else binary
    return binary


@dataclass(frozen=True)
class _Tensor:
    """One input: as many values as it has rows, as JSON would give them."""

    name: str
    rows: int
    values: list[Any]


def _tensors(document: Mapping[str, Any], tail: memoryview, spec: PipelineSpec) -> dict[str, _Tensor]:
    given: object = document.get("inputs")
    if not isinstance(given, list):
        raise Fault("bad_request", "inputs must be a list of tensors, one per request field", field="inputs")
    found: dict[str, _Tensor] = {}
    for position, item in enumerate(cast("list[object]", given)):
        entry = _object(item, f"input {position}", _TENSOR)
        name: object = entry.get("name")
        if not isinstance(name, str):
            raise Fault("bad_request", f"input {position} has no name; inputs are matched by name", field="inputs")
        if name in found:
            raise Fault("contract_violation", f"input {name!r:.80} stands twice; give it once", field=name[:80])
        tensor, tail = _tensor(name, entry, tail, spec)
        found[name] = tensor
    if len(tail):
        raise Fault("bad_request", f"{len(tail):,} bytes follow the last binary tensor")
    return found


def _tensor(name: str, entry: Mapping[str, Any], tail: memoryview, spec: PipelineSpec) -> tuple[_Tensor, memoryview]:
    """The tensor, and what is left of the binary data."""
    serving = serving_of(spec)
    field = serving.request.get(name)
    if field is None:
        raise _unknown(spec, name)
    wanted = DATATYPES[field.type]
    if entry.get("datatype") != wanted:
        text = f"{name}: datatype {entry.get('datatype')!r:.40}, needed is {wanted} ({field.type})"
        raise Fault("contract_violation", text, field=name)
    rows = _row_count(name, entry.get("shape"), serving.max_rows)
    known, others = _parameters(entry, f"input {name}", ("binary_data_size",))
    if others:
        text = f"{name}: parameters {sorted(others)!r:.120} of an input mean nothing here"
        raise Fault("bad_request", text, field=name)
    if ("data" in entry) == ("binary_data_size" in known):
        raise Fault("bad_request", f"{name}: give either data or the parameter binary_data_size", field=name)
    if "data" in entry:
        return _Tensor(name, rows, _json_values(name, entry["data"], entry["shape"])), tail
    size = known["binary_data_size"]
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(tail):
        text = f"{name}: binary_data_size is {size!r:.40}, {len(tail):,} bytes are left of the body"
        raise Fault("bad_request", text, field=name)
    return _Tensor(name, rows, _binary_values(name, wanted, tail[:size], rows)), tail[size:]


def _unknown(spec: PipelineSpec, name: str) -> Fault:
    fields = ", ".join(serving_of(spec).request)
    if name in spec.feature_names():
        text = f"{name!r:.80} is a feature, and Headway computes features itself; leave it out"
    else:
        text = f"{name!r:.80} is no field of a request; leave it out; the fields are {fields}"
    return Fault("contract_violation", text, field=name[:80])


def _row_count(name: str, shape: object, max_rows: int) -> int:
    sizes = cast("list[object]", shape) if isinstance(shape, list) else []
    rows = sizes[0] if len(sizes) in (1, 2) else None
    if type(rows) is not int or (len(sizes) == 2 and not (type(sizes[1]) is int and sizes[1] == 1)):
        text = f"{name}: the shape is {_listed(shape)}, needed is [n] or [n, 1] with whole numbers"
        raise Fault("contract_violation", text, field=name)
    if rows < 1:
        text = f"{name}: the shape {_listed(shape)} has {rows} rows; give at least one"
        raise Fault("contract_violation", text, field=name)
    if rows > max_rows:
        text = f"{name}: the shape {_listed(shape)} has {rows} rows, the limit is {max_rows:,}; send fewer at once"
        raise Fault("too_many_rows", text, field=name)
    return rows


def _listed(shape: object) -> str:
    return f"{shape!r:.60}" if isinstance(shape, list) else f"{type(shape).__name__}"


def _json_values(name: str, data: object, shape: Sequence[int]) -> list[Any]:
    """The values, flat: [[1], [2]] says the same as [1, 2] where the shape is [2, 1]."""
    if not isinstance(data, list):
        raise Fault("contract_violation", f"{name}: data must be a list", field=name)
    values = cast("list[Any]", data)
    if len(shape) == 2 and any(isinstance(v, list) for v in values):
        if not all(isinstance(v, list) and len(cast("list[Any]", v)) == 1 for v in values):
            text = f"{name}: data is nested unevenly; shape {list(shape)} takes {shape[0]} lists of one value"
            raise Fault("contract_violation", text, field=name)
        values = [cast("list[Any]", v)[0] for v in values]
    _require_count(name, len(values), shape[0])
    return values


def _require_count(name: str, found: int, rows: int) -> None:
    if found != rows:
        text = f"{name}: data has {found:,} values, the shape says {rows:,}"
        raise Fault("contract_violation", text, field=name)


def _binary_values(name: str, datatype: str, data: memoryview, rows: int) -> list[Any]:
    if datatype == "BYTES":
        return _texts(name, data, rows)
    width = _WIDTHS[datatype]
    if len(data) != width * rows:
        text = f"{name}: {len(data):,} bytes of {datatype}, the shape says {rows:,} values of {width}"
        raise Fault("contract_violation", text, field=name)
    if datatype != "BOOL":
        return np.frombuffer(data, _SHAPES[datatype]).tolist()
    if any(b > 1 for b in data):
        raise Fault("contract_violation", f"{name}: a BOOL is one byte, 0 or 1", field=name)
    return [b == 1 for b in data]


def _texts(name: str, data: memoryview, rows: int) -> list[str]:
    """BYTES: each value is preceded by its length, four bytes, little-endian."""
    found: list[str] = []
    at = 0
    while at < len(data) and len(found) <= rows:
        size = int.from_bytes(data[at : at + 4], "little")
        end = at + 4 + size
        if end > len(data):
            raise Fault("contract_violation", f"{name}: value {len(found) + 1} runs past the tensor's end", field=name)
        try:
            found.append(str(data[at + 4 : end], "utf-8"))
        except UnicodeDecodeError as error:
            raise Fault("contract_violation", f"{name}: value {len(found) + 1} is not UTF-8", field=name) from error
        at = end
    _require_count(name, len(found), rows)
    return found


def _rows(tensors: Mapping[str, _Tensor], spec: PipelineSpec) -> pa.Table:
    fields = serving_of(spec).request
    counts = {t.rows for t in tensors.values()}
    if not counts:
        raise Fault("contract_violation", f"there are no inputs; the fields are {', '.join(fields)}", field="inputs")
    if len(counts) > 1:
        text = ", ".join(f"{t.name} {t.rows}" for t in tensors.values())
        raise Fault("contract_violation", f"the inputs differ in their number of rows: {text}", field="inputs")
    problems: list[RequestProblem] = []
    rows = counts.pop()
    columns: list[list[Any]] = []
    for name, field in fields.items():
        if name in tensors:
            values = enumerate(tensors[name].values, 1)
            columns.append([_value(spec, name, field, value, number, problems) for number, value in values])
        else:
            if field.required:
                problems.append(RequestProblem(0, name, "the required field is missing", f"give a {field.type}"))
            columns.append([None] * rows)
    if problems:
        raise RequestsRefused("the request", problems)
    # For a few rows one array of structs costs half of what an array per column does.
    kind = _struct(tuple((name, field.type) for name, field in fields.items()))
    structs = pa.array([dict(zip(fields, row, strict=True)) for row in zip(*columns, strict=True)], kind)
    return pa.Table.from_batches([pa.RecordBatch.from_struct_array(structs)])


@lru_cache(maxsize=64)
def _struct(fields: tuple[tuple[str, str], ...]) -> pa.StructType:
    return pa.struct([(name, ARROW_TYPES[kind]) for name, kind in fields])


def _value(
    spec: PipelineSpec, name: str, field: RequestColumn, value: object, number: int, problems: list[RequestProblem]
) -> Any:  # noqa: ANN401
    """The value as Arrow takes it; None when it is null or refused."""
    if value is None:
        if field.required:
            problems.append(RequestProblem(number, name, "the required field is null", f"give a {field.type}"))
        return None
    try:
        return parse_value(field.type, value)
    except ValueRefused as refused:
        shown = "a value (withheld: personal)" if is_personal(spec, field) else repr(value)[:80]
        problems.append(RequestProblem(number, name, f"{shown} {refused.message}", refused.remedy))
        return None


def deadline_s(header: str | None, timeout_s: float | None, declared_s: float, longest_s: float) -> float:
    """Seconds that a request has for its answer: the shorter of header and parameter, else what is declared.

    Raises:
        Fault: the header is no whole number of milliseconds, or more time is asked for than anybody gets.
    """
    asked: list[float] = [] if timeout_s is None else [timeout_s]
    if header is not None:
        if not (header.isascii() and header.isdigit() and len(header) <= 9) or int(header) == 0:
            text = f"X-Deadline-Ms is {header!r:.40}; it is a whole number of milliseconds, more than 0"
            raise Fault("bad_request", text, field="X-Deadline-Ms")
        asked.append(int(header) / 1000)
    if not asked:
        return min(declared_s, longest_s)
    found = min(asked)
    if not math.isfinite(found) or found > longest_s:
        raise Fault("bad_request", f"a deadline of {found:g} s was asked for; the longest is {longest_s:g} s")
    return found
