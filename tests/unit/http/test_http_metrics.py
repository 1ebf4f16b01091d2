"""What a server counts and writes down: bounded labels, no values of fields."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from support.http_engine import INFER, MODEL, VERSION, DoubleEngine, app_of, asked, infer, send

from headway.serving.http.logs import LOGGER, JsonLines
from headway.serving.live.types import ScoringFailed

SECRET = "N99SECRET"
LABELS = {"model": MODEL, "version": str(VERSION)}


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """The log's lines, filled in when the test asks."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)

    class Lines(list[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter([json.loads(line) for line in stream.getvalue().splitlines()])

    yield Lines()
    LOGGER.removeHandler(handler)
    LOGGER.setLevel(logging.NOTSET)


def sample(text: str, name: str, **labels: str) -> float:
    """One sample of the text format; it must be there once."""
    wanted = name + ("{" + ",".join(f'{k}="{v}"' for k, v in sorted(labels.items())) + "}" if labels else "")
    found = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.rsplit(" ", 1)[0] == wanted]
    assert len(found) == 1, wanted
    return float(found[0])


def test_requests_are_counted_by_version_and_code() -> None:
    engine = DoubleEngine(degraded=("catalog_unreachable",))
    app = app_of(engine)
    infer(app, asked(3))
    infer(app, asked())
    infer(app, asked(flight=None))
    engine.error = ScoringFailed("model_died", "signal 9")
    infer(app, asked())
    text = send(app, "GET", "/metrics").text
    assert sample(text, "headway_requests_total", code="ok", **LABELS) == 2
    assert sample(text, "headway_requests_total", code="contract_violation", **LABELS) == 1
    assert sample(text, "headway_requests_total", code="model_died", **LABELS) == 1
    assert sample(text, "headway_request_seconds_count", **LABELS) == 4
    assert sample(text, "headway_predictions_total", **LABELS) == 4
    assert sample(text, "headway_degraded_predictions_total", **LABELS) == 4
    assert sample(text, "headway_queue_wait_seconds_count", **LABELS) == 4
    assert sample(text, "headway_feature_age_seconds_count", view="weather_at_origin", **LABELS) == 4
    assert sample(text, "headway_feature_status_total", model=MODEL, view="aircraft", status="missing") == 4


def test_what_the_engine_knows_is_told_at_every_scrape() -> None:
    engine = DoubleEngine()
    text = send(app_of(engine), "GET", "/metrics").text
    assert sample(text, "headway_spool_bytes") == 1234
    assert sample(text, "headway_spool_records") == 5
    assert sample(text, "headway_spool_dropped_total") == 1
    assert sample(text, "headway_spool_torn_total") == 2
    assert sample(text, "headway_pointer_epoch", model=MODEL) == 7
    assert sample(text, "headway_catalog_contact_age_seconds") == 0.2
    assert sample(text, "headway_source_age_seconds", source="flights") == 60
    assert sample(text, "headway_ready") == 1
    assert 'source="planes"' not in text


def test_names_that_nobody_serves_share_one_label() -> None:
    app = app_of(DoubleEngine())
    for number in range(30):
        infer(app, asked(), f"/v2/models/m{number}/infer")
        infer(app, asked(), f"/v2/models/{MODEL}/versions/{number + 10}/infer")
        send(app, "POST", "/v2/labels", json={"labels": [{}], "endpoint": f"e{number}"})
    text = send(app, "GET", "/metrics").text
    assert sample(text, "headway_requests_total", code="unknown_model", model="unknown", version="") == 30
    assert sample(text, "headway_requests_total", code="version_not_served", model="unknown", version="") == 30
    assert len([line for line in text.splitlines() if line.startswith("headway_requests_total")]) == 2


def test_labels_are_counted_by_outcome() -> None:
    app = app_of(DoubleEngine())
    send(app, "POST", "/v2/labels", json={"labels": [{}, {}, 5]})
    send(app, "POST", "/v2/labels", json={"labels": []})
    text = send(app, "GET", "/metrics").text
    assert sample(text, "headway_labels_total", status="accepted") == 2
    assert sample(text, "headway_labels_total", status="refused") == 1
    assert sample(text, "headway_label_requests_total", code="bad_request") == 1


def test_a_line_per_request_has_ids_and_times_and_no_values(lines: list[dict[str, Any]]) -> None:
    engine = DoubleEngine()
    app = app_of(engine)
    infer(app, asked(2, tailnum=SECRET) | {"id": "mine", "parameters": {"note": SECRET}})
    infer(app, asked(tailnum=SECRET, flight="x"))
    send(app, "POST", INFER, content=f'{{"{SECRET}":'.encode())
    engine.error = RuntimeError(f"could not convert {SECRET}")
    infer(app, asked(tailnum=SECRET))
    send(app, "POST", "/v2/labels", json={"labels": [{"id": SECRET, "value": 1}]})
    found = list(lines)
    assert [(e["event"], e["code"]) for e in found] == [
        ("infer", "ok"),
        ("infer", "contract_violation"),
        ("infer", "bad_json"),
        ("infer", "internal"),
        ("labels", "ok"),
    ]
    assert found[0]["id"] == "mine"
    assert found[0]["prediction_ids"] == ["p001-0", "p001-1"]
    assert (found[0]["version"], found[0]["rows"], found[0]["queue_us"], found[0]["compute_us"]) == ("3", 2, 120, 80)
    assert found[0]["run"] == "run-3"
    assert found[4]["counts"] == {"accepted": 1}
    assert SECRET not in json.dumps(found)


def test_a_trace_keeps_places_and_kinds_and_drops_texts() -> None:
    stream = io.StringIO()
    logger = logging.Logger("trace")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    try:
        try:
            raise ValueError(SECRET)
        except ValueError as error:
            raise RuntimeError(SECRET) from error
    except RuntimeError as error:
        logger.error("Exception in ASGI application", exc_info=error)
    told = json.loads(stream.getvalue())
    assert told["trace"][-1] == "RuntimeError"
    assert "ValueError" in told["trace"]
    assert any("test_http_metrics.py" in place for place in told["trace"])
    assert SECRET not in stream.getvalue()
