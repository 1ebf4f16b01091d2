"""Requests are taken exactly as declared, in JSON and in binary tensors, or refused by name; digits are kept."""

import asyncio
import json
import struct
import unicodedata
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.http_engine import (
    INFER,
    MODEL,
    VALUES,
    VERSION,
    DoubleEngine,
    app_of,
    asked,
    client_of,
    infer,
    send,
    spec_of_double,
    tensor,
)

from headway.serving.http.v2 import DATATYPES
from headway.serving.live.types import ScoringFailed
from headway.serving.requests import RequestsRefused, read_requests

OCTETS = {"content-type": "application/octet-stream"}


@pytest.fixture
def engine() -> DoubleEngine:
    return DoubleEngine()


def packed(kind: str, values: list[Any]) -> bytes:
    """Values as the binary extension has them."""
    if kind == "BYTES":
        texts = [v.encode() for v in values]
        return b"".join(struct.pack("<I", len(t)) + t for t in texts)
    return b"".join(struct.pack({"INT64": "<q", "FP64": "<d", "BOOL": "<?"}[kind], v) for v in values)


def binary(**changes: bytes) -> tuple[bytes, dict[str, str]]:
    """A good request whose tensors are binary; a change is a tensor's bytes."""
    serving = spec_of_double().serving
    assert serving is not None
    inputs, tail = [], b""
    for name, value in VALUES.items():
        kind = DATATYPES[serving.request[name].type]
        data = changes.get(name, packed(kind, [value]))
        entry = tensor(name, value) | {"parameters": {"binary_data_size": len(data)}}
        del entry["data"]
        inputs.append(entry)
        tail += data
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return head + tail, OCTETS | {"inference-header-content-length": str(len(head))}


def refused(engine: DoubleEngine, document: object, code: str = "contract_violation", status: int = 400) -> str:
    answer = infer(app_of(engine), document)
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert engine.seen == []
    text: str = answer.json()["error"]
    return text


def test_a_good_request_reaches_the_engine_as_read_requests_gives_it(
    engine: DoubleEngine,
    tmp_path: Any,  # noqa: ANN401
) -> None:
    assert infer(app_of(engine), asked(2)).status_code == 200
    file = tmp_path / "requests.json"
    file.write_text(json.dumps([dict(VALUES)] * 2))
    assert engine.seen[0].equals(read_requests(file, spec_of_double()))


def test_every_answer_says_what_it_rests_on(engine: DoubleEngine) -> None:
    engine.degraded = ("catalog_unreachable",)
    told = infer(app_of(engine), asked(2) | {"id": "mine"}).json()
    assert (told["model_name"], told["model_version"], told["id"]) == (MODEL, str(VERSION), "mine")
    said = told["parameters"]
    assert said["model_version"] == VERSION
    assert said["endpoint_epoch"] == 7
    assert said["arm"] == "stable"
    assert said["artifact_digest"].startswith("sha256:a")
    assert said["contract_hash"].startswith("sha256:c")
    assert said["feature_set_version"] == 1
    assert said["degraded"] == ["catalog_unreachable"]
    assert said["prediction_ids"] == ["p001-0", "p001-1"]
    assert said["observed_at"] == ["2013-04-01T00:00:00Z"] * 2
    assert said["feature_status"] == {"weather_at_origin": ["fresh"] * 2, "aircraft": ["missing"] * 2}
    assert said["feature_reason"]["aircraft"] == ["no_row"] * 2
    assert said["feature_as_of"]["weather_at_origin"] == ["2013-03-31T22:59:59.877000Z"] * 2
    assert said["feature_age_ms"] == {"weather_at_origin": [3_600_123] * 2, "aircraft": [None] * 2}
    assert engine.callers == ["mine"]


def test_errors_name_the_version_that_would_have_answered_and_the_request(engine: DoubleEngine) -> None:
    told = infer(app_of(engine), {"inputs": [], "id": "mine"}).json()
    assert told["parameters"]["model_version"] == VERSION
    assert told["parameters"]["endpoint_epoch"] == 7
    assert told["id"]


