"""Bodies are bounded, have one meaning, and are of a kind that is read here; everything else has its code."""

import asyncio
import gzip
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.http_engine import INFER, DoubleEngine, app_of, asked, client_of, infer, send

from headway.serving.http.faults import Fault
from headway.serving.http.limits import Limits
from headway.serving.http.strict_json import parse_json

BODY = json.dumps(asked()).encode()
GZIP = {"content-encoding": "gzip"}


@pytest.fixture
def engine() -> DoubleEngine:
    return DoubleEngine()


def posted(
    engine: DoubleEngine, body: bytes, limits: Limits | None = None, headers: Mapping[str, str] | None = None
) -> httpx.Response:
    return send(app_of(engine, limits), "POST", INFER, content=body, headers=headers)


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b'{"inputs":[],"inputs":[]}', "bad_json", "'inputs' stands twice"),
        (b'{"inputs":[{"name":"flight","na\\u006de":"x"}]}', "bad_json", "'name' stands twice"),
        (b'{"inputs":[],"parameters":{"a":{"b":1,"b":2}}}', "bad_json", "'b' stands twice"),
        (b'{"inputs":[NaN]}', "bad_json", "not JSON"),
        (b'{"inputs":[Infinity]}', "bad_json", "not JSON"),
        (b'{"inputs":[-Infinity]}', "bad_json", "not JSON"),
        (b'{"inputs":[1e999]}', "bad_json", "out of range"),
        (b'{"inputs":[01]}', "bad_json", "not JSON"),
        (b'{"inputs":["\\ud800"]}', "bad_json", "not JSON"),
        (b'{"inputs":["\xff"]}', "bad_json", "not JSON"),
        (b'\xef\xbb\xbf{"inputs":[]}', "bad_json", "not JSON"),
        (b'{"inputs":[]} {}', "bad_json", "trailing"),
        (b'{"inputs":[', "bad_json", "not JSON"),
        (b'{"inputs":["a', "bad_json", "not JSON"),
        (b"[" * 17 + b"]" * 17, "body_too_large", "deeper than 16"),
        (b"[" * 100_000 + b"]" * 100_000, "body_too_large", ""),
        (b'{"a":' * 100_000, "body_too_large", "deeper"),
        (b"[" + b"0," * 300_000 + b"0]", "body_too_large", "300,001 values"),
        (b"[" + b"[]," * 300_000 + b"0]", "body_too_large", "values"),
        (b'"' + b'\\"' * 1_000_000, "bad_json", "not JSON"),
        (b"9" * 5_000, "bad_json", ""),
    ],
)
def test_json_with_two_meanings_or_without_measure_is_refused(
    engine: DoubleEngine, body: bytes, code: str, words: str
) -> None:
    answer = posted(engine, body)
    assert code_of(answer) == (413 if code == "body_too_large" else 400, code)
    assert words in answer.json()["error"]
    assert engine.seen == []


Document = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


