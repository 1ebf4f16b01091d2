"""`headway serve` as a newcomer uses it: start, send the line that it prints, send a label, explain, stop.

The tests share one server and go in order: the world moves forward only.
"""

import json
import shlex
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.http_engine import DoubleEngine
from support.http_server import WAIT_SECONDS, Server, headway_serve
from support.serving_bench import DAYS, write_serving_bench
from support.serving_model import serve
from support.workbench import Workbench

from headway.cli import serve as module
from headway.home import load_settings
from headway.replay.moments import moment_of
from headway.world import move_clock

pytestmark = pytest.mark.xdist_group("headway_serve")

INFER = "/v2/models/pipeline/infer"
TRITON = "tritonclient[http]==2.73.0"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """A small pipeline with a promoted version, whose world stands within its calendar."""
    found = write_serving_bench(tmp_path_factory.mktemp("promoted"))
    found.ingest("data", "register", "labels")
    assert serve(found, DAYS[:1]).stable == 1
    move_clock(found.home / "clock.json", moment_of("2026-03-05T12:00Z"))
    return found


@pytest.fixture(scope="module")
def server(bench: Workbench, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    errors = tmp_path_factory.mktemp("server") / "errors"
    with headway_serve(bench.home, errors, "-p", str(bench.folder)) as found:
        yield found


@pytest.fixture(scope="module")
def triton_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with tritonclient, whose pins need not be ours."""
    folder = tmp_path_factory.mktemp("triton")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-input", "--no-compile"]
    command += ["--disable-pip-version-check", TRITON]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_SECONDS)
    if done.returncode and ("No matching distribution" in done.stderr or "Connection" in done.stderr):
        pytest.skip(f"the package index cannot be reached for {TRITON}: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    return python


def tensors(**values: Any) -> dict[str, Any]:  # noqa: ANN401
    kinds = {"size": "INT64"}
    return {
        "inputs": [{"name": n, "shape": [1], "datatype": kinds.get(n, "BYTES"), "data": [v]} for n, v in values.items()]
    }


def asked_by_the_printed_line(server: Server) -> dict[str, Any]:
    line = next(text for text in server.output if text.startswith("  curl "))
    if shutil.which("curl") is None:
        words = shlex.split(line)
        return httpx.post(words[2], content=words[-1], headers={"content-type": "application/json"}).json()
    told = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    return json.loads(told.stdout)


def refused(bench: Workbench, *arguments: str) -> str:
    told = bench.run("serve", "--port", "0", *arguments)
    assert told.exit_code == 2, told.output
    return told.output


def test_the_first_answer_says_version_and_freshness(server: Server) -> None:
    said = "\n".join(server.output)
    assert "it is 2026-03-05T12:00:00+00:00 by a replay's clock" in said
    assert "pipeline version 1  epoch 1  sha256:" in said
    told = asked_by_the_printed_line(server)
    assert told["model_version"] == "1"
    assert 0 <= told["outputs"][0]["data"][0] <= 1
    assert told["parameters"]["observed_at"] == ["2026-03-05T12:00:00Z"]
    assert set(told["parameters"]["feature_status"]) == {"newest", "recent", "listed"}
    assert "<h2>pipeline</h2>" in httpx.get(server.url).text


def test_a_prediction_is_labelled_and_explained_down_to_its_rows(server: Server, bench: Workbench) -> None:
    known = httpx.post(server.url + INFER, json=tensors(k="a", size=5, starts="2026-03-05T13:00:00Z")).json()
    assert known["parameters"]["feature_status"]["newest"] == ["fresh"]
    assert known["parameters"]["feature_age_ms"]["newest"][0] > 0
    prediction = known["parameters"]["prediction_ids"][0]
    label = {"labels": [{"prediction_id": prediction, "value": 1}]}
    first, again = (httpx.post(f"{server.url}/v2/labels", json=label).json()["results"][0] for _ in range(2))
    assert first["status"] in ("waiting", "accepted")
    assert again["label_id"] == first["label_id"]
    told = bench.run("explain", prediction, "--pipeline", str(bench.folder), "--json")
    assert told.exit_code == 0, told.output
    explained = json.loads(told.stdout)
    assert explained["verified"] is True
    assert explained["prediction"]["prediction_id"] == prediction


def test_tritonclient_works(server: Server, triton_python: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "support" / "http_triton.py"
    command = [str(triton_python), str(script), server.url.removeprefix("http://"), "pipeline"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_SECONDS)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["live"], told["ready"], told["model_ready"], told["version_ready"]) == (True,) * 4
    assert told["server"] == "headway"
    assert told["inputs"] == ["k", "size", "note", "starts"]
    for way in ("binary", "json", "plain", "gzip"):
        assert told[way]["type"] == "float64"
        assert told[way]["values"] == told["binary"]["values"]
        assert len(set(told[way]["parameters"]["prediction_ids"])) == 3
    assert (told["binary"]["id"], told["json"]["id"]) == ("from-binary", "from-json")
    status, text = told["refused"]
    assert status == "400"
    assert "size: the required field is missing" in text


def test_a_second_server_needs_another_name_and_another_port(server: Server, bench: Workbench) -> None:
    taken = refused(bench, "-p", str(bench.folder), "--port", str(server.port))
    assert f"port {server.port} on 127.0.0.1 cannot be used" in taken
    command = [sys.executable, "-m", "headway.cli.main", "serve", "--port", "0", "-p", str(bench.folder)]
    second = subprocess.run(
        command,
        env={"HEADWAY_HOME": str(bench.home)},
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS,
    )
    assert second.returncode == 2
    assert "another server holds" in second.stderr
    assert "--name" in second.stderr
    assert "Traceback" not in second.stderr


def test_nothing_promoted_and_nothing_here_are_clear_refusals(bench: Workbench, tmp_path: Path) -> None:
    assert "headway promote MODEL" in refused(Workbench(bench.folder, tmp_path / "empty"))
    assert "endpoint nope serves nothing yet; those that do: pipeline" in refused(bench, "-e", "nope")
    assert "name the pipeline's folder with --pipeline" in refused(bench)


def test_without_the_catalog_the_last_signed_pointer_answers_and_says_so(
    server: Server, bench: Workbench, tmp_path: Path
) -> None:
    request = tensors(k="a", size=5, starts="2026-03-05T13:00:00Z")
    before = httpx.post(server.url + INFER, json=request).json()
    assert before["parameters"]["degraded"] == []
    home = shutil.copytree(bench.home, tmp_path / "home", ignore=shutil.ignore_patterns("catalog.db*", "*.log"))
    errors = tmp_path / "errors"
    with headway_serve(home, errors, "-p", str(bench.folder), until="listening on") as alone:
        told = httpx.post(alone.url + INFER, json=request).json()
        assert "catalog_unreachable" in told["parameters"]["degraded"]
        assert told["outputs"] == before["outputs"]
        label = {"labels": [{"prediction_id": "x", "value": 1}]}
        answer = httpx.post(f"{alone.url}/v2/labels", json=label)
        assert (answer.status_code, answer.json()["code"]) == (503, "catalog_unavailable")
        assert not (home / "catalog.db").exists(), "a catalog that is away is not made anew"
        with closing(sqlite3.connect(bench.home / "catalog.db")) as kept, closing(sqlite3.connect(home / "new")) as to:
            kept.backup(to)
        (home / "new").rename(home / "catalog.db")
        until = time.monotonic() + WAIT_SECONDS
        while httpx.post(f"{alone.url}/v2/labels", json=label).status_code != 200:
            assert time.monotonic() < until
            time.sleep(0.1)
        assert alone.stop() == 0


def test_a_world_that_moves_is_followed_and_what_is_known_then_is_loaded(server: Server, bench: Workbench) -> None:
    request = tensors(k="a", size=5, starts="2026-03-05T15:30:00Z")
    early = httpx.post(server.url + INFER, json=request)
    assert (early.status_code, early.json()["code"], early.json()["field"]) == (400, "contract_violation", "starts")
    move_clock(bench.home / "clock.json", moment_of("2026-03-05T14:30Z"))
    while "online_synced" not in server.errors.read_text():
        assert server.process.poll() is None
        time.sleep(0.1)
    late = httpx.post(server.url + INFER, json=request).json()
    assert late["parameters"]["observed_at"] == ["2026-03-05T14:30:00Z"]
    assert 'headway_source_age_seconds{source="pipeline/data"}' in httpx.get(f"{server.url}/metrics").text


def test_it_ends_in_order(server: Server) -> None:
    assert server.stop() == 0
    assert server.output[-1] == "stopped"
    lines = [json.loads(line) for line in server.errors.read_text().splitlines()]
    assert [line["event"] for line in lines][-1] == "stopped"
    assert {line["code"] for line in lines if line["event"] == "infer"} >= {"ok", "contract_violation"}


def test_a_time_outside_the_calendar_is_said_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings({"HEADWAY_HOME": str(tmp_path)})
    engine = DoubleEngine()
    monkeypatch.setattr(engine, "now", lambda: moment_of("2026-03-05"))
    module._started(settings, engine, None, {}, "http://x")
    said = capsys.readouterr().out
    assert "by the machine's clock" in said
    assert "nothing can be asked for as of 2026-03-05T00:00:00Z, which the calendar of flights does not hold" in said
    assert "headway demo clock --to DATE" in said
    assert "curl" not in said
