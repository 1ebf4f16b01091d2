"""`GET /openapi.json`: the server's paths, with the names and fields of what it serves now."""

from __future__ import annotations

from importlib.metadata import version as installed
from typing import TYPE_CHECKING, Any

from headway.serving.http.faults import MEANINGS
from headway.serving.http.page import example_body
from headway.serving.http.v2 import DATATYPES, MAX_ID, OUTPUT
from headway.serving.live.types import NotReady
from headway.serving.requests import serving_of

if TYPE_CHECKING:
    from headway.serving.live.types import Engine, Served

_PER_ROW = "One entry per row, also for one row."


def openapi(engine: Engine) -> dict[str, Any]:
    """The document (OpenAPI 3.1)."""
    served = _served(engine)
    model = {"name": "model", "in": "path", "required": True, "schema": _model_schema(engine)}
    number = {
        "name": "version",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "pattern": "^[1-9][0-9]{0,8}$"},
    }
    paths: dict[str, Any] = {
        "/": {"get": _get("A page for people.", "text/html")},
        "/v2": {"get": _get("Name, version and extensions of the server.")},
        "/v2/health/live": {"get": _get("The process answers.")},
        "/v2/health/ready": {"get": _get("Requests are taken.", errors=(503,))},
        "/v2/labels": {"post": _labels(engine)},
        "/metrics": {"get": _get("Prometheus metrics.", "text/plain")},
        "/openapi.json": {"get": _get("This document.")},
    }
    for path, named in (("/v2/models/{model}", [model]), ("/v2/models/{model}/versions/{version}", [model, number])):
        paths[path] = {"parameters": named, "get": _get("What the model takes and gives.", errors=(404, 503))}
        paths[f"{path}/ready"] = {"parameters": named, "get": _get("The model answers.", errors=(404, 503))}
        paths[f"{path}/infer"] = {"parameters": named, "post": _infer(engine, served)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headway",
            "version": installed("headway"),
            "description": "Open Inference Protocol v2. Errors by code:\n\n"
            + "\n".join(f"- {status} `{code}`: {text}" for code, (status, _, text) in MEANINGS.items()),
        },
        "paths": paths,
        "components": {"schemas": {"Error": _ERROR, "Parameters": _PARAMETERS}},
    }


def _served(engine: Engine) -> list[Served]:
    found: list[Served] = []
    for name in engine.models():
        try:
            found.append(engine.served(name))
        except NotReady:
            # What is not loaded yet cannot say what it takes; it is listed by name all the same.
            continue
    return found


def _model_schema(engine: Engine) -> dict[str, Any]:
    names = list(engine.models())
    return {"type": "string", "enum": names} if names else {"type": "string"}


def _get(summary: str, kind: str = "application/json", errors: tuple[int, ...] = ()) -> dict[str, Any]:
    content = {kind: {"schema": {"type": "object"} if kind == "application/json" else {"type": "string"}}}
    return {"summary": summary, "responses": {"200": {"description": summary, "content": content}} | _errors(errors)}


