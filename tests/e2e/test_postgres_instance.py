"""Dagster's storage and the catalog on PostgreSQL: a materialization, its checks and a partitioned backfill."""

import time
from pathlib import Path
from typing import Any

from support.postgres import Postgres
from support.serving import WAIT_SECONDS, ask, serving

from headway.home import load_settings
from headway.services import open_services

DAYS = ["2013-01-01", "2013-01-02", "2013-12-31"]
KEY = ["flight_delay", "dataset_version", "weather"]

BACKFILL = """mutation($params: LaunchBackfillParams!) {
  launchPartitionBackfill(backfillParams: $params) {
    __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }"""
STATE = """query($id: String!) { partitionBackfillOrError(backfillId: $id) {
  ... on PartitionBackfill { status numPartitions error { message } } } }"""
SHOWN = """query($key: AssetKeyInput!, $days: [String!]) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
  assetMaterializations(partitions: $days) { partition metadataEntries { label ... on TextMetadataEntry { text } } }
  assetChecksOrError { ... on AssetChecks { checks { name executionForLatestMaterialization { status } } } } } } }"""


def test_backfill_checks_and_catalog_on_postgres(tmp_path: Path, postgres: Postgres) -> None:
    dagster, catalog = postgres.fresh_database(), postgres.fresh_database()
    settings = {
        "HEADWAY_DAGSTER_DATABASE_URL": "postgresql+psycopg2://" + dagster.partition("://")[2],
        "HEADWAY_DATABASE_URL": catalog,
    }
    with serving(tmp_path / "home", settings) as (_, url):
        params = {"assetSelection": [{"path": KEY}], "partitionNames": DAYS, "tags": []}
        launched = ask(url, BACKFILL, params=params)["launchPartitionBackfill"]
        assert launched["__typename"] == "LaunchBackfillSuccess", launched
        state = _finished(url, launched["backfillId"])
        assert state["status"] == "COMPLETED_SUCCESS", state
        node = ask(url, SHOWN, key={"path": KEY}, days=DAYS)["assetNodeOrError"]
    statuses = {
        m["partition"]: next(e["text"] for e in m["metadataEntries"] if e["label"] == "status")
        for m in node["assetMaterializations"]
    }
    assert statuses == dict.fromkeys(DAYS, "released")
    checks = {c["name"]: c["executionForLatestMaterialization"]["status"] for c in node["assetChecksOrError"]["checks"]}
    assert checks == dict.fromkeys(["quality", "schema_contract", "privacy"], "SUCCEEDED")
    with open_services(load_settings({"HEADWAY_HOME": str(tmp_path / "home"), "HEADWAY_DATABASE_URL": catalog})) as s:
        versions = s.catalog.current_many(s.principal, "flight_delay/weather")
    assert {p: (v.status, v.reason) for p, v in versions.items()} == {
        DAYS[0]: ("released", None),
        DAYS[1]: ("released", None),
        DAYS[2]: ("released", "no_data_published"),
    }


def _finished(url: str, backfill: str) -> dict[str, Any]:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        state = ask(url, STATE, id=backfill)["partitionBackfillOrError"]
        if state["status"] not in ("REQUESTED", "CANCELING") or time.monotonic() > deadline:
            return state
        time.sleep(1)
