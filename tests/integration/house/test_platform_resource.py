"""The `platform` resource: opens on first use, works inside a materialization, and shows no secret in Dagster."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from headway.home import SettingError, load_settings, write_dagster_instance
from resources.platform import Platform
from resources.wiring import resources_for


@dg.asset
def probe(platform: Platform) -> dg.MaterializeResult[Any]:
    blob = platform.store().put_bytes(b"row")
    platform.catalog().ensure_tenant(platform.principal())
    return dg.MaterializeResult(metadata={"digest": blob.digest, "tenant": platform.principal().tenant})


def test_an_asset_reaches_catalog_store_and_principal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_TENANT", "acme")
    settings = load_settings({"HEADWAY_HOME": str(tmp_path)})
    result = dg.materialize([probe], resources=resources_for(settings))
    (event,) = result.get_asset_materialization_events()
    assert event.materialization.metadata["tenant"].value == "acme"
    assert (tmp_path / "catalog.db").exists()


def test_building_the_resources_opens_nothing(tmp_path: Path) -> None:
    resources_for(load_settings({"HEADWAY_HOME": str(tmp_path / "home")}))
    assert not (tmp_path / "home").exists()


def test_the_database_url_is_no_resource_configuration() -> None:
    assert set(Platform.model_fields) == {"home"}


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingError, match="HEADWAY_PROFILE is 'moon'; choose one of: cluster, local"):
        resources_for(load_settings({"HEADWAY_PROFILE": "moon"}))


def test_dagster_accepts_the_generated_instance(tmp_path: Path) -> None:
    folder = write_dagster_instance(load_settings({"HEADWAY_HOME": str(tmp_path)}))
    with dg.DagsterInstance.from_config(str(folder)) as instance:
        assert instance.get_settings("telemetry") == {"enabled": False}
        assert instance.run_monitoring_enabled
        assert instance.run_monitoring_max_resume_run_attempts == 0