def test_column_shapes_say_the_same_flat_and_nested(engine: DoubleEngine) -> None:
    app = app_of(engine)
    for data in (["a", "b"], [["a"], ["b"]]):
        document = asked(2)
        document["inputs"][0] |= {"shape": [2, 1], "data": data}
        assert infer(app, document).status_code == 200
    assert engine.seen[0].equals(engine.seen[1])
    assert engine.seen[0].column("carrier").to_pylist() == ["a", "b"]


def test_null_and_absence_mean_the_same_where_a_field_is_optional(engine: DoubleEngine) -> None:
    app = app_of(engine)
    document = asked()
    document["inputs"] = [t for t in document["inputs"] if t["name"] not in ("tailnum", "share")]
    assert infer(app, document).status_code == 200
    document["inputs"] += [tensor("tailnum", None), tensor("share", None)]
    assert infer(app, document).status_code == 200
    assert engine.seen[0].equals(engine.seen[1])
    assert engine.seen[0].column("tailnum").to_pylist() == [None]


def test_field_F07_names_decide_and_never_positions(engine: DoubleEngine) -> None:
    app = app_of(engine)
    document = asked()
    document["inputs"].reverse()
    assert infer(app, document).status_code == 200
    assert infer(app, asked()).status_code == 200
    assert engine.seen.pop().equals(engine.seen.pop())
    assert "'gate' is no field of a request" in refused(engine, {"inputs": [*asked()["inputs"], tensor("gate", "x")]})
    view = next(iter(spec_of_double().features.views))
    feature = f"{view}__{next(iter(spec_of_double().features.views[view].features))}"
    assert "is a feature" in refused(engine, {"inputs": [*asked()["inputs"], tensor(feature, "x")]})
    assert "flight: the required field is missing" in refused(engine, asked(flight=None))
    assert "'carrier' stands twice" in refused(engine, {"inputs": [*asked()["inputs"], tensor("carrier", "x")]})
    unnamed = tensor("carrier", "x")
    del unnamed["name"]
    assert "input 0 has no name" in refused(engine, {"inputs": [unnamed]}, "bad_request")


@pytest.mark.parametrize(
    ("shape", "data", "code", "words"),
    [
        ([-1, 16], [0, 1], "contract_violation", "[-1, 16]"),
        ([-1], [0], "contract_violation", "-1 rows"),
        ([0, 3], [], "contract_violation", "[0, 3]"),
        ([0], [], "contract_violation", "0 rows; give at least one"),
        ([0, 1], [], "contract_violation", "0 rows; give at least one"),
        ([2147483648, 2], [0], "contract_violation", "[2147483648, 2]"),
        ([4294967297], [0], "too_many_rows", "4294967297 rows, the limit is 50"),
        ([2**64 + 1], [0], "too_many_rows", "the limit is 50"),
        ([1e3], [0], "contract_violation", "[1000.0]"),
        ([True], [0], "contract_violation", "[True]"),
        ([], [0], "contract_violation", "the shape is []"),
        (None, [0], "contract_violation", "the shape is NoneType"),
        ([2, 2], [[1, 2], [3, 4]], "contract_violation", "[2, 2]"),
        ([2, 2], [1, 2, 3, 4], "contract_violation", "[2, 2]"),
        ([2, 2], [1, 2, 3, 4, 5], "contract_violation", "[2, 2]"),
        ([2], [1], "contract_violation", "1 values, the shape says 2"),
        ([2], [1, 2, 3], "contract_violation", "3 values, the shape says 2"),
        ([2, 1], [[1], [2, 3]], "contract_violation", "nested unevenly"),
        ([2, 1], [[1], 2], "contract_violation", "nested unevenly"),
        ([1], [[1]], "contract_violation", "is a list, needed is a whole number"),
        ([1], {"0": 1}, "contract_violation", "data must be a list"),
        ([2], [1, 2], "contract_violation", "differ in their number of rows"),
    ],
)
def test_field_G01_wrong_shapes_are_refused_with_the_input_and_the_counts(
    engine: DoubleEngine,
    shape: object,
    data: object,
    code: str,
    words: str,
) -> None:
    document = asked(flight=None)
    document["inputs"].append({"name": "flight", "shape": shape, "datatype": "INT64", "data": data})
    text = refused(engine, document, code, 413 if code == "too_many_rows" else 400)
    assert "flight" in text
    assert words in text
    assert infer(app_of(engine), asked()).status_code == 200


