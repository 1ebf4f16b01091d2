"""A data engineer's day on Dagster's page, in a real browser over a real webserver and daemon."""

import re
from collections.abc import Callable
from typing import Any, Protocol

import pytest
from selenium.webdriver.common.keys import Keys
from support.browser import Page
from support.retrain_bench import set_world
from support.serving import ask
from support.training_bench import TrainingBench
from support.ui_bench import (
    AFTER_NEXT,
    BAD_DAY,
    GOOD_AS_OF,
    HOLD,
    LAST_VERSION,
    NEXT_DAY,
    NOW_AFTER_NEXT_IS_DUE,
    OPEN_AS_OF,
    REFUSED_AS_OF,
)

pytestmark = [pytest.mark.xdist_group("ui"), pytest.mark.timeout(1800)]

VISITS, SNAPSHOT, TRAINING, VERSION = "dataset_version/visits", "feature_snapshot", "training_run", "model_version"
DIALOG_PARTITIONS = "(//input[starts-with(@placeholder,'ex: ')])[last()]"
HALF = [f"2026-04-0{day}" for day in range(1, 6)]
CONFIG = """ops:
  shop__training_run:
    config:
      epochs: 2
      seed: 11
      note: tried from the Launchpad
"""
RUN = """query($id: ID!) { runOrError(runId: $id) { ... on Run { status runConfigYaml } } }"""
NEWEST_RUN = """query { runsOrError(limit: 1) { ... on Runs { results { runId } } } }"""


class Shop(Protocol):
    """What the fixture gives."""

    url: str
    bench: TrainingBench
    page: Page
    asset: Callable[..., None]


def test_a_quarantined_partition_is_found_with_its_reason(shop: Shop) -> None:
    shop.asset(VISITS, "checks", "1 of 1 partitions not released 2026-04-30", "Failed", check="quality")
    shop.page.sees("not_released", "3 of 12 rows fail")
    shop.page.picture("quarantined-check")
    shop.asset(VISITS, "partitions", "quarantined", "rows_quarantined", partition=BAD_DAY)
    shop.page.sees("3 of 12 rows fail (limit 0.0%): rule 2 expect_column_values_to_be_between 3")
    shop.page.picture("quarantined-partition")


def test_one_partition_is_materialised(shop: Shop) -> None:
    shop.asset(VISITS, "partitions", "Missing (17)", partition=NEXT_DAY)
    shop.page.click("Materialize…")
    shop.page.sees("Launch runs to materialize shop / dataset_version / visits", "1 partition")
    shop.page.picture("materialise-one")
    shop.page.click("Launch 1 run")
    shop.page.wait(lambda: status_of(shop, VISITS, NEXT_DAY) == "released", "the day is released")
    shop.asset(VISITS, "partitions", "Missing (16)", "released", "all rules held", partition=NEXT_DAY)
    shop.page.picture("materialised")
    # The last hour of a day reaches into the next one's rows, so its snapshot waited for them.
    shop.page.wait(lambda: status_of(shop, SNAPSHOT, LAST_VERSION) == "published", "a snapshot follows by itself")


def test_ten_days_are_backfilled_and_cancelled_half_way(shop: Shop) -> None:
    hold = shop.bench.home / HOLD
    hold.write_text(HALF[-1])
    try:
        shop.asset(SNAPSHOT, "partitions", "Missing (")
        shop.page.click("Materialize…")
        shop.page.sees("Launch runs to materialize shop / feature_snapshot")
        shop.page.field(DIALOG_PARTITIONS, "[2026-04-01...2026-04-10]", Keys.ENTER, Keys.TAB)
        shop.page.sees("10 partitions", "Backfills all partitions in a single run.")
        shop.page.picture("backfill-dialog")
        shop.page.click("Launch backfill")
        shop.page.wait(lambda: built(shop.bench)[:5] == HALF, "half of the days are in the catalog")
        run_id = newest_run(shop)
        shop.page.open(f"{shop.url}/runs/{run_id}", "5/10 2026-04-05 published")
        shop.page.picture("backfill-half-way")
        shop.page.click("Terminate")
        confirm(shop.page)
        shop.page.wait(lambda: run(shop, run_id)["status"] == "CANCELED", "the run is cancelled")
    finally:
        hold.unlink()
    # What was done is there, in the catalog and on the page; what was not is missing, and nothing else is.
    assert [day for day in built(shop.bench) if day <= "2026-04-10"] == HALF
    shop.asset(SNAPSHOT, "partitions", "published", partition=HALF[-1])
    shop.asset(SNAPSHOT, "partitions", "Missing", partition="2026-04-06")
    shop.page.picture("backfill-cancelled")


