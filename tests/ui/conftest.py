"""One Dagster and one browser for all tests of the page.

With UI_PICTURES set to a folder, what the page shows is kept there (`UI_PICTURES=docs/ui` renews the manual's).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.browser import Page, browser
from support.shop_serving import serving_shop
from support.training_bench import TrainingBench, end_everything
from support.ui_bench import build_ui_shop


@dataclass(frozen=True)
class Shop:
    """The page of a shop: its address, what lies behind it, and the browser that looks at it."""

    url: str
    bench: TrainingBench
    page: Page

    def asset(self, key: str, view: str, *texts: str, partition: str = "", check: str = "") -> None:
        """Open a view of an asset and wait until it shows the texts."""
        more = (f"&partition={partition}" if partition else "") + (f"&checkDetail={check}" if check else "")
        self.page.open(f"{self.url}/assets/shop/{key}?view={view}{more}", *texts)


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """The shop of `support.ui_bench` under a running webserver and daemon, seen by a browser."""
    pictures = os.environ.get("UI_PICTURES")
    # Before anything that takes its time: without a browser the tests end at once, with the line to type.
    with browser(Path(pictures).resolve() if pictures else None) as page:
        root = tmp_path_factory.mktemp("ui")
        bench = build_ui_shop(root)
        try:
            with serving_shop(root, bench, root / "toy-code", "support.ui_location") as url:
                yield Shop(url, bench, page)
        finally:
            end_everything(bench)
