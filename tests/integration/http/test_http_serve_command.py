"""`headway serve` as a newcomer uses it: start, send the line that it prints, send a label, explain, stop."""

import json
import shlex
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.http_server import Server, headway_serve
from support.workbench import Workbench

from headway.replay.moments import moment_of
from headway.world import move_clock

INFER = "/v2/models/pipeline/infer"


def tensors(**values: Any) -> dict[str, Any]:  # noqa: ANN401
    kinds = {"size": "INT64"}
    return {
        "inputs": [{"name": n, "shape": [1], "datatype": kinds.get(n, "BYTES"), "data": [v]} for n, v in values.items()]
    }


def refusal(home: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "headway.cli.main", "serve", "--port", "0", *arguments]
    told = subprocess.run(command, env={"HEADWAY_HOME": str(home)}, capture_output=True, text=True, check=False)
    assert told.returncode == 2, told
    assert "Traceback" not in told.stderr
    return told.stderr


def asked_by_curl(server: Server) -> dict[str, Any]:
    line = next(text for text in server.output if text.startswith("  curl "))
    if shutil.which("curl") is None:
        words = shlex.split(line)
        return httpx.post(words[2], content=words[-1], headers={"content-type": "application/json"}).json()
    told = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    return json.loads(told.stdout)


def test_a_newcomer_is_answered_labels_it_and_finds_out_why(bench: Workbench, tmp_path: Path) -> None:
    with headway_serve(bench.home, tmp_path / "errors", "-p", str(bench.folder)) as server:
        said = "\n".join(server.output)
        assert "it is 2026-03-05T12:00:00+00:00 by a replay's clock" in said
        assert "pipeline version 1  epoch 1  sha256:" in said
        told = asked_by_curl(server)
        assert told["model_version"] == "1"
        assert 0 <= told["outputs"][0]["data"][0] <= 1
        assert told["parameters"]["observed_at"] == ["2026-03-05T12:00:00Z"]
        assert set(told["parameters"]["feature_status"]) == {"newest", "recent", "listed"}

        known = httpx.post(server.url + INFER, json=tensors(k="a", size=5, starts="2026-03-05T13:00:00Z")).json()
        assert known["parameters"]["feature_status"]["newest"] == ["fresh"]
        assert known["parameters"]["feature_age_ms"]["newest"][0] > 0
        prediction = known["parameters"]["prediction_ids"][0]
        label = {"labels": [{"prediction_id": prediction, "value": 1}]}
        first, again = (httpx.post(f"{server.url}/v2/labels", json=label).json()["results"][0] for _ in range(2))
        assert first["status"] in ("waiting", "accepted")
        assert again["status"] in ("waiting", "duplicate")
        assert again["label_id"] == first["label_id"]

        second = refusal(bench.home, "-p", str(bench.folder))
        assert "another server" in second
        assert "--name" in second
        taken = refusal(bench.home, "-p", str(bench.folder), "--port", str(server.port))
        assert f"port {server.port} on 127.0.0.1 cannot be used" in taken

        assert (
            'headway_requests_total{code="ok",model="pipeline",version="1"} 2.0'
            in httpx.get(f"{server.url}/metrics").text
        )
        assert "<h2>pipeline</h2>" in httpx.get(server.url).text
        assert server.stop() == 0
        assert server.output[-1] == "stopped"
    told = bench.run("explain", prediction, "--pipeline", str(bench.folder), "--json")
    assert told.exit_code == 0, told.output
    explained = json.loads(told.stdout)
    assert explained["verified"] is True
    assert explained["prediction"]["prediction_id"] == prediction


def test_a_world_that_moves_is_followed_and_what_is_known_then_is_loaded(bench: Workbench, tmp_path: Path) -> None:
    request = tensors(k="a", size=5, starts="2026-03-05T15:30:00Z")
    with headway_serve(bench.home, tmp_path / "errors", "-p", str(bench.folder)) as server:
        early = httpx.post(server.url + INFER, json=request)
        assert (early.status_code, early.json()["code"]) == (400, "contract_violation")
        assert "starts" in early.json()["error"]
        move_clock(bench.home / "clock.json", moment_of("2026-03-05T14:30Z"))
        while "online_synced" not in server.errors.read_text():
            assert server.process.poll() is None
        late = httpx.post(server.url + INFER, json=request).json()
        assert late["parameters"]["observed_at"] == ["2026-03-05T14:30:00Z"]
        metrics = httpx.get(f"{server.url}/metrics").text
        assert "headway_source_age_seconds" in metrics


def test_without_the_catalog_the_last_signed_pointer_answers_and_says_so(bench: Workbench, tmp_path: Path) -> None:
    request = tensors(k="a", size=5, starts="2026-03-05T13:00:00Z")
    with headway_serve(bench.home, tmp_path / "errors", "-p", str(bench.folder)) as server:
        before = httpx.post(server.url + INFER, json=request).json()
        assert before["parameters"]["degraded"] == []
        assert server.stop() == 0
    (bench.home / "catalog.db").unlink()
    (bench.home / "catalog.db").mkdir()
    with headway_serve(bench.home, tmp_path / "errors", "-p", str(bench.folder), until="listening on") as server:
        told = httpx.post(server.url + INFER, json=request).json()
        assert "catalog_unreachable" in told["parameters"]["degraded"]
        assert told["outputs"] == before["outputs"]
        label = {"labels": [{"prediction_id": "x", "value": 1}]}
        answer = httpx.post(f"{server.url}/v2/labels", json=label)
        assert (answer.status_code, answer.json()["code"]) == (503, "catalog_unavailable")


def test_nothing_promoted_and_nothing_here_are_clear_refusals(bench: Workbench, tmp_path: Path) -> None:
    assert "headway promote MODEL" in refusal(tmp_path / "empty")
    assert "endpoint nope serves nothing yet; those that do: pipeline" in refusal(bench.home, "-e", "nope")
    assert "name the pipeline's folder with --pipeline" in refusal(bench.home)


def test_a_time_outside_the_calendar_is_said_at_the_start(bench: Workbench, tmp_path: Path) -> None:
    (bench.home / "clock.json").unlink()
    with headway_serve(
        bench.home, tmp_path / "errors", "-p", str(bench.folder), "--no-sync", until="listening on"
    ) as server:
        said = "\n".join(server.output)
        assert "by the machine's clock" in said
        assert "nothing can be asked for as of" in said
        assert "headway demo clock --to DATE" in said
        answer = httpx.post(server.url + INFER, json=tensors(k="a", size=5, starts="2026-03-05T13:00:00Z"))
        assert (answer.status_code, answer.json()["code"]) == (503, "online_not_ready")


def test_the_catalog_is_left_whole(promoted: Workbench) -> None:
    with sqlite3.connect(promoted.home / "catalog.db") as catalog:
        assert catalog.execute("pragma integrity_check").fetchone() == ("ok",)


pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
