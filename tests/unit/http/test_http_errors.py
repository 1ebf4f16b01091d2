"""The error table of catalog-registry-serving.md 5.2, and what every refusal says."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from support.http_engine import INFER, MODEL, DoubleEngine, app_of, asked, infer, send

from headway.catalog.errors import CatalogUnavailable
from headway.errors import HeadwayError
from headway.features.online.store import OnlineNotReady
from headway.features.online.store import OnlineUnavailable as StoreAway
from headway.serving.http.faults import MEANINGS, fault_of, retry_after
from headway.serving.http.limits import Limits
from headway.serving.live.types import (
    DeadlineExceeded,
    FeaturesUnavailable,
    LogFull,
    NotReady,
    OnlineUnavailable,
    QueueFull,
    ScoringFailed,
    UnknownModel,
    VersionNotServed,
)
from headway.serving.requests import RequestProblem, RequestsRefused
from headway.serving.scoring import ContractNotMet

LABELS = {"labels": [{"prediction_id": "p", "value": 1}]}
Ask = Callable[[DoubleEngine], httpx.Response]


def raising(error: Exception) -> Ask:
    """A request to an engine that raises this."""

    def ask(engine: DoubleEngine) -> httpx.Response:
        engine.error = error
        return infer(app_of(engine), asked())

    return ask


def path(method: str, target: str, **more: Any) -> Ask:  # noqa: ANN401
    return lambda engine: send(app_of(engine), method, target, **more)


def not_ready(reason: str) -> Ask:
    def ask(engine: DoubleEngine) -> httpx.Response:
        engine.reason = reason
        return infer(app_of(engine), asked())

    return ask


def labels_with(accept: Callable[..., Any]) -> Ask:
    return lambda engine: send(app_of(engine, labels=accept), "POST", "/v2/labels", json=LABELS)


def catalog_away(*_: object) -> list[dict[str, Any]]:
    raise CatalogUnavailable("connection refused")


def key_reused(engine: DoubleEngine) -> httpx.Response:
    app = app_of(engine)
    headers = {"idempotency-key": "k"}
    assert send(app, "POST", "/v2/labels", json=LABELS, headers=headers).status_code == 200
    return send(app, "POST", "/v2/labels", json={"labels": [{"value": 2}]}, headers=headers)


def crowded(engine: DoubleEngine) -> httpx.Response:
    return infer(app_of(engine, Limits(in_flight=0)), asked())


FUTURE = RequestsRefused("the request", [RequestProblem(1, "sched_dep_time", "is still to come", "ask later")])
STALE = FeaturesUnavailable("weather", "stale", "too_old", 7200.0, 3600.0, 30.0)
TABLE: list[tuple[int, str, bool, Ask]] = [
    (400, "bad_json", False, path("POST", INFER, content=b"{")),
    (400, "bad_request", False, path("POST", INFER, json=[])),
    (400, "contract_violation", False, path("POST", INFER, json=asked(flight=None))),
    (400, "contract_violation", False, raising(FUTURE)),
    (404, "unknown_path", False, path("GET", "/v2/nothing")),
    (404, "unknown_model", False, path("POST", "/v2/models/other/infer", json=asked())),
    (404, "version_not_served", False, path("POST", f"/v2/models/{MODEL}/versions/9/infer", json=asked())),
    (405, "method_not_allowed", False, path("GET", INFER)),
    (413, "body_too_large", False, path("POST", INFER, content=b" " * (Limits().body + 1))),
    (413, "too_many_rows", False, path("POST", INFER, json=asked(51))),
    (415, "unsupported_type", False, path("POST", INFER, content=b"{}", headers={"content-type": "text/plain"})),
    (415, "unsupported_encoding", False, path("POST", INFER, content=b"", headers={"content-encoding": "br"})),
    (422, "key_reused", False, key_reused),
    (424, "features_unavailable", True, raising(STALE)),
    (424, "contract_not_met", True, raising(ContractNotMet("input month is null", "give it"))),
    (500, "model_refused", False, raising(ScoringFailed("model_refused", "carrier"))),
    (500, "wrong_row_count", False, raising(ScoringFailed("wrong_row_count", "2 for 1"))),
    (500, "internal", False, raising(ScoringFailed("something_new", "x"))),
    (500, "internal", False, raising(RuntimeError("N14228"))),
    (500, "internal", False, raising(HeadwayError("N14228"))),
    (503, "overloaded", True, crowded),
    (503, "queue_full", True, raising(QueueFull(100, 100, 1.0))),
    (503, "not_ready", True, not_ready("loading")),
    (503, "not_ready", True, not_ready("nothing_promoted")),
    (503, "draining", True, not_ready("draining")),
    (503, "draining", True, raising(NotReady("draining", 5.0))),
    (503, "log_full", True, raising(LogFull("no space", 10.0))),
    (503, "online_unavailable", True, raising(OnlineUnavailable("locked", 1.0))),
    (503, "online_unavailable", True, raising(StoreAway("locked", "free it"))),
    (503, "online_not_ready", True, raising(OnlineNotReady("never filled", "headway serve fills it"))),
    (503, "catalog_unavailable", True, labels_with(catalog_away)),
    (504, "deadline_exceeded", True, raising(DeadlineExceeded("compute"))),
]


@pytest.mark.parametrize(("status", "code", "retry", "ask"), TABLE, ids=[f"{s}-{c}" for s, c, _, _ in TABLE])
def test_the_error_table(status: int, code: str, retry: bool, ask: Ask) -> None:
    answer = ask(DoubleEngine())
    told = answer.json()
    assert (answer.status_code, told["code"], told["retry"]) == (status, code, retry), told
    assert set(told) <= {"error", "code", "retry", "field", "id", "prediction_ids", "parameters"}
    assert told["error"]
    # What the caller did not send itself is never quoted back.
    assert "N14228" not in answer.text
    assert ("retry-after" in answer.headers) == retry
    assert MEANINGS[code][:2] == (status, retry)


def test_where_a_wait_is_known_the_caller_is_told_no_less() -> None:
    assert int(raising(STALE)(DoubleEngine()).headers["retry-after"]) >= 30
    assert int(raising(LogFull("no space", 10.0))(DoubleEngine()).headers["retry-after"]) >= 10


def test_callers_refused_together_do_not_come_back_together() -> None:
    told = {int(retry_after(10.0)) for _ in range(200)}
    assert min(told) >= 10
    assert max(told) <= 15
    assert len(told) > 3


def test_every_refusal_of_the_engine_has_its_code() -> None:
    refusals = [
        UnknownModel("x", ()),
        VersionNotServed("x", 1, 2),
        NotReady("starting", 1.0),
        QueueFull(1, 1, 1.0),
        LogFull("x", 1.0),
        OnlineUnavailable("x", 1.0),
        DeadlineExceeded("queue"),
        STALE,
        *(
            ScoringFailed(c, "x")
            for c in ("model_refused", "model_died", "wrong_row_count", "not_finite", "feature_code")
        ),
    ]
    codes = [found.code for found in map(fault_of, refusals) if found is not None]
    assert len(codes) == len(refusals)
    assert "internal" not in codes


def test_a_wrong_method_says_which_is_right() -> None:
    assert path("GET", INFER)(DoubleEngine()).headers["allow"] == "POST"


def test_health_says_why_not() -> None:
    engine = DoubleEngine()
    app = app_of(engine)
    assert send(app, "GET", "/v2/health/ready").json() == {"ready": True}
    engine.reason = "load_failed:3@epoch 7"
    answer = send(app, "GET", "/v2/health/ready")
    assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
    assert "load_failed:3@epoch 7" in answer.json()["error"]
    assert send(app, "GET", f"/v2/models/{MODEL}/ready").status_code == 503
    assert send(app, "GET", "/v2/health/live").status_code == 200


def test_a_refused_request_leaves_no_place_taken() -> None:
    engine = DoubleEngine()
    app = app_of(engine, Limits(in_flight=1))
    for _ in range(3):
        assert infer(app, []).status_code == 400
    assert infer(app, asked()).status_code == 200