@pytest.fixture(scope="module")
def launched(shop: Shop) -> str:
    """The Dagster run of a training launched from the Launchpad, which goes on until somebody ends it."""
    (shop.bench.home / "runs" / "default").mkdir(parents=True, exist_ok=True)
    (shop.bench.home / "runs" / "default" / "hold").touch()
    shop.asset(TRAINING, "partitions", "Materialize…", partition=OPEN_AS_OF)
    shop.page.click_path("//button[normalize-space(.)='Materialize…']/following::button[1]", "the menu opens")
    shop.page.click("Open launchpad")
    shop.page.sees("Launchpad (configure assets)", "No errors")
    shop.page.field("//input[@placeholder='Partition']", OPEN_AS_OF)
    offered = f"//*[normalize-space(.)='{OPEN_AS_OF}' and not(*)]"
    shop.page.click_path(f"{offered}[ancestor::*[contains(@class,'opover')]]", "the month is offered")
    shop.page.paste("//*[contains(@class,'CodeMirror-lines')]", CONFIG)
    shop.page.sees("tried from the Launchpad", "No errors")
    shop.page.picture("launchpad")
    before = newest_run(shop)
    shop.page.click_path("(//button[normalize-space(.)='Materialize'])[last()]", "the training can be launched")
    return shop.page.wait(lambda: found if (found := newest_run(shop)) != before else "", "a run is there")


def test_a_training_is_launched_with_two_epochs_and_another_seed(shop: Shop, launched: str) -> None:
    assert re.search(r"epochs: 2\n.*seed: 11", run(shop, launched)["runConfigYaml"], re.DOTALL)
    trained = shop.page.wait(lambda: shop.bench.runs()[2:], "the training is in the catalog")
    assert [r.facts.seed for r in trained] == [11]


def test_a_training_is_watched_while_it_runs(shop: Shop, launched: str) -> None:
    shop.page.open(f"{shop.url}/runs/{launched}", "started", "snapshots", "reserves")
    shop.page.sees("step ")
    shop.page.picture("training-runs")
    assert run(shop, launched)["status"] == "STARTED"


def test_a_training_is_cancelled(shop: Shop, launched: str) -> None:
    shop.page.open(f"{shop.url}/runs/{launched}", "Terminate")
    shop.page.click("Terminate")
    confirm(shop.page)
    shop.page.wait(lambda: run(shop, launched)["status"] == "CANCELED", "Dagster's run is cancelled")
    (cancelled,) = shop.bench.runs()[2:]
    assert cancelled.status == "cancelled"
    assert shop.bench.launcher().strays() == []
    shop.page.open(f"{shop.url}/runs/{launched}", "Canceled", "its workers are gone")
    shop.page.picture("training-cancelled")


def test_why_a_gate_refused(shop: Shop) -> None:
    shop.asset(
        VERSION, "checks", "fail: AUC 0.2", "its lower end must exceed -0.2500", check="auc_over_historical_rate"
    )
    shop.page.sees("reference_auc", "Failed")
    shop.page.picture("gate-refused")


def test_what_a_sensor_skipped_and_why(shop: Shop) -> None:
    shop.page.open(f"{shop.url}/locations/shop/sensors/retrain_on_drift", "Runs unasked", "0 runs requested")
    shop.page.click("View logs")
    shop.page.sees("shop: nothing: neither drift nor a loss of quality")
    shop.page.picture("sensor-skipped")