@given(Document, st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_documents_are_read_as_the_standard_parser_reads_them(document: Any, spaced: bool) -> None:  # noqa: ANN401
    text = json.dumps(document, ensure_ascii=spaced, indent=1 if spaced else None)
    found = parse_json(text.encode(), Limits())
    assert found == json.loads(text)
    assert json.dumps(found, sort_keys=True) == json.dumps(json.loads(text), sort_keys=True)


@given(Document, Document, st.text(max_size=3), st.integers(0, 3))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_a_name_that_stands_twice_is_found_wherever_it_is(
    one: object,
    other: object,
    name: str,
    depth: int,
) -> None:
    inner = f"{{{json.dumps(name)}:{json.dumps(one)},{json.dumps(name)}:{json.dumps(other)}}}"
    for _ in range(depth):
        inner = f'{{"a":[0,{inner}]}}'
    with pytest.raises(Fault) as refused:
        parse_json(inner.encode(), Limits())
    assert refused.value.code == "bad_json"


def test_a_body_above_the_limit_is_refused_by_its_head_and_while_it_comes(engine: DoubleEngine) -> None:
    limits = Limits(body=1000)
    assert code_of(posted(engine, b" " * 1001, limits)) == (413, "body_too_large")

    async def long() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    async def chunked() -> httpx.Response:
        async with client_of(app_of(engine, limits)) as client:
            return await client.post(INFER, content=long())

    assert code_of(asyncio.run(chunked())) == (413, "body_too_large")
    assert posted(engine, BODY + b" " * (2000 - len(BODY)), Limits(body=2000)).status_code == 200
    assert engine.seen


def test_a_body_that_never_ends_is_given_up(engine: DoubleEngine) -> None:
    async def stuck() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(3600)

    async def slow() -> httpx.Response:
        async with client_of(app_of(engine, Limits(body_s=0.05))) as client:
            return await client.post(INFER, content=stuck())

    answer = asyncio.run(slow())
    assert code_of(answer) == (408, "slow_body")
    assert answer.json()["retry"] is True


@pytest.mark.parametrize(
    ("told", "status"),
    [
        (None, 200),
        ("application/json", 200),
        ("Application/JSON; charset=UTF-8", 200),
        ('application/json;charset="utf-8"', 200),
        ("application/json; charset=latin-1", 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/octet-stream", 415),
        ("application/x-pickle", 415),
        ("", 415),
    ],
)
def test_content_types(engine: DoubleEngine, told: str | None, status: int) -> None:
    answer = posted(engine, BODY, headers=None if told is None else {"content-type": told})
    assert answer.status_code == status
    if status == 415:
        assert answer.json()["code"] == "unsupported_type"
        assert "application/json" in answer.json()["error"]


@pytest.mark.parametrize(
    ("encoding", "body", "status", "code"),
    [
        ("gzip", gzip.compress(BODY, mtime=0), 200, ""),
        ("GZIP", gzip.compress(BODY, mtime=0), 200, ""),
        ("identity", BODY, 200, ""),
        ("gzip", gzip.compress(BODY, mtime=0)[:-9], 400, "bad_request"),
        ("gzip", b"", 400, "bad_request"),
        ("gzip", BODY, 400, "bad_request"),
        ("gzip", zlib.compress(BODY), 400, "bad_request"),
        ("gzip", gzip.compress(BODY, mtime=0) + b"x", 400, "bad_request"),
        ("gzip", gzip.compress(b"{", mtime=0), 400, "bad_json"),
        ("gzip, gzip", gzip.compress(gzip.compress(BODY, mtime=0)), 415, "unsupported_encoding"),
        ("br", BODY, 415, "unsupported_encoding"),
        ("deflate", zlib.compress(BODY), 415, "unsupported_encoding"),
        ("x" * 500, BODY, 415, "unsupported_encoding"),
    ],
)
def test_field_G07_packed_bodies_are_unpacked_or_refused(
    engine: DoubleEngine, encoding: str, body: bytes, status: int, code: str
) -> None:
    answer = posted(engine, body, headers={"content-encoding": encoding, "accept-encoding": "gzip"})
    assert answer.status_code == status
    assert answer.json().get("code", "") == code
    # What comes back is as it says: nothing is packed, and no header claims so.
    assert "content-encoding" not in answer.headers
    assert len(answer.content) == int(answer.headers["content-length"])


def test_field_G07_a_bomb_is_refused_with_bounded_memory(engine: DoubleEngine) -> None:
    bomb = gzip.compress(b" " * 200_000_000, 9, mtime=0)
    assert len(bomb) < 250_000
    tracemalloc.start()
    answer = posted(engine, bomb, headers=GZIP)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert code_of(answer) == (413, "body_too_large")
    assert peak < 4 * Limits().body


def test_rows_above_what_is_declared_are_refused(engine: DoubleEngine) -> None:
    app = app_of(engine)
    assert infer(app, asked(50)).status_code == 200
    assert code_of(infer(app, asked(51))) == (413, "too_many_rows")


def test_more_requests_than_places_are_refused_and_health_still_answers(engine: DoubleEngine) -> None:
    async def crowd() -> tuple[list[httpx.Response], httpx.Response]:
        engine.hold = asyncio.Event()
        async with client_of(app_of(engine, Limits(in_flight=3))) as client:
            first = [asyncio.ensure_future(client.post(INFER, json=asked())) for _ in range(3)]
            while len(engine.seen) < 3:
                await asyncio.sleep(0)
            late = await client.post(INFER, json=asked())
            assert (await client.get("/v2/health/live")).status_code == 200
            assert "headway_in_flight_requests 3.0" in (await client.get("/metrics")).text
            engine.hold.set()
            return [await f for f in first], late

    held, late = asyncio.run(crowd())
    assert [h.status_code for h in held] == [200] * 3
    assert code_of(late) == (503, "overloaded")
    assert int(late.headers["retry-after"]) >= 1
    assert infer(app_of(engine), asked()).status_code == 200


def test_clients_that_send_slowly_take_no_place_of_others(engine: DoubleEngine) -> None:
    async def crowd() -> tuple[httpx.Response, httpx.Response, list[httpx.Response]]:
        proceed = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield BODY[:10]
            await proceed.wait()
            yield BODY[10:]

        async with client_of(app_of(engine, Limits(in_flight=1, long_bodies=2))) as client:
            short = {"content-length": str(len(BODY))}
            sending = [client.post(INFER, content=slow(), headers=short) for _ in range(5)]
            sending += [client.post(INFER, content=slow()) for _ in range(2)]
            going = [asyncio.ensure_future(s) for s in sending]
            for _ in range(100):
                await asyncio.sleep(0)
            other = await client.post(INFER, json=asked())
            long = await client.post(INFER, content=slow())
            proceed.set()
            return other, long, [await g for g in going]

    other, long, slow = asyncio.run(crowd())
    assert other.status_code == 200
    assert code_of(long) == (503, "overloaded")
    assert {s.status_code for s in slow} <= {200, 503}
    assert slow[0].status_code == 200


@pytest.mark.parametrize("told", ["0", "-5", "1.5", "x", "", "1e3", "99999999999", "60001"])
def test_deadlines_that_mean_nothing_are_refused(engine: DoubleEngine, told: str) -> None:
    assert code_of(posted(engine, BODY, headers={"x-deadline-ms": told})) == (400, "bad_request")


def test_a_deadline_is_the_shorter_of_header_and_parameter_else_the_declared_one(engine: DoubleEngine) -> None:
    timed = json.dumps(asked() | {"parameters": {"timeout": 5_000_000}}).encode()
    assert posted(engine, BODY).status_code == 200
    assert posted(engine, timed).status_code == 200
    assert posted(engine, timed, headers={"x-deadline-ms": "4000"}).status_code == 200
    assert posted(engine, timed, headers={"x-deadline-ms": "6000"}).status_code == 200
    for left, told in zip(engine.deadlines, (2, 5, 4, 5), strict=True):
        assert told - 1.5 < left <= told


def test_a_deadline_that_passed_while_the_body_came_reaches_no_engine(engine: DoubleEngine) -> None:
    async def dripping() -> AsyncIterator[bytes]:
        yield BODY[:10]
        await asyncio.sleep(0.05)
        yield BODY[10:]

    async def late() -> httpx.Response:
        async with client_of(app_of(engine)) as client:
            return await client.post(INFER, content=dripping(), headers={"x-deadline-ms": "20"})

    assert code_of(asyncio.run(late())) == (504, "deadline_exceeded")
    assert engine.seen == []
