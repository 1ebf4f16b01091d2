"""`headway keys` and `headway models retire`: what a person does when a key or a version is not to be trusted."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.catalog_facts import ALICE
from support.registry_bench import MODEL, Bench, open_bench

from headway.cli.main import main


@pytest.fixture
def bench(tmp_path: Path, migrated_sqlite: Path) -> Iterator[Bench]:
    opened = open_bench(tmp_path / "home", migrated_sqlite, time.time_ns() // 1_000 - 3_600_000_000)
    yield opened
    opened.close()


def _run(bench: Bench, *arguments: str, answer: str = "") -> Result:
    env = {"HEADWAY_HOME": str(bench.home), "HEADWAY_TENANT": "acme", "HEADWAY_ACTOR": "alice"}
    return CliRunner().invoke(main, list(arguments), env=env, input=answer)


def _keys(bench: Bench) -> list[dict[str, Any]]:
    result = _run(bench, "keys", "list", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["keys"]


def _serve(bench: Bench) -> None:
    bench.judge(bench.version())
    assert _run(bench, "promote", "delay@1").exit_code == 0


def test_a_home_without_keys_says_so_and_makes_none(bench: Bench) -> None:
    assert _keys(bench) == []
    assert "no keys" in _run(bench, "keys", "list").output
    assert not (bench.home / "keys").exists()


def test_the_list_says_what_each_key_signed_and_what_serves_by_it(bench: Bench) -> None:
    _serve(bench)
    rows = {row["role"]: row for row in _keys(bench)}
    assert [r["state"] for r in rows.values()] == ["valid"] * 3
    assert [(role, r["statements"]) for role, r in rows.items()] == [("trainer", 1), ("gate", 8), ("promoter", 1)]
    assert [r["endpoints"] for r in rows.values()] == [[], [], [MODEL]]
    text = _run(bench, "keys", "list").output
    assert "1 statement; endpoints delay\n" in text
    assert text.endswith("3 keys\n")
    private = next((bench.home / "keys").glob("promoter-*.key")).read_bytes()
    assert private.hex() not in text


def test_a_rotated_key_keeps_what_it_signed(bench: Bench) -> None:
    _serve(bench)
    result = _run(bench, "keys", "rotate", "promoter")
    assert result.exit_code == 0, result.output
    rows = [r for r in _keys(bench) if r["role"] == "promoter"]
    assert [r["state"] for r in rows] == ["expired", "valid"]
    assert rows[1]["key_id"] in result.output
    assert _run(bench, "models", "verify", "delay@1").exit_code == 0


def test_revoking_asks_first_and_says_what_it_affects(bench: Bench) -> None:
    _serve(bench)
    key_id = next(r["key_id"] for r in _keys(bench) if r["role"] == "promoter")
    kept = _run(bench, "keys", "revoke", key_id, answer="n\n")
    assert kept.exit_code == 1
    assert "endpoint delay stops answering" in kept.output
    assert {r["state"] for r in _keys(bench)} == {"valid"}
    assert _run(bench, "keys", "revoke", key_id[7:17], answer="y\n").exit_code == 0
    assert next(r["state"] for r in _keys(bench) if r["key_id"] == key_id) == "revoked"
    assert "is revoked already" in _run(bench, "keys", "revoke", key_id).output


def test_after_a_revocation_the_only_version_serves_again_by_one_command(bench: Bench) -> None:
    _serve(bench)
    key_id = next(r["key_id"] for r in _keys(bench) if r["role"] == "promoter")
    assert _run(bench, "keys", "revoke", key_id, "--yes").exit_code == 0
    assert _run(bench, "models", "verify", "delay@1").exit_code == 1
    promoted = _run(bench, "promote", "delay@1")
    assert "delay serves delay@1 (epoch 2, before: none)" in promoted.output, promoted.output
    assert _run(bench, "models", "verify", "delay@1").exit_code == 0


@pytest.mark.parametrize("reference", ["sha256:", "0", "f" * 64, "sha256:" + "0" * 10])
def test_an_unclear_key_revokes_nothing(bench: Bench, reference: str) -> None:
    _serve(bench)
    result = _run(bench, "keys", "revoke", reference, "--yes")
    assert (result.exit_code, "headway keys list" in result.stderr) == (2, True)
    assert {r["state"] for r in _keys(bench)} == {"valid"}


def test_a_version_is_retired_with_a_reason_unless_it_serves(bench: Bench) -> None:
    _serve(bench)
    bench.judge(bench.version(2))
    assert _run(bench, "models", "retire", "delay@2").exit_code == 2
    served = _run(bench, "models", "retire", "delay@1", "--reason", "old")
    assert (served.exit_code, "stable" in served.stderr) == (2, True)
    assert _run(bench, "models", "retire", "delay@2", "--reason", "trained on wrong labels").exit_code == 0
    assert bench.services.catalog.model_version(ALICE, MODEL, 2).retired
    assert _run(bench, "promote", "delay@2").exit_code == 2
