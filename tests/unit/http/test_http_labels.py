"""Labels by HTTP: item by item to the desk, faults of the body before it, repeated keys answered as before."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from support.http_engine import MODEL, DoubleEngine, accept_all, app_of, client_of, send

from headway.serving.http.limits import Limits

LABELS = "/v2/labels"
ITEM = {"prediction_id": "p1", "value": 1}


class Desk:
    """Keeps what it was given."""

    def __init__(self) -> None:
        self.given: list[tuple[str, list[object]]] = []

    def accept(self, endpoint: str, items: Sequence[object]) -> list[dict[str, Any]]:
        self.given.append((endpoint, list(items)))
        return accept_all(endpoint, items)


def post(desk: Desk, document: object, **headers: str) -> httpx.Response:
    return send(app_of(DoubleEngine(), labels=desk.accept), "POST", LABELS, json=document, headers=headers)


def test_every_item_has_its_result_and_one_bad_item_stops_no_other() -> None:
    desk = Desk()
    answer = post(desk, {"labels": [ITEM, 7, {**ITEM, "value": 0}]})
    assert answer.status_code == 200
    assert [r["status"] for r in answer.json()["results"]] == ["accepted", "refused", "accepted"]
    assert answer.json()["counts"] == {"accepted": 2, "refused": 1}
    assert desk.given == [(MODEL, [ITEM, 7, {**ITEM, "value": 0}])]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], 'send {"labels"'),
        ({}, "labels must be a list"),
        ({"labels": []}, "at least one"),
        ({"labels": {}}, "labels must be a list"),
        ({"labels": [ITEM], "model": "x"}, "member 'model'"),
        ({"labels": [ITEM], "endpoint": 7}, "say which endpoint"),
    ],
)
def test_faults_of_the_body_reach_no_desk(document: object, words: str) -> None:
    desk = Desk()
    answer = post(desk, document)
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")
    assert words in answer.json()["error"]
    assert desk.given == []


def test_labels_keep_their_types() -> None:
    desk = Desk()
    values = [1, 1.0, True, "1", "", None, 9007199254740993, 0.1]
    post(desk, {"labels": [{"prediction_id": "p", "value": v} for v in values]})
    found = [item["value"] for item in desk.given[0][1] if isinstance(item, dict)]
    assert [(type(f), f) for f in found] == [(type(v), v) for v in values]


def test_limits_hold_as_they_do_for_inference() -> None:
    app = app_of(DoubleEngine(), Limits(labels=2, body=500))
    assert send(app, "POST", LABELS, json={"labels": [{}] * 3}).json()["code"] == "too_many_rows"
    assert send(app, "POST", LABELS, content=b" " * 501).json()["code"] == "body_too_large"
    assert send(app, "POST", LABELS, content=b'{"labels":[],"labels":[]}').json()["code"] == "bad_json"
    assert send(app, "POST", LABELS, content=b"x", headers={"content-type": "text/csv"}).status_code == 415


def test_an_endpoint_may_be_named() -> None:
    desk = Desk()
    assert post(desk, {"labels": [ITEM], "endpoint": MODEL}).status_code == 200
    assert post(desk, {"labels": [ITEM], "endpoint": "other"}).json()["code"] == "unknown_model"
    assert len(desk.given) == 1


def test_a_repeated_key_is_answered_once_and_another_body_under_it_is_refused() -> None:
    desk = Desk()
    app = app_of(DoubleEngine(), labels=desk.accept)
    key = {"idempotency-key": "k1"}
    first = send(app, "POST", LABELS, json={"labels": [ITEM]}, headers=key)
    again = send(app, "POST", LABELS, json={"labels": [ITEM]}, headers=key)
    assert (first.status_code, first.text) == (again.status_code, again.text)
    assert len(desk.given) == 1
    other = send(app, "POST", LABELS, json={"labels": [ITEM, ITEM]}, headers=key)
    assert (other.status_code, other.json()["code"]) == (422, "key_reused")
    for bad in ("", "x" * 201, "a\tb"):
        assert send(app, "POST", LABELS, json={"labels": [ITEM]}, headers={"idempotency-key": bad}).status_code == 400


def test_a_key_whose_request_was_refused_may_come_again() -> None:
    desk = Desk()
    app = app_of(DoubleEngine(), labels=desk.accept)
    key = {"idempotency-key": "k1"}
    assert send(app, "POST", LABELS, json={"labels": []}, headers=key).status_code == 400
    assert send(app, "POST", LABELS, json={"labels": [ITEM]}, headers=key).status_code == 200


def test_a_frozen_catalog_refuses_in_time_and_blocks_nothing_else() -> None:
    thaw = threading.Event()

    def frozen(endpoint: str, items: Sequence[object]) -> list[dict[str, Any]]:
        thaw.wait()
        return accept_all(endpoint, items)

    async def many() -> tuple[list[httpx.Response], httpx.Response]:
        app = app_of(DoubleEngine(), Limits(labels_s=0.1), frozen)
        async with client_of(app) as client:
            key = {"idempotency-key": "k"}
            first = asyncio.ensure_future(client.post(LABELS, json={"labels": [ITEM]}, headers=key))
            await asyncio.sleep(0.01)
            same = await client.post(LABELS, json={"labels": [ITEM]}, headers=key)
            rest = await asyncio.gather(*(client.post(LABELS, json={"labels": [ITEM]}) for _ in range(30)))
            assert (await client.get("/v2/health/ready")).status_code == 200
            return [await first, *rest], same

    try:
        answers, same = asyncio.run(many())
    finally:
        thaw.set()
    assert {(a.status_code, a.json()["code"], a.json()["retry"]) for a in answers} == {
        (503, "catalog_unavailable", True)
    }
    assert (same.status_code, same.json()["code"]) == (409, "key_in_use")


def test_a_desk_that_fails_is_a_fault_of_ours_and_the_next_labels_are_taken() -> None:
    def broken(endpoint: str, items: Sequence[object]) -> list[dict[str, Any]]:
        if len(items) == 2:
            raise ValueError("N14228")
        return accept_all(endpoint, items)

    app = app_of(DoubleEngine(), labels=broken)
    answer = send(app, "POST", LABELS, json={"labels": [ITEM, ITEM]})
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert "N14228" not in answer.text
    assert send(app, "POST", LABELS, json={"labels": [ITEM]}).status_code == 200