def test_two_versions_are_compared(shop: Shop) -> None:
    shop.asset(VERSION, "partitions", "eligible", "metric/auc", partition=GOOD_AS_OF)
    shop.asset(VERSION, "partitions", "champion", partition=REFUSED_AS_OF)
    shop.page.sees("refused by auc_over_historical_rate", "0.2761", "0.7239")
    shop.page.picture("two-versions")
    shop.page.click("[Show Markdown]")
    shop.page.sees("shop@2: refused by auc_over_historical_rate", "verdict", "From run")
    shop.page.picture("version-card")


def test_from_a_version_to_raw_data(shop: Shop) -> None:
    shop.page.open(f"{shop.url}/assets/shop/model_version?view=lineage&lineageScope=upstream&lineageDepth=5", "visits")
    shop.page.picture("lineage")
    for stage, shown in ((VERSION, "run_id"), (TRAINING, "snapshots"), (SNAPSHOT, "proof_digest"), (VISITS, "status")):
        shop.asset(stage, "overview", shown)
        upstream = {VERSION: "training_run", TRAINING: "feature_snapshot", SNAPSHOT: "visits"}.get(stage)
        if upstream is not None:
            shop.page.sees("Upstream assets")
            shop.page.click_path(
                f"//*[normalize-space(.)='Upstream assets']/following::a[contains(@href,'{upstream}')][1]", upstream
            )
            shop.page.wait(lambda wanted=upstream: wanted in shop.page.driver.current_url, f"{upstream} opens")
    shop.page.sees("Visits to the shops, and whether something was bought.", "visits.csv")
    shop.page.picture("raw-data")


def test_the_nightly_schedule_and_the_automation_follow_the_worlds_clock(shop: Shop) -> None:
    shop.page.open(f"{shop.url}/locations/shop/schedules/shop_nightly", "Runs unasked")
    shop.page.click("View logs")
    shop.page.sees("every partition that closed within 7 days has a version")
    assert status_of(shop, VISITS, AFTER_NEXT) == ""
    set_world(shop.bench, NOW_AFTER_NEXT_IS_DUE)
    shop.page.wait(lambda: status_of(shop, VISITS, AFTER_NEXT) == "released", "the night reads the day")
    shop.page.wait(lambda: status_of(shop, SNAPSHOT, NEXT_DAY) == "published", "the day before gets its snapshot")
    assert status_of(shop, VISITS, "2026-04-15") == "", "a day that is not due is not asked for"


def status_of(shop: Shop, key: str, partition: str) -> str:
    """What the newest materialization of a partition says of its status, empty when there is none."""
    query = """query($key: AssetKeyInput!, $partitions: [String!]) { assetNodeOrError(assetKey: $key) {
      ... on AssetNode { assetMaterializations(partitions: $partitions, limit: 1) { metadataEntries {
        label ... on TextMetadataEntry { text } } } } } }"""
    path = ["shop", *key.split("/")]
    found = ask(shop.url, query, key={"path": path}, partitions=[partition])["assetNodeOrError"][
        "assetMaterializations"
    ]
    entries = found[0]["metadataEntries"] if found else []
    return next((e["text"] for e in entries if e["label"] == "status"), "")


def built(bench: TrainingBench) -> list[str]:
    """Days after March with a published snapshot in the catalog."""
    with bench.services() as services:
        states = services.catalog.current_snapshots(services.principal, "shop")
        return sorted(p for p, s in states.items() if p > "2026-04" and s.status == "published")


def newest_run(shop: Shop) -> str:
    """The Dagster run that was launched last."""
    return ask(shop.url, NEWEST_RUN)["runsOrError"]["results"][0]["runId"]


def run(shop: Shop, run_id: str) -> dict[str, Any]:
    """Status and configuration of a Dagster run."""
    return ask(shop.url, RUN, id=run_id)["runOrError"]


def confirm(page: Page) -> None:
    """Agree to what the page asks before it ends a run."""
    page.click_path("//*[@role='dialog' or contains(@class,'Dialog')]//button[contains(.,'Terminate')]", "it asks")
