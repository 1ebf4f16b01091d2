"""`GET /`: for people who follow the address that `headway serve` prints."""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING

from headway.datasets.zones import iso
from headway.serving.http.v2 import request_body
from headway.serving.live.types import NotReady
from headway.serving.requests import example_request, is_asked_at

if TYPE_CHECKING:
    from headway.declaration import PipelineSpec
    from headway.serving.live.types import Engine

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{text-align:left;padding:.2rem 1rem .2rem 0;vertical-align:top}"
    "pre{background:#f3f3f3;padding:1rem;overflow-x:auto}"
)


def page(engine: Engine, url: str) -> str:
    """What is served, how fresh its sources are, and a command that asks for a prediction."""
    parts = [f"<p>World time {iso(engine.now())}. {_ready(engine)}</p>"]
    parts += [_model(engine, name, url) for name in engine.models()]
    marks = engine.status().watermarks
    parts.append("<h2>Sources</h2><table><tr><th>source</th><th>newest row loaded</th></tr>")
    parts += [
        f"<tr><td>{escape(source)}</td><td>{'none' if mark is None else iso(mark)}</td></tr>"
        for source, mark in marks.items()
    ]
    parts.append('</table><p><a href="/openapi.json">OpenAPI</a>, <a href="/metrics">metrics</a></p>')
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>Headway serves</title><style>{_STYLE}</style>"
    return f"{head}<h1>Headway</h1>{''.join(parts)}</html>"


def example_body(spec: PipelineSpec, now: int) -> dict[str, object]:
    """The body of `example_request`."""
    return request_body(spec, example_request(spec, now))


def not_now(spec: PipelineSpec, now: int) -> str:
    """Why nothing can be asked at a time, for people."""
    return f"nothing can be asked for as of {iso(now)}, which the calendar of {spec.label.source} does not hold"


def curl(url: str, model: str, request: dict[str, object]) -> str:
    """A command line that sends a request."""
    body = json.dumps(request, ensure_ascii=False).replace("'", "'\\''")
    return f"curl -s {url}/v2/models/{model}/infer -H 'content-type: application/json' -d '{body}'"


def _ready(engine: Engine) -> str:
    ready, reason = engine.ready()
    return "Requests are taken." if ready else f"Not ready: {escape(reason)}."


def _model(engine: Engine, name: str, url: str) -> str:
    try:
        served = engine.served(name)
    except NotReady as error:
        return f"<h2>{escape(name)}</h2><p>{escape(str(error))}</p>"
    rows = {
        "version": str(served.version),
        "artifact": served.artifact_digest,
        "endpoint epoch": str(served.endpoint_epoch),
        "contract": served.contract_hash,
        "degraded": ", ".join(served.degraded) or "no",
    }
    table = "".join(f"<tr><th>{k}</th><td>{escape(v)}</td></tr>" for k, v in rows.items())
    now = engine.now()
    line = curl(url, name, example_body(served.spec, now))
    how = (
        f"<pre>{escape(line)}</pre>" if is_asked_at(served.spec, now) else f"<p>{escape(not_now(served.spec, now))}</p>"
    )
    return f"<h2>{escape(name)}</h2><table>{table}</table>{how}"
