"""The loop's stages through a Dagster instance: shipped, labelled and judged by week; rows first, then green."""

import asyncio
import base64
import re
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.parquet as pq
import pytest
from support.live_bench import ask, running, sync
from support.loop_bench import (
    DAYS,
    ENDPOINT,
    WEEK,
    WEEKS,
    answer_days,
    copied,
    label_values,
    loop_assets,
    make_loop,
    materialize,
    numbered_requests,
    opened,
    set_world,
    temporary_instance,
    write_loop_bench,
)
from support.workbench import Workbench

from headway.catalog.monitoring_facts import ReportKind
from headway.home import load_settings
from resources.platform import Platform

STAGES = ("predictions", "labels", "quality_report", "drift_report")
KINDS: dict[str, ReportKind] = {
    "predictions": "predictions",
    "labels": "labels",
    "quality_report": "quality",
    "drift_report": "drift",
}


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """A bench that serves, of which nothing was asked."""
    return make_loop(tmp_path_factory.mktemp("loop"))


@pytest.fixture(scope="module")
def asked(loop: Workbench, tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """A bench whose server answered 120 requests, which lie in its log; the world is a day after the week."""
    bench = copied(loop, tmp_path_factory.mktemp("asked"))
    set_world(bench, "2026-03-07T00:00:00Z")
    sync(bench)
    requests = numbered_requests(bench, label_values(bench, DAYS))

    async def answer() -> None:
        async with running(bench) as engine:
            for first in range(0, requests.num_rows, 40):
                await ask(engine, requests.slice(first, 40))

    asyncio.run(answer())
    set_world(bench, "2026-03-10T00:00:00Z")
    return bench


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with temporary_instance(tmp_path) as found:
        yield found


def _shown(done: dg.ExecuteInProcessResult) -> dict[str, dict[str, Any]]:
    """Metadata of every materialized week."""
    return {
        str(event.partition): {k: getattr(v, "value", v) for k, v in event.materialization.metadata.items()}
        for event in done.get_asset_materialization_events()
    }


def _checks(done: dg.ExecuteInProcessResult) -> dict[str, Any]:
    return {check.check_name: check for check in done.get_asset_check_evaluations()}


def _failure(done: dg.ExecuteInProcessResult) -> str:
    event = next(e for e in done.all_events if e.is_step_failure)
    return str(event.step_failure_data.user_failure_data.description)  # pyright: ignore[reportOptionalMemberAccess]


def _reports(bench: Workbench, kind: ReportKind) -> dict[str, Any]:
    with opened(bench) as services:
        return {r.window: r for r in services.catalog.reports(services.principal, ENDPOINT, kind)}


def _rows(table: Any) -> Sequence[dict[str, Any]]:  # noqa: ANN401
    return [record.data for record in table.records]


def test_a_servers_answers_are_shipped_labelled_and_judged(
    asked: Workbench, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    bench = copied(asked, tmp_path / "bench")
    shown: dict[str, dict[str, Any]] = {}
    checks: dict[str, Any] = {}
    for stage in STAGES:
        done = materialize(bench, instance, stage, WEEK)
        assert done.success, _failure(done)
        shown[stage] = _shown(done)[WEEK]
        checks |= {f"{stage}:{name}": check for name, check in _checks(done).items()}
        report = _reports(bench, KINDS[stage])[WEEK]
        assert shown[stage]["report_id"] == report.report_id, "green only after the row"
        assert shown[stage]["endpoint"] == ENDPOINT

    answers = shown["predictions"]
    assert (answers["status"], answers["dagster/partition_row_count"], answers["by_source/online"]) == (
        "complete",
        120,
        120,
    )
    assert checks["predictions:completeness"].passed
    assert "120 records shipped and recorded once; 0 torn, 0 dropped" in checks["predictions:completeness"].description
    with opened(bench) as services, services.store.open(answers["rows_digest"]) as file:
        rows = pq.read_table(file)
        assert rows.num_rows == 120
        stored = services.catalog.predictions_by_id(services.principal, rows.column("prediction_id").to_pylist())
        assert [stored[r["prediction_id"]].score for r in rows.to_pylist()] == rows.column("score").to_pylist()
        assert "segment__k" in rows.column_names

    labels = shown["labels"]
    assert (labels["status"], labels["labelled"], labels["labels_added"], labels["inbox"]) == ("complete", 120, 120, 0)
    assert labels["label_partitions_not_read"] == "none"
    assert sum(r["answers"] for r in _rows(labels["by_segment"])) == 120
    assert checks["labels:completeness"].passed

    quality = shown["quality_report"]
    assert (quality["basis"], quality["labelled"], quality["model_version"]) == ("realised", 120, 1)
    assert [r["metric"] for r in _rows(quality["quality"])] == ["AUC", "log loss", "calibration error"]
    assert [r["version"] for r in _rows(quality["by_version"])] == [1]

    drift = shown["drift_report"]
    assert drift["status"] == "data_incident", "a third of the rows has keys that the model's reference does not know"
    assert [(r["kind"], r["feature"]) for r in _rows(drift["what_broke"])] == [("new_category", "k")]
    incident, moved = checks["drift_report:data_incident"], checks["drift_report:drift"]
    assert (incident.passed, incident.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert f"{WEEK}@1: new_category of k" in incident.description
    assert moved.passed
    for stage in STAGES[1:]:
        (path,) = [value for name, value in shown[stage].items() if name.startswith("plot/")]
        assert Path(path).read_bytes().startswith(b"\x89PNG")
        inline = re.fullmatch(r"!\[.*\]\(data:image/png;base64,(.*)\)", shown[stage]["plot"])
        assert inline is not None
        assert base64.b64decode(inline[1]) == Path(path).read_bytes()
        assert len(inline[1]) <= 40_000


def test_a_range_gives_one_report_a_week_and_the_same_as_single_runs(
    asked: Workbench, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    together, apart = copied(asked, tmp_path / "range"), copied(asked, tmp_path / "single")
    for stage in STAGES:
        done = materialize(together, instance, stage, *WEEKS[:3])
        assert done.success, _failure(done)
        shown = _shown(done)
        assert list(shown) == list(WEEKS[:3])
        assert [shown[week]["status"] == "no_predictions" for week in WEEKS[:3]] == [True, False, True]
        assert not any("plot" in facts for facts in shown.values()), "no inline image per partition of a range"
        for check in _checks(done).values():
            table = _rows(check.metadata["table_by_week"].value)
            assert WEEK in [row["week"] for row in table]
        assert materialize(apart, instance, stage, WEEK).success
        one, other = (_reports(bench, KINDS[stage]) for bench in (together, apart))
        assert {w: r.report_id for w, r in one.items()} == {w: r.report_id for w, r in other.items()}
        assert set(one) == {WEEK}
    again = materialize(together, instance, "drift_report", WEEK)
    report = _reports(together, "drift")[WEEK]
    assert (_shown(again)[WEEK]["report_id"], report.seq) == (report.report_id, 1), "done again, it is the same report"


def test_a_week_ahead_is_refused_by_name_and_stops_no_other(
    loop: Workbench, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    bench = copied(loop, tmp_path / "bench")
    answer_days(bench)
    set_world(bench, "2026-03-12T00:00:00Z")
    done = materialize(bench, instance, "predictions", *WEEKS)
    assert not done.success
    assert "1 of 4 weeks not done: 2026-03-16: the week of 2026-03-16 begins at 2026-03-16T00:00:00Z" in _failure(done)
    assert set(_reports(bench, "predictions")) == {WEEK}
    assert instance.get_materialized_partitions(dg.AssetKey(["pipeline", "predictions"])) == set(WEEKS[:3])


def test_a_week_that_cannot_be_judged_stops_no_other(
    loop: Workbench, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    bench = copied(loop, tmp_path / "bench")
    answer_days(bench)
    set_world(bench, "2026-03-12T00:00:00Z")
    done = materialize(bench, instance, "drift_report", *WEEKS[:3])
    assert not done.success
    assert "1 of 3 weeks not done: 2026-03-02: InvalidManifest" in _failure(done), "planted answers have no document"
    assert instance.get_materialized_partitions(dg.AssetKey(["pipeline", "drift_report"])) == {WEEKS[0], WEEKS[2]}


def test_a_week_that_is_not_over_is_told_so_far_and_again_when_it_is(
    loop: Workbench, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    bench = copied(loop, tmp_path / "bench")
    answer_days(bench, DAYS[:2])
    for stage in ("predictions", "labels", "quality_report"):
        (facts,) = _shown(materialize(bench, instance, stage, WEEK)).values()
        assert facts["status"] in ("so_far", "complete, so far", "ok, so far", "loss, so far")
    set_world(bench, "2026-03-09T00:00:00Z")
    answer_days(bench, DAYS[2:])
    (facts,) = _shown(materialize(bench, instance, "predictions", WEEK)).values()
    assert (facts["status"], facts["dagster/partition_row_count"]) == ("complete", 120)
    report = _reports(bench, "predictions")[WEEK]
    assert (report.verdict, report.seq) == ("complete", 2)


def test_labels_that_are_wanting_warn_and_block_nothing(
    asked: Workbench, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    bench = copied(asked, tmp_path / "bench")
    assert materialize(bench, instance, "predictions", WEEK).success
    with opened(bench) as services:
        version = services.catalog.current(services.principal, "pipeline/labels", DAYS[1])
        assert version is not None
        services.catalog.retire_version(services.principal, None, "pipeline/labels", version.version, "taken back")
    young = _checks(materialize(bench, instance, "labels", WEEK))["completeness"]
    assert (young.passed, young.description) == (True, "0 weeks complete, 1 too young to judge")
    set_world(bench, "2026-03-12T00:00:00Z")
    done = materialize(bench, instance, "labels", WEEK)
    assert done.success
    check, facts = _checks(done)["completeness"], _shown(done)[WEEK]
    assert (check.passed, check.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert check.description == f"below the declared share: {WEEK}"
    assert (facts["labelled"], facts["label_partitions_not_read"]) == (80, DAYS[1])
    quality = _shown(materialize(bench, instance, "quality_report", WEEK))[WEEK]
    assert quality["status"] == "immature"
    assert "auc" not in quality


def test_nothing_promoted_is_green_and_empty(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    bench = write_loop_bench(tmp_path / "bench")
    set_world(bench, "2026-03-12T00:00:00Z")
    for stage in STAGES:
        done = materialize(bench, instance, stage, WEEK)
        assert done.success, _failure(done)
        (facts,) = _shown(done).values()
        assert (facts["status"], facts["reason"]) == (
            "no_predictions",
            "nothing was promoted to endpoint pipeline yet",
        )
        assert all(check.passed for check in _checks(done).values())


def test_records_that_do_not_add_up_fail_completeness(
    asked: Workbench, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    bench = copied(asked, tmp_path / "bench")
    assert materialize(bench, instance, "predictions", WEEK).success
    file = load_settings({"HEADWAY_HOME": str(bench.home)}).home / "catalog.db"
    with sqlite3.connect(file) as database:
        database.execute(
            "INSERT INTO inference_segment SELECT tenant_id, server, 'lost', 0, to_offset, 7, torn, dropped, at, "
            "command_key FROM inference_segment LIMIT 1"
        )
    done = materialize(bench, instance, "predictions", WEEK)
    check = _checks(done)["completeness"]
    assert (check.passed, check.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert "7 answers were shipped, 0 are recorded" in check.description


def test_the_online_store_follows_the_world_and_equals_the_batch_path(
    loop: Workbench, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    bench = copied(loop, tmp_path / "bench")
    first = materialize(bench, instance, "online_features")
    assert first.success, _failure(first)
    facts = _shown(first)["None"]
    assert (facts["until"], facts["rows_read"] > 0) == ("2026-03-06T00:00:00Z", True)
    assert {r["source"] for r in _rows(facts["sources"])} == {"data", "register"}
    parity = _checks(first)["parity"]
    assert parity.passed
    assert parity.metadata["requests"].value == 24
    again = _shown(materialize(bench, instance, "online_features"))["None"]
    assert (again["rows_written"], again["versions_read"]) == (0, 0)
    with sqlite3.connect(bench.home / "online.db") as database:
        # Half a day earlier in the store than in the dataset.
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            if "event_time" in [column[1] for column in database.execute(f"PRAGMA table_info({table})")]:
                database.execute(f"UPDATE {table} SET event_time = event_time - 43200000000")
    broken = _checks(materialize(bench, instance, "online_features"))["parity"]
    assert not broken.passed
    assert broken.severity == dg.AssetCheckSeverity.ERROR
    assert re.match(r"differ: newest__value in \d+ requests, ", broken.description)


def test_reports_follow_what_was_updated_and_nothing_else(
    loop: Workbench, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    bench = copied(loop, tmp_path / "bench")
    answer_days(bench)
    set_world(bench, "2026-03-12T00:00:00Z")
    defs = dg.Definitions(assets=loop_assets(bench), resources={"platform": Platform(home=str(bench.home))})

    def wanted(cursor: Any) -> tuple[set[tuple[str, str]], Any]:  # noqa: ANN401
        result = dg.evaluate_automation_conditions(defs, instance=instance, cursor=cursor)
        keys = [dg.AssetKey(["pipeline", stage]) for stage in STAGES]
        return {
            (key.path[-1], part) for key in keys for part in result.get_requested_partitions(key) if part
        }, result.cursor

    found, cursor = wanted(None)
    assert found == set(), "nothing is asked for merely because it is missing"
    materialize(bench, instance, "predictions", WEEK)
    found, cursor = wanted(cursor)
    assert ("labels", WEEK) in found
    assert {week for _, week in found} == {WEEK}
    for stage in ("labels", "quality_report", "drift_report"):
        materialize(bench, instance, stage, WEEK)
    found, cursor = wanted(cursor)
    assert found == set()