def test_field_G03_parallel_callers_get_their_own_rows(engine: DoubleEngine) -> None:
    async def all_at_once() -> list[tuple[int, Any]]:
        engine.hold = asyncio.Event()
        async with client_of(app_of(engine)) as client:
            rows = [3 if n == 7 else 0 if n == 13 else 1 for n in range(50)]
            work = [
                asyncio.ensure_future(client.post(INFER, json=asked(r, flight=n, tailnum=f"N{n}") | {"id": f"c{n}"}))
                for n, r in enumerate(rows)
            ]
            while len(engine.seen) < 49:
                await asyncio.sleep(0)
            engine.hold.set()
            return [(r, (await w).json()) for r, w in zip(rows, work, strict=True)]

    for number, (rows, told) in enumerate(asyncio.run(all_at_once())):
        if rows == 0:
            assert told["code"] == "contract_violation"
            continue
        assert told["id"] == f"c{number}"
        assert told["outputs"][0]["data"] == [number / 1e6] * rows
        assert len(told["parameters"]["prediction_ids"]) == rows
    engine.error = ScoringFailed("wrong_row_count", "2 rows for 3")
    answer = infer(app_of(engine), asked(3))
    assert (answer.status_code, answer.json()["code"]) == (500, "wrong_row_count")


def test_field_G05_a_row_that_the_model_refuses_fails_its_own_request(engine: DoubleEngine) -> None:
    class Picky(DoubleEngine):
        async def infer(self, served: Any, requests: pa.Table, **more: Any) -> Any:  # noqa: ANN401
            answers = await super().infer(served, requests, **more)
            if requests.column("flight").to_pylist() == [4]:
                raise ScoringFailed("model_refused", "flight 4", ("p4",))
            return answers

    async def nine() -> list[Any]:
        async with client_of(app_of(Picky())) as client:
            return await asyncio.gather(*(client.post(INFER, json=asked(flight=n)) for n in range(9)))

    answers = asyncio.run(nine())
    assert [a.status_code for a in answers] == [500 if n == 4 else 200 for n in range(9)]
    bad = answers[4].json()
    assert (bad["code"], bad["retry"], bad["prediction_ids"]) == ("model_refused", False, ["p4"])
    assert bad["id"]


def test_field_G09_numbers_and_parameters_keep_their_type_and_their_digits(engine: DoubleEngine) -> None:
    engine.answer = lambda rows: rows.column("share").to_pylist()
    app = app_of(engine)
    document = asked(flight=9007199254740993, share=0.1)
    document["parameters"] = {"threshold": 0.4, "n": 3, "s": "3", "flag": True}
    answer = infer(app, document)
    assert engine.seen[0].column("flight").to_pylist() == [9007199254740993]
    assert '"data":[0.1]' in answer.text
    assert '"request":{"threshold":0.4,"n":3,"s":"3","flag":true}' in answer.text
    assert '"model_version":3,' in answer.text
    assert '"feature_age_ms":{"weather_at_origin":[3600123]' in answer.text
    sent = asked()
    sent["inputs"][7] |= {"datatype": "FP32", "data": [0.1]}
    engine.seen.clear()
    assert "share: datatype 'FP32', needed is FP64" in refused(engine, sent)


