"""docs/reference/ says what the code says."""

import pytest

from scripts.references import FOLDER, pages, refusals

PAGES = pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_current(name: str) -> None:
    written = (FOLDER / name).read_text(encoding="utf-8")
    assert written == PAGES[name], "run: .venv/bin/python scripts/references.py"


def test_no_page_is_left_over() -> None:
    assert {file.name for file in FOLDER.iterdir()} == set(PAGES)


def test_what_is_read_from_the_sources_is_what_runs() -> None:
    """The pages of refusals and metrics are read without importing; spot checks against the real ones."""
    from headway.errors import HeadwayError
    from headway.home import SettingError, load_settings
    from headway.reading import NoHome

    found = refusals()
    assert issubclass(NoHome, HeadwayError)
    assert found["NoHome"].module == NoHome.__module__
    assert {"BlobCorrupt", "CatalogBusy", "DeclarationInvalid", "SnapshotsMissing"} <= set(found)
    with pytest.raises(SettingError) as caught:
        load_settings({"HEADWAY_UI_PORT": "many"})
    assert caught.value.remedy in found["SettingError"].remedies
    assert "`headway_requests_total` | counter | `model` `version` `code`" in PAGES["metrics.md"]


def test_every_refusal_says_what_it_is() -> None:
    assert [r.name for r in refusals().values() if not r.meaning] == []
