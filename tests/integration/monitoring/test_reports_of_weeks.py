"""Weekly reports out of recorded answers and labels: quality when mature, drift per version, incidents, delays."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.monitoring_bench import HOUR, Asked, answer, compute, label, make_monitored, promote_version
from support.serving_bench import opened, pipeline_of
from support.workbench import Workbench

from headway.catalog.monitoring_facts import Report
from headway.monitoring.drift import DriftPolicy
from headway.monitoring.reports import (
    answered_versions,
    build_drift_report,
    build_quality_report,
    label_report,
    publish_report,
)
from headway.monitoring.versions import version_reference
from headway.monitoring.windows import week_bounds
from headway.registry.metrics import auc

ENDPOINT = "pipeline"
WEEKS = ("2026-03-02", "2026-03-09", "2026-03-16", "2026-03-23")
START = {week: week_bounds(week)[0] for week in WEEKS}
ROWS = 240


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workbench, dict[str, Asked]]:
    bench = make_monitored(tmp_path_factory.mktemp("monitored"))
    rng = np.random.default_rng(1)
    usual = rng.integers(0, 120, ROWS)
    batches = {
        "usual": compute(bench, usual, 1),
        "again": compute(bench, rng.integers(0, 120, ROWS), 2),
        "larger": compute(bench, rng.integers(90, 120, ROWS), 3),
        "other units": compute(bench, usual * 1_000, 4),
    }
    return bench, batches


@pytest.fixture
def bench(made: tuple[Workbench, dict[str, Asked]], tmp_path: Path) -> Workbench:
    import shutil

    shutil.copytree(made[0].folder.parent, tmp_path, dirs_exist_ok=True)
    return Workbench(tmp_path / "pipeline", tmp_path / "home")


@pytest.fixture
def batches(made: tuple[Workbench, dict[str, Asked]]) -> dict[str, Asked]:
    return made[1]


SCORES = np.random.default_rng(2).uniform(0.2, 0.8, ROWS)


def _drift(bench: Workbench, week: str, version: int | None = None) -> tuple[Report, dict[str, object]]:
    with opened(bench) as services:
        built = build_drift_report(services, pipeline_of(bench), ENDPOINT, week, week_bounds(week)[1], version)
        report = publish_report(services, built)
        return report, json.loads(services.store.get_bytes(report.document_digest))


def test_weeks_are_judged_against_the_frozen_reference_and_show_it(bench: Workbench, batches: dict[str, Asked]) -> None:
    named = dict(zip(WEEKS, ("usual", "larger", "other units", "again"), strict=True))
    for week, batch in named.items():
        answer(bench, batches[batch], START[week], SCORES)
    found = {week: _drift(bench, week) for week in WEEKS}
    assert [found[w][0].verdict for w in WEEKS] == ["none", "drift", "data_incident", "none"]
    assert len({document["reference"] for _, document in found.values()}) == 1
    moved = found[WEEKS[1]][1]
    features = moved["features"]
    assert isinstance(features, list)
    size = next(f for f in features if (f["name"], f["segment"]) == ("size", ""))
    assert (size["verdict"], size["direction"]) == ("drift", "up")
    assert moved["expected_by_chance"] != "not calibrated"
    incidents = found[WEEKS[2]][1]["incidents"]
    assert isinstance(incidents, list)
    assert {(i["kind"], i["feature"]) for i in incidents} == {("unit_change", "size"), ("unit_change", "doubled")}
    with opened(bench) as services:
        for report, document in found.values():
            plots = document["plots"]
            assert isinstance(plots, dict)
            assert services.store.get_bytes(plots["histograms"]).startswith(b"\x89PNG")
            assert {b.digest for b in report.blobs} >= {document["reference"], *plots.values()}
        assert [r.window for r in services.catalog.reports(services.principal, ENDPOINT, "drift")] == list(WEEKS)
    shown = bench.run("drift", "show", ENDPOINT)
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert "drift: moved: " in lines[1]
    assert "by chance" in lines[1]
    assert "persistence raised" in lines[1]
    told = [line.split(":")[0] for line in lines[4:]]
    assert told == [f"incident unit_change {name}, version 1, {WEEKS[2]}" for name in ("doubled", "size")]
    week = bench.run("drift", "show", ENDPOINT, "--week", WEEKS[2])
    assert "incident unit_change size" in week.stdout
    everything = json.loads(bench.run("drift", "show", ENDPOINT, "--json").stdout)
    assert [r["week"] for r in everything["reports"]] == list(WEEKS)


def test_the_same_week_judged_again_is_the_same_report(bench: Workbench, batches: dict[str, Asked]) -> None:
    answer(bench, batches["usual"], START[WEEKS[0]], SCORES)
    first, _ = _drift(bench, WEEKS[0])
    again, _ = _drift(bench, WEEKS[0])
    assert (first.report_id, first.seq) == (again.report_id, again.seq)


def test_the_reference_made_again_is_the_one_that_was_kept(bench: Workbench) -> None:
    policy = DriftPolicy(minimum=50)
    with opened(bench) as services:
        version = services.catalog.model_version(services.principal, ENDPOINT, 1)
        made, blobs = version_reference(services, pipeline_of(bench), version, policy, None)
        found, same = version_reference(services, pipeline_of(bench), version, policy, made.digest)
        other, _ = version_reference(services, pipeline_of(bench), version, DriftPolicy(minimum=60), made.digest)
        assert {b.digest for b in same} == {b.digest for b in blobs}
    assert made.digest == found.digest != other.digest
    assert made.calibration == found.calibration
    assert made.sample.rows == found.sample.rows == made.bins["size"].rows == 120
    for name, column in made.sample.columns.items():
        kept = found.sample.columns[name]
        assert (column.kind, column.missing.tolist()) == (kept.kind, kept.missing.tolist())
        assert column.values[~column.missing].tolist() == kept.values[~kept.missing].tolist()


def test_t6_each_version_of_a_week_has_its_own_report_and_its_own_weeks(
    bench: Workbench, batches: dict[str, Asked]
) -> None:
    answer(bench, batches["larger"], START[WEEKS[0]], SCORES)
    assert _drift(bench, WEEKS[0])[0].verdict == "drift"
    assert promote_version(bench, seed=1) == 2
    old, new = range(0, ROWS, 3), [r for r in range(ROWS) if r % 3]
    answer(bench, batches["larger"], START[WEEKS[1]], SCORES, name="old", rows=old)
    answer(bench, batches["usual"], START[WEEKS[1]], SCORES, name="new", rows=new, version=2)
    with opened(bench) as services:
        assert answered_versions(services, ENDPOINT, WEEKS[1]) == (2, 1)
    by_version = {version: _drift(bench, WEEKS[1], version) for version in (1, 2)}
    assert by_version[1][0].verdict == "drift"
    assert by_version[2][0].verdict == "none"
    persistence = by_version[2][1]["persistence"]
    assert persistence == {"state": "clear", "weeks": []}


def test_views_behind_their_source_are_an_incident_of_the_day(bench: Workbench, batches: dict[str, Asked]) -> None:
    day = range(ROWS // 7 * 2, ROWS // 7 * 3)
    other = [r for r in range(ROWS) if r not in day]
    behind = ["recent:watermark_behind", "newest:partition_not_read"]
    answer(bench, batches["usual"], START[WEEKS[0]], SCORES, name="x", rows=other)
    answer(bench, batches["usual"], START[WEEKS[0]], SCORES, name="y", rows=day, degraded=behind)
    report, document = _drift(bench, WEEKS[0])
    assert report.verdict == "data_incident"
    incidents = document["incidents"]
    assert isinstance(incidents, list)
    assert [(i["kind"], i["feature"]) for i in incidents] == [("stale_watermark", "recent")]


def test_a_version_without_reference_and_a_week_without_answers_say_so(
    bench: Workbench, batches: dict[str, Asked]
) -> None:
    assert promote_version(bench, seed=1, with_reference=False) == 2
    answer(bench, batches["usual"], START[WEEKS[0]], SCORES, version=2)
    report, document = _drift(bench, WEEKS[0])
    assert report.verdict == "no_reference"
    assert document["features"] == []
    with opened(bench) as services:
        for built in (
            build_drift_report(services, pipeline_of(bench), ENDPOINT, WEEKS[3], START[WEEKS[3]]),
            build_quality_report(services, pipeline_of(bench), ENDPOINT, WEEKS[3], START[WEEKS[3]]),
            label_report(services, pipeline_of(bench), ENDPOINT, WEEKS[3], START[WEEKS[3]]),
        ):
            assert (built.verdict, built.so_far) == ("no_predictions", True)
    refused = bench.run("drift", "show", "elsewhere")
    assert refused.exit_code == 2
    assert "no drift reports" in refused.output


def test_t8_immature_labels_make_no_quality_number_and_mature_ones_do(
    bench: Workbench, batches: dict[str, Asked]
) -> None:
    ids = answer(bench, batches["usual"], START[WEEKS[0]], SCORES)
    truth = (np.random.default_rng(3).random(ROWS) < SCORES).astype(int)
    came = [week_bounds(WEEKS[0])[1] + 5 * HOUR] * ROWS
    outcomes = list(zip(ids, truth.tolist(), came, strict=True))
    label(bench, outcomes[: ROWS // 2])
    now = week_bounds(WEEKS[1])[1]

    def judged(at: int) -> Report:
        with opened(bench) as services:
            built = build_quality_report(services, pipeline_of(bench), ENDPOINT, WEEKS[0], at)
            return publish_report(services, built)

    early = judged(now)
    assert (early.verdict, early.reason) == ("immature", "labels_missing: 50.0% of the expected labels are there")
    numbers = ("auc", "auc_lower", "auc_upper", "log_loss", "calibration_error", "rate", "mean_score")
    assert {early.metrics[n] for n in numbers} == {None}
    assert early.metrics["labels"] == 0
    label(bench, outcomes[ROWS // 2 :])
    # Labels that came later than "now" are not known then.
    assert judged(came[0] - 1).verdict == "immature"
    late = judged(now)
    assert late.verdict in ("ok", "loss")
    assert late.metrics["labels"] == ROWS
    assert late.metrics["auc"] == pytest.approx(auc(SCORES, truth.astype(float)))
    assert late.metrics["evaluation_auc"] is not None
    assert late.seq > early.seq
    with opened(bench) as services:
        document = json.loads(services.store.get_bytes(late.document_digest))
        assert services.store.get_bytes(document["plots"]["quality_by_week"]).startswith(b"\x89PNG")
    assert document["basis"] == "realised"
    assert document["estimate"] is None
    assert sum(map(sum, document["confusion"]["counts"])) == ROWS
    segment = document["segments"]["k"]["a"]
    assert segment["state"] == "mature"
    assert segment["quality"]["rows"] == segment["labelled"] == segment["answers"]


def test_the_delay_of_labels_is_told_with_those_still_awaited(bench: Workbench, batches: dict[str, Asked]) -> None:
    ids = answer(bench, batches["usual"], START[WEEKS[0]], SCORES)
    end = week_bounds(WEEKS[0])[1]
    asked = [START[WEEKS[0]] + (row * 7 * 24 * HOUR) // ROWS for row in range(ROWS)]
    label(bench, [(p, row % 2, asked[row] + 6 * HOUR) for row, p in enumerate(ids) if row % 4])
    with opened(bench) as services:
        built = label_report(services, pipeline_of(bench), ENDPOINT, WEEKS[0], end + 48 * HOUR)
        report = publish_report(services, built)
        document = json.loads(services.store.get_bytes(report.document_digest))
    assert (report.verdict, report.model_version) == ("immature", None)
    assert report.metrics["delay_p50_hours"] == pytest.approx(6)
    assert report.metrics["delay_p95_hours"] is None
    assert report.metrics["completeness"] == pytest.approx(0.75)
    assert document["by_age"]["1h"] == 0
    assert document["by_age"]["1d"] == pytest.approx(0.75, abs=0.01)
    assert sum(v["answers"] for v in document["by_segment"]["k"].values()) == ROWS