@given(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=20))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_json_and_binary_tensors_say_the_same(number: int, share: float, text: str) -> None:
    text = unicodedata.normalize("NFC", text)
    engine = DoubleEngine(answer=lambda rows: rows.column("share").to_pylist())
    app = app_of(engine)
    json_answer = infer(app, asked(flight=number, share=share, tailnum=text))
    body, headers = binary(
        flight=packed("INT64", [number]), share=packed("FP64", [share]), tailnum=packed("BYTES", [text])
    )
    binary_answer = send(app, "POST", INFER, content=body, headers=headers)
    assert (json_answer.status_code, binary_answer.status_code) == (200, 200), json_answer.text
    assert engine.seen[0].equals(engine.seen[1])
    head = int(binary_answer.headers["inference-header-content-length"])
    assert binary_answer.headers["content-type"] == "application/octet-stream"
    assert struct.unpack("<d", binary_answer.content[head:])[0] == json_answer.json()["outputs"][0]["data"][0]
    assert json.loads(binary_answer.content[:head])["outputs"][0]["parameters"] == {"binary_data_size": 8}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"flight": b"\0" * 7}, "7 bytes of INT64"),
        ({"flight": b"\0" * 16}, "16 bytes of INT64"),
        ({"charter": b"\2"}, "0 or 1"),
        ({"share": struct.pack("<d", float("nan"))}, "not finite"),
        ({"share": struct.pack("<d", float("inf"))}, "not finite"),
        ({"carrier": b"\xff\0\0\0A"}, "runs past"),
        ({"carrier": b"\1\0"}, "runs past"),
        ({"carrier": b"\1\0\0\0\xff"}, "not UTF-8"),
        ({"carrier": packed("BYTES", ["A", "B"])}, "2 values, the shape says 1"),
        ({"carrier": b""}, "0 values, the shape says 1"),
    ],
)
def test_binary_tensors_that_do_not_add_up_are_refused(
    engine: DoubleEngine, changes: dict[str, bytes], words: str
) -> None:
    body, headers = binary(**changes)
    answer = send(app_of(engine), "POST", INFER, content=body, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (400, "contract_violation")
    assert words in answer.json()["error"]
    assert next(iter(changes)) in answer.json()["error"]


@pytest.mark.parametrize("length", ["", "-1", "x", "999999", "1e2", "²"])
def test_a_wrong_header_length_is_refused(engine: DoubleEngine, length: str) -> None:
    body, headers = binary()
    more = headers | {"inference-header-content-length": length}
    answer = send(app_of(engine), "POST", INFER, content=body, headers={k: v.encode() for k, v in more.items()})
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")


def test_bytes_left_over_and_sizes_that_are_not_there_are_refused(engine: DoubleEngine) -> None:
    app = app_of(engine)
    body, headers = binary()
    assert "1 bytes follow" in send(app, "POST", INFER, content=body + b"x", headers=headers).json()["error"]
    assert "are left of the body" in send(app, "POST", INFER, content=body[:-1], headers=headers).json()["error"]
    both = asked()
    both["inputs"][0]["parameters"] = {"binary_data_size": 5}
    assert "either data or" in infer(app, both).json()["error"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inputs": None}, "inputs must be a list"),
        ({"model": "x"}, "member 'model'"),
        ({"parameters": []}, "must be an object"),
        ({"parameters": {"a": [1]}}, "parameter 'a'"),
        ({"parameters": {"a": None}}, "parameter 'a'"),
        ({"parameters": {"a": 2**64}}, "parameter 'a'"),
        ({"parameters": {"timeout": 0}}, "timeout is 0"),
        ({"parameters": {"timeout": 1.5}}, "timeout is 1.5"),
        ({"parameters": {"timeout": 61_000_000}}, "the longest is 60 s"),
        ({"parameters": {"binary_data_output": "yes"}}, "true or false"),
        ({"outputs": [{"name": "logit"}]}, "no output 'logit'"),
        ({"outputs": [{"name": "probability"}] * 2}, "at most one"),
        ({"outputs": [{"name": "probability", "parameters": {"classification": 3}}]}, "classification"),
        ({"outputs": {}}, "at most one"),
        ({"id": 7}, "id must be"),
        ({"id": "a\nb"}, "id must be"),
        ({"id": "x" * 201}, "id must be"),
    ],
)
def test_what_breaks_the_protocol_is_refused(engine: DoubleEngine, changes: dict[str, Any], words: str) -> None:
    assert words in refused(engine, asked() | changes, "bad_request")


VALUE_FAULTS: list[tuple[str, Any]] = [
    ("flight", 3.0),
    ("flight", "3"),
    ("flight", True),
    ("flight", 2**63),
    ("carrier", None),
    ("carrier", 5),
    ("carrier", "e\u0301"),
    ("sched_dep_time", "2013-04-01 05:15"),
    ("sched_dep_time", "2013-02-30T05:15:00Z"),
    ("share", "0.5"),
    ("charter", 1),
    ("day", "2013-02-30"),
    ("tailnum", 7),
]


