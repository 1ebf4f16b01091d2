"""Whatever is sent, nothing fails on our side: cases of the OpenAPI document, arbitrary JSON, arbitrary bytes."""

import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.core.transport import Response
from support.http_engine import INFER, MODEL, VALUES, VERSION, DoubleEngine, app_of, asked, infer, send

from headway.serving.http.faults import MEANINGS

APP = app_of(DoubleEngine())
schema = schemathesis.openapi.from_asgi("/openapi.json", APP)

SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
SETTINGS = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=SLOW, database=None)
Json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
Tensor = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(list(VALUES)) | Json,
        "shape": st.lists(st.integers(-1, 3), max_size=3) | Json,
        "datatype": st.sampled_from(["BYTES", "INT64", "FP64", "BOOL", "FP32"]) | Json,
        "data": st.lists(Json, max_size=3) | Json,
        "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": Json}) | Json,
        "x": Json,
    },
)
Document = st.fixed_dictionaries(
    {}, optional={"inputs": st.lists(Tensor, max_size=3) | Json, "outputs": Json, "parameters": Json, "id": Json}
)


@schema.parametrize()  # pyright: ignore[reportUntypedFunctionDecorator]
@SETTINGS
def test_cases_of_the_document_never_fail_on_our_side(case: Any) -> None:  # noqa: ANN401
    answer: Response = case.call()
    # Whoever asks for an answer within a millisecond may be told that it has passed.
    assert answer.status_code < 500 or answer.json()["code"] == "deadline_exceeded", answer.text


def test_the_document_lists_every_route_and_every_code() -> None:
    told = send(APP, "GET", "/openapi.json").json()
    routes = {(getattr(r, "path", ""), m.lower()) for r in APP.routes for m in getattr(r, "methods", ()) if m != "HEAD"}
    listed = {(p, m) for p, methods in told["paths"].items() for m in methods if m != "parameters"}
    assert listed == routes
    assert told["components"]["schemas"]["Error"]["properties"]["code"]["enum"] == list(MEANINGS)
    assert told["paths"]["/v2/models/{model}/infer"]["parameters"][0]["schema"]["enum"] == [MODEL]


def test_the_example_is_answered() -> None:
    told = send(APP, "GET", "/openapi.json").json()
    content = told["paths"]["/v2/models/{model}/infer"]["post"]["requestBody"]["content"]["application/json"]
    assert infer(APP, content["example"]).status_code == 200


def test_the_page_names_what_is_served_and_escapes_the_rest() -> None:
    text = send(APP, "GET", "/").text
    assert f"<h2>{MODEL}</h2>" in text
    assert f"<td>{VERSION}</td>" in text
    assert "2013-03-31T23:59:00Z" in text
    assert "curl -s http://headway/v2/models/flight_delay/infer" in text
    assert send(APP, "GET", "/", headers={"host": 'a"><script>x</script>'}).text.count("<script>") == 0


@given(Document | Json)
@settings(max_examples=150, deadline=None, derandomize=True)
@pytest.mark.filterwarnings("ignore")
def test_arbitrary_json_never_fails_on_our_side(document: Any) -> None:  # noqa: ANN401
    assert infer(APP, document).status_code < 500
    assert send(APP, "POST", "/v2/labels", json=document).status_code < 500


@given(st.binary(max_size=60) | st.builds(lambda cut: _good()[:cut], st.integers(0, 400)), st.integers(0, 80))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_arbitrary_bytes_never_fail_on_our_side(body: bytes, length: int) -> None:
    packed = {"content-encoding": "gzip"}
    binary = {"inference-header-content-length": str(length), "content-type": "application/octet-stream"}
    for headers in ({}, packed, binary):
        assert send(APP, "POST", INFER, content=body, headers=headers).status_code < 500


def _good() -> bytes:
    return json.dumps(asked()).encode()
