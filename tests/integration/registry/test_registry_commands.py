"""`headway models`, `promote` and `rollback` as a person types them."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.registry_bench import GATES, MODEL, Bench, open_bench

from headway.cli.main import main

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def bench(tmp_path: Path, migrated_sqlite: Path) -> Iterator[Bench]:
    opened = open_bench(tmp_path / "home", migrated_sqlite, time.time_ns() // 1_000 - 3_600_000_000)
    yield opened
    opened.close()


def _run(bench: Bench, *arguments: str) -> Result:
    env = {"HEADWAY_HOME": str(bench.home), "HEADWAY_TENANT": "acme", "HEADWAY_ACTOR": "alice"}
    return CliRunner().invoke(main, list(arguments), env=env)


def _json(bench: Bench, *arguments: str) -> Any:  # noqa: ANN401
    result = _run(bench, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_an_empty_home_lists_no_versions(bench: Bench) -> None:
    assert _json(bench, "models", "list") == {"models": []}
    result = _run(bench, "promote", MODEL)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: model 'delay' has no version; ")
    assert len(result.stderr.splitlines()) == 1


def test_the_list_says_where_each_version_stands(bench: Bench) -> None:
    bench.version(1)
    bench.judge(bench.version(2), {"candidate": 0.5, "logistic": 1.5})
    bench.judge(bench.version(3))
    rows = _json(bench, "models", "list")["models"]
    assert [r["version"] for r in rows] == [1, 2, 3]
    assert rows[0]["standing"] == "not judged"
    assert rows[1]["standing"] == "refused by auc_over_historical_rate, auc_over_logistic, auc_over_champion, segments"
    assert rows[2]["standing"] == "eligible"
    assert "3 versions" in _run(bench, "models", "list").output


def test_the_card_shows_metrics_with_intervals_gates_cost_and_lineage(bench: Bench) -> None:
    version = bench.version()
    bench.judge(version)
    card = _json(bench, "models", "show", "delay@1")
    assert [row["model"] for row in card["metrics"]] == [
        "candidate",
        "gradient_boosting",
        "historical_rate",
        "logistic",
    ]
    mine = card["metrics"][0]
    assert mine["auc_lower"] < mine["auc"] < mine["auc_upper"]
    assert mine["gain"] is None
    assert card["metrics"][3]["gain_lower"] > 0
    assert [g["gate"] for g in card["gates"]] == list(GATES)
    assert card["looks"] == 1
    assert card["cost"] == {"worker_seconds": 12.5, "attempts": 1, "nodes": 2}
    assert card["lineage"]["run_id"] == version.run_id
    text = _run(bench, "models", "show", version.manifest_digest[7:17]).output
    for said in ("standing   eligible", f"AUC {mine['auc']:.4f} against", "12.5 worker-seconds", "pass       segments"):
        assert said in text
    for column, values in card["segments"].items():
        assert f"candidate by {column}" in text
        for value, segment in values.items():
            loss = segment["metrics"]["candidate"]["log_loss"]["value"]
            (line,) = [row for row in text.splitlines() if f" {value} ({segment['rows']:,} rows)" in row]
            assert f"{loss:.4f} [" in line


@pytest.mark.parametrize("reference", ["delay@1", "1", "digest"])
def test_a_version_is_named_in_three_ways(bench: Bench, reference: str) -> None:
    version = bench.version()
    named = version.manifest_digest if reference == "digest" else reference
    assert _json(bench, "models", "show", named, "--model", MODEL)["version"] == 1


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("delay@9", "delay"),
        ("delay@" + "9" * 40, "names no version"),
        ("delay@0", "names no version"),
        ("delay@\u0663", "names no version"),
        ("9", "no version 9"),
        ("nothing", "names no version"),
        ("", "names no version"),
    ],
)
def test_a_name_that_fits_nothing_is_one_line_with_a_remedy(bench: Bench, reference: str, said: str) -> None:
    bench.version()
    result = _run(bench, "models", "show", reference)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "; " in result.stderr
    assert "Traceback" not in result.output


def test_a_number_alone_is_a_version_of_the_only_model(bench: Bench) -> None:
    bench.version(1)
    assert _json(bench, "models", "show", "1")["version"] == 1
    bench.version(2, model_id="other")
    several = _run(bench, "models", "show", "1")
    assert (several.exit_code, "a version of 2 models" in several.stderr) == (2, True)
    assert _json(bench, "models", "show", "1", "--model", "other")["model"] == "other"


def test_comparing_asks_for_two_versions(bench: Bench) -> None:
    bench.version(1)
    result = _run(bench, "models", "compare", "delay@1")
    assert (result.exit_code, "two versions or more" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["delay@1"], "no version 1"),
        (["0123456789"], "names no version"),
        (["delay@1", "--bundle", "/nowhere/bundle"], "'/nowhere/bundle' does not exist"),
    ],
)
def test_verifying_what_is_not_there_says_what_is_missing(bench: Bench, arguments: list[str], said: str) -> None:
    result = _run(bench, "models", "verify", *arguments)
    assert (result.exit_code, said in result.stderr) == (2, True), result.stderr
    assert "public keys" not in result.stderr


def test_an_export_into_a_folder_with_something_asks_for_a_new_one(bench: Bench, tmp_path: Path) -> None:
    bench.judge(bench.version(1))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").touch()
    result = _run(bench, "models", "verify", "delay@1", "--export", str(tmp_path / "full"))
    assert (result.exit_code, result.stderr.endswith("; name a new folder\n")) == (2, True), result.stderr


def test_versions_compare_by_gains_and_say_when_months_differ(bench: Bench) -> None:
    for seed, partition in ((1, "2013-11-01"), (2, "2013-12-01")):
        bench.judge(bench.version(seed, partition=partition))
    found = _json(bench, "models", "compare", "delay@1", "delay@2")
    assert not found["same_months"]
    assert [set(v["gains"]) for v in found["versions"]] == [{"gradient_boosting", "historical_rate", "logistic"}] * 2
    assert "compare gains, not AUC itself" in _run(bench, "models", "compare", "delay@1", "delay@2").output


def test_promote_takes_the_newest_eligible_version_and_rollback_returns(bench: Bench) -> None:
    bench.judge(bench.version(1))
    moved = _json(bench, "promote", MODEL)
    assert (moved["endpoint_id"], moved["stable"], moved["previous"], moved["epoch"]) == (MODEL, 1, None, 1)
    bench.judge(bench.version(2))
    bench.judge(bench.version(3), {"candidate": 0.5, "logistic": 1.5})
    assert "delay serves delay@2 (epoch 2, before: delay@1)" in _run(bench, "promote", MODEL).output
    assert _json(bench, "promote", MODEL)["epoch"] == 2
    assert "delay serves delay@1 again (epoch 3" in _run(bench, "rollback", MODEL).output
    assert _json(bench, "rollback", MODEL)["epoch"] == 3
    places = {r["version"]: r["endpoints"] for r in _json(bench, "models", "list")["models"]}
    assert places[1] == [{"endpoint": MODEL, "as": "stable", "epoch": 3}]


def test_a_refused_version_is_not_promoted_and_every_gate_is_named(bench: Bench) -> None:
    bench.judge(bench.version(1), {"candidate": 0.5, "logistic": 1.5})
    for reference in (MODEL, "delay@1"):
        result = _run(bench, "promote", reference)
        assert result.exit_code == 2
        assert "auc_over_logistic" in result.stderr
        assert "headway models show delay@1" in result.stderr
    assert _run(bench, "rollback", MODEL).exit_code == 2


def test_another_endpoint_may_be_named(bench: Bench) -> None:
    bench.judge(bench.version(1))
    assert _json(bench, "promote", "delay@1", "--endpoint", "delay_eu")["endpoint_id"] == "delay_eu"


def test_verify_checks_where_it_is_registered(bench: Bench) -> None:
    version = bench.version()
    bench.judge(version)
    found = _json(bench, "models", "verify", "delay@1")
    assert (found["verified"], found["eligible"], found["problems"]) == (True, True, {})
    path = bench.services.store.read_path(
        next(b.digest for b in version.facts.blobs if b.digest != version.manifest_digest)
    )
    path.chmod(0o644)
    path.write_bytes(b"changed")
    result = _run(bench, "models", "verify", "delay@1")
    assert result.exit_code == 1
    assert "NOT verified: 1 problem\n" in result.output


def test_a_refused_version_verifies_and_is_not_eligible(bench: Bench) -> None:
    bench.judge(bench.version(1), {"candidate": 0.5, "logistic": 1.5})
    found = _json(bench, "models", "verify", "delay@1")
    assert (found["verified"], found["eligible"]) == (True, False)
    assert "verified; not eligible: " in _run(bench, "models", "verify", "delay@1").output


def test_verify_works_offline_from_an_exported_bundle(bench: Bench, tmp_path: Path) -> None:
    bench.judge(bench.version(1))
    folder = tmp_path / "bundle"
    assert _run(bench, "models", "verify", "delay@1", "--export", str(folder)).exit_code == 0
    keys = tmp_path / "public.json"
    shutil.copy(bench.home / "keys" / "public.json", keys)
    away = {"HEADWAY_HOME": str(tmp_path / "nowhere")}

    def offline(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["models", "verify", *arguments, "--bundle", str(folder)], env=away)

    done = offline("delay@1", "--keys", str(keys), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["keys"] == str(keys)
    assert "not whose it is" in offline("delay@1").output
    assert not (tmp_path / "nowhere").exists()
    assert offline("delay@2").exit_code == 2
    (folder / "files" / "weights.safetensors").write_bytes(b"other")
    changed = offline("delay@1", "--keys", str(keys))
    assert changed.exit_code == 1
    assert "PROBLEM file weights.safetensors" in changed.output


def test_the_list_and_offline_verification_load_no_torch_and_no_dagster(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from headway.cli.main import main\n"
        "assert CliRunner().invoke(main, ['models', 'list']).exit_code == 0\n"
        "print(' '.join(sys.modules))"
    )
    env = {"PATH": "/usr/bin:/bin", "HEADWAY_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert {"torch", "dagster", "sklearn", "pandas", "scipy", "cryptography"}.isdisjoint(done.stdout.split())
