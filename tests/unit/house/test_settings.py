"""Settings come from the environment: what is set counts, what is wrong is refused, what is unknown is named."""

import logging
from pathlib import Path

import pytest

from headway.home import DEFAULT_HOME, SettingError, load_settings


def effective(environ: dict[str, str]) -> dict[str, tuple[str, str]]:
    return {entry.variable: (entry.value, entry.origin) for entry in load_settings(environ).effective}


def test_defaults_say_that_they_are_defaults() -> None:
    settings = load_settings({})
    assert settings.home == DEFAULT_HOME
    assert settings.database_url == f"sqlite:///{DEFAULT_HOME}/catalog.db"
    assert settings.tenant == "default"
    assert {entry.origin for entry in settings.effective} == {"default"}


@pytest.mark.parametrize(
    ("variable", "text", "shown"),
    [
        ("HEADWAY_UI_PORT", "0", "0"),
        ("HEADWAY_UI_PORT", "8080", "8080"),
        ("HEADWAY_DEBUG", "1", "true"),
        ("HEADWAY_DEBUG", "true", "true"),
        ("HEADWAY_DEBUG", "0", "false"),
        ("HEADWAY_DEBUG", "false", "false"),
        ("HEADWAY_DEBUG", "", "false"),
        ("HEADWAY_DAGSTER_DATABASE_URL", "", ""),
        ("HEADWAY_TENANT", "0", "0"),
        ("HEADWAY_TENANT", "false", "false"),
    ],
)
def test_zero_false_and_empty_are_values(variable: str, text: str, shown: str) -> None:
    """C07: a setting whose value looks like 'nothing' is still set."""
    assert effective({variable: text})[variable] == (shown, "environment")


def test_zero_and_empty_reach_the_typed_settings() -> None:
    settings = load_settings({"HEADWAY_UI_PORT": "0", "HEADWAY_DEBUG": "", "HEADWAY_TENANT": "0"})
    assert (settings.ui_port, settings.debug, settings.tenant) == (0, False, "0")


@pytest.mark.parametrize(
    ("variable", "text", "names"),
    [
        ("HEADWAY_UI_PORT", "70000", "65535"),
        ("HEADWAY_UI_PORT", "-1", "whole number"),
        ("HEADWAY_UI_PORT", "", "whole number"),
        ("HEADWAY_UI_PORT", "\u0663", "whole number"),
        ("HEADWAY_DEBUG", "maybe", "true"),
        ("HEADWAY_HOME", "", "unset it"),
        ("HEADWAY_TENANT", "  ", "unset it"),
        ("HEADWAY_DATABASE_URL", "", "unset it"),
        ("HEADWAY_DAGSTER_DATABASE_URL", "postgresql://u@h/d", "postgresql+psycopg2"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_with_the_way_out(variable: str, text: str, names: str) -> None:
    with pytest.raises(SettingError) as refusal:
        load_settings({variable: text})
    assert variable in str(refusal.value)
    assert names in str(refusal.value)


def test_an_unknown_variable_with_the_prefix_warns(caplog: pytest.LogCaptureFixture) -> None:
    """C07: a misspelt setting does not pass in silence."""
    with caplog.at_level(logging.WARNING):
        settings = load_settings({"HEADWAY_TENNANT": "a", "OTHER": "b"})
    assert settings.unknown == ("HEADWAY_TENNANT",)
    assert caplog.messages == ["unknown setting HEADWAY_TENNANT: did you mean HEADWAY_TENANT?"]


def test_a_password_is_blanked_where_values_are_shown() -> None:
    url = "postgresql://ada:s3cret@db.example:5432/catalog"
    settings = load_settings({"HEADWAY_DATABASE_URL": url})
    assert settings.database_url == url
    shown = effective({"HEADWAY_DATABASE_URL": url})["HEADWAY_DATABASE_URL"][0]
    assert shown == "postgresql://ada:***@db.example:5432/catalog"


def test_a_relative_home_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings({"HEADWAY_HOME": "state"})
    assert settings.home == tmp_path / "state"
    assert settings.dagster_home == tmp_path / "state" / "dagster"
    assert settings.database_url == f"sqlite:///{tmp_path}/state/catalog.db"