@pytest.mark.parametrize(("name", "value"), VALUE_FAULTS)
def test_field_G11_the_same_fault_reads_the_same_on_every_path(
    engine: DoubleEngine,
    name: str,
    value: Any,  # noqa: ANN401
    tmp_path: Any,  # noqa: ANN401
) -> None:
    app = app_of(engine)
    document = {"inputs": [tensor(n, value if n == name else v) for n, v in VALUES.items()]}
    versioned = f"/v2/models/{MODEL}/versions/{VERSION}/infer"
    answers = [infer(app, document, path).json() for path in (INFER, versioned)]
    text = json.dumps(document).encode()
    headers = OCTETS | {"inference-header-content-length": str(len(text))}
    answers.append(send(app, "POST", INFER, content=text, headers=headers).json())
    file = tmp_path / "requests.json"
    file.write_text(json.dumps([{**VALUES, name: value}]))
    with pytest.raises(RequestsRefused) as batch:
        read_requests(file, spec_of_double())
    assert len({(a["code"], a["error"], a["field"]) for a in answers}) == 1
    assert answers[0]["error"].removeprefix("the request: ") == str(batch.value).removeprefix("requests.json: ")
    assert answers[0]["field"] == name


TEN_BAD_BODIES: list[bytes] = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'{"inputs":[]}',
    b'{"inputs":[{}]}',
    b'{"inputs":{},"inputs":[]}',
    b'{"inputs":[{"name":"flight","shape":[-1],"datatype":"INT64","data":[1]}]}',
    b'{"inputs":[{"name":"flight","shape":[1],"datatype":"INT64","data":[NaN]}]}',
    b'{"inputs":[{"name":"flight","shape":[99],"datatype":"INT64","data":[1]}]}',
]


@pytest.mark.parametrize("body", TEN_BAD_BODIES)
def test_field_G11_bad_bodies_get_one_code_and_text_on_every_path(engine: DoubleEngine, body: bytes) -> None:
    app = app_of(engine)
    paths = (INFER, f"/v2/models/{MODEL}/versions/{VERSION}/infer")
    answers = [send(app, "POST", path, content=body) for path in paths]
    answers.append(
        send(app, "POST", INFER, content=body, headers=OCTETS | {"inference-header-content-length": str(len(body))})
    )
    assert len({(a.status_code, a.json()["code"], a.json()["error"]) for a in answers}) == 1
    assert answers[0].status_code in (400, 413)
    assert engine.seen == []


@pytest.mark.parametrize(
    "version",
    [
        "0",
        "-1",
        "01",
        "1.0",
        "1481135727591",
        "latest",
        "9999999999999999999",
        "1%2F..",
        "%2e%2e",
        "3%00",
        "٣",
        "2",
        "",
    ],
)
def test_field_G13_texts_that_are_no_version_name_none(
    engine: DoubleEngine, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_of(engine)
    infer(app, asked())
    engine.seen.clear()

    def touched(*_: object, **__: object) -> None:
        raise AssertionError("a version reached a file")

    for place in ("builtins.open", "io.open", "os.open", "os.stat", "os.listdir"):
        monkeypatch.setattr(place, touched)
    answers = [
        infer(app, asked(), f"/v2/models/{MODEL}/versions/{version}/infer"),
        send(app, "GET", f"/v2/models/{MODEL}/versions/{version}"),
        send(app, "GET", f"/v2/models/{MODEL}/versions/{version}/ready"),
    ]
    monkeypatch.undo()
    assert {a.status_code for a in answers} <= {404, 405}
    assert engine.seen == []


def test_metadata_lists_the_declared_fields(engine: DoubleEngine) -> None:
    spec = spec_of_double()
    told = send(app_of(engine), "GET", f"/v2/models/{MODEL}").json()
    assert spec.serving is not None
    assert [(t["name"], t["datatype"]) for t in told["inputs"]] == [
        (n, DATATYPES[f.type]) for n, f in spec.serving.request.items()
    ]
    assert told["outputs"] == [{"name": "probability", "datatype": "FP64", "shape": [-1]}]
    assert told["versions"] == [str(VERSION)]
    server = send(app_of(engine), "GET", "/v2").json()
    assert (server["name"], server["extensions"]) == ("headway", ["binary_tensor_data"])