def _errors(codes: tuple[int, ...]) -> dict[str, Any]:
    return {
        str(code): {
            "description": "; ".join(
                f"{slug}: {text}" for slug, (status, _, text) in MEANINGS.items() if status == code
            ),
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
        for code in codes
    }


def _infer(engine: Engine, served: list[Served]) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": {"anyOf": [_request(s) for s in served]} if served else {"type": "object"}}
    if served:
        content["example"] = example_body(served[0].spec, engine.now())
    return {
        "summary": "Ask for probabilities, one per row.",
        "parameters": [
            {
                "name": "X-Deadline-Ms",
                "in": "header",
                "required": False,
                "description": "Milliseconds for the answer; none: the pipeline's declared deadline.",
                "schema": {"type": "integer", "minimum": 1, "maximum": 60_000},
            }
        ],
        "requestBody": {"required": True, "content": {"application/json": content}},
        "responses": {
            "200": {
                "description": "Probabilities, and what they rest on.",
                "content": {"application/json": {"schema": _ANSWER}},
            }
        }
        | _errors((400, 404, 408, 413, 415, 424, 500, 503, 504)),
    }


def _request(served: Served) -> dict[str, Any]:
    """The body that one model takes: at most one tensor per field."""
    serving = serving_of(served.spec)
    tensors = [_tensor(name, field.type, field.required) for name, field in serving.request.items()]
    return {
        "title": served.endpoint_id,
        "type": "object",
        "required": ["inputs"],
        "additionalProperties": False,
        "properties": {
            "id": {"type": "string", "maxLength": MAX_ID, "description": "Your own id; labels may name it."},
            "parameters": {
                "type": "object",
                "properties": {"timeout": {"type": "integer", "minimum": 1, "description": "Microseconds."}},
                "additionalProperties": {"type": ["string", "number", "boolean"]},
            },
            "inputs": {"type": "array", "minItems": 1, "items": {"anyOf": tensors}},
            "outputs": {
                "type": "array",
                "maxItems": 1,
                "items": {
                    "type": "object",
                    "required": ["name"],
                    "additionalProperties": False,
                    "properties": {"name": {"const": OUTPUT}},
                },
            },
        },
    }


def _tensor(name: str, kind: str, required: bool) -> dict[str, Any]:
    value: dict[str, Any] = {
        "string": {"type": "string", "maxLength": 1000},
        "date": {"type": "string", "format": "date"},
        "timestamp": {"type": "string", "format": "date-time"},
        "int64": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        "float64": {"type": "number"},
        "bool": {"type": "boolean"},
    }[kind]
    if not required:
        value = {"anyOf": [value, {"type": "null"}]}
    return {
        "type": "object",
        "required": ["name", "shape", "datatype", "data"],
        "additionalProperties": False,
        "properties": {
            "name": {"const": name},
            "datatype": {"const": DATATYPES[kind]},
            "shape": {
                "type": "array",
                "minItems": 1,
                "maxItems": 2,
                "items": {"type": "integer", "minimum": 1},
                "description": "[n] or [n, 1]; the same n in every tensor.",
            },
            "data": {"type": "array", "items": value},
        },
    }


def _labels(engine: Engine) -> dict[str, Any]:
    item = {
        "type": "object",
        "required": ["value"],
        "properties": {
            "prediction_id": {"type": "string"},
            "id": {"type": "string", "description": "The request's own id, with /<row> when it had several rows."},
            "match": {"type": "object", "description": "Request fields that name the event, as declared."},
            "value": {"description": "Of the target's declared type, never converted."},
            "observed_at": {"type": "string", "format": "date-time"},
            "source": {"enum": ["auto", "human"]},
            "source_id": {"type": "string"},
            "actor": {"type": "string"},
            "reason": {"type": "string"},
        },
    }
    body = {
        "type": "object",
        "required": ["labels"],
        "additionalProperties": False,
        "properties": {
            "labels": {"type": "array", "minItems": 1, "maxItems": 1000, "items": item},
            "endpoint": _model_schema(engine),
        },
    }
    results = {"type": "object", "properties": {"results": {"type": "array"}, "counts": {"type": "object"}}}
    return {
        "summary": "Say what became of predictions; repeating the same labels changes nothing.",
        "parameters": [
            {"name": "Idempotency-Key", "in": "header", "required": False, "schema": {"type": "string"}},
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {
                "description": "Per label: status (accepted, superseded, waiting, duplicate, refused) and reason.",
                "content": {"application/json": {"schema": results}},
            }
        }
        | _errors((400, 404, 408, 409, 413, 415, 422, 500, 503)),
    }


_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error", "code", "retry"],
    "properties": {
        "error": {"type": "string", "description": "What is wrong and what to do, for people."},
        "code": {"enum": list(MEANINGS)},
        "retry": {"type": "boolean", "description": "Whether the same request may work later; see Retry-After."},
        "field": {"type": "string"},
        "id": {"type": "string"},
        "prediction_ids": {"type": "array", "items": {"type": "string"}},
        "parameters": {"type": "object", "description": "The version that would have answered."},
    },
}
_BY_VIEW: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "array"}}
_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "endpoint": {"type": "string"},
        "model_version": {"type": "integer"},
        "artifact_digest": {"type": "string"},
        "endpoint_epoch": {"type": "integer"},
        "arm": {"const": "stable"},
        "contract_hash": {"type": "string"},
        "feature_set_version": {"type": "integer"},
        "degraded": {"type": "array", "items": {"type": "string"}, "description": "Codes of all rows; [] is good."},
        "prediction_ids": {"type": "array", "items": {"type": "string"}, "description": _PER_ROW},
        "observed_at": {"type": "array", "items": {"type": "string", "format": "date-time"}, "description": _PER_ROW},
        "feature_status": _BY_VIEW | {"description": f"fresh, stale or missing by view. {_PER_ROW}"},
        "feature_reason": _BY_VIEW | {"description": f"Why a view is not fresh. {_PER_ROW}"},
        "feature_as_of": _BY_VIEW | {"description": f"Newest event time by view, null: none. {_PER_ROW}"},
        "feature_age_ms": _BY_VIEW | {"description": f"Its age at the observation, null: none. {_PER_ROW}"},
        "request": {"type": "object", "description": "The request's parameters that mean nothing here, unchanged."},
    },
}
_ANSWER: dict[str, Any] = {
    "type": "object",
    "required": ["model_name", "model_version", "id", "outputs", "parameters"],
    "properties": {
        "model_name": {"type": "string"},
        "model_version": {"type": "string"},
        "id": {"type": "string"},
        "outputs": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"const": OUTPUT},
                    "datatype": {"const": "FP64"},
                    "shape": {"type": "array", "items": {"type": "integer"}},
                    "data": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1}},
                },
            },
        },
        "parameters": {"$ref": "#/components/schemas/Parameters"},
    },
}
