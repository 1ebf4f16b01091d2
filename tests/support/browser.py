"""A headless Chromium on Dagster's page: what a person sees, clicks and types, and a picture of it.

Waits are for what the page shows. Dagster's markup has few names of its own, so things are found by their text, as a
person finds them.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from selenium import webdriver
from selenium.common.exceptions import ElementClickInterceptedException, StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

INSTALL = "apt-get update && apt-get install -y --no-install-recommends chromium chromium-driver"
WAIT_S = 400
_SIZE = (1440, 1000)
T = TypeVar("T")


class NoBrowser(AssertionError):
    """Chromium or its driver is not installed."""


@contextmanager
def browser(pictures: Path | None) -> Iterator["Page"]:
    """A browser that ends with the block; with `pictures`, what it shows is kept there."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        raise NoBrowser(f"these tests need Chromium and its driver; type (as root): {INSTALL}")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--disable-extensions",
        "--disable-background-networking",
        "--hide-scrollbars",
        "--force-prefers-reduced-motion",
        f"--window-size={_SIZE[0]},{_SIZE[1]}",
    ):
        options.add_argument(argument)
    started = webdriver.Chrome(options=options, service=Service(driver))
    try:
        started.set_page_load_timeout(WAIT_S)
        yield Page(started, pictures)
    finally:
        started.quit()


class Page:
    """The page as a person uses it."""

    def __init__(self, driver: webdriver.Chrome, pictures: Path | None) -> None:
        self.driver = driver
        self._pictures = pictures

    def open(self, url: str, *texts: str) -> None:
        """Go to an address and wait until the page shows every one of the texts."""
        self.driver.get(url)
        self.sees(*texts)

    @property
    def text(self) -> str:
        """All that is visible."""
        return self.driver.find_element(By.TAG_NAME, "body").text

    def sees(self, *texts: str) -> None:
        """Wait until the page shows every one of the texts."""
        for text in texts:
            self.wait(lambda wanted=text: wanted in self.text, f"the page shows {text!r}")

    def wait(self, condition: Callable[[], T | None], what: str) -> T:
        """Wait for what a condition gives; says what the page showed when it does not come true."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            try:
                if found := condition():
                    return found
            except StaleElementReferenceException:
                pass
            time.sleep(0.2)
        raise AssertionError(f"not true in {WAIT_S} s: {what}; {self.driver.current_url} shows:\n{self.text[:4000]}")

    def click(self, text: str, within: str = "") -> None:
        """Click what bears exactly this text (a button or link before other things), once it can be clicked."""
        words = f"normalize-space(.)={_quoted(text)}"
        path = (
            f"{within}//button[{words}] | {within}//a[{words}] | {within}//*[@role='tab' or @role='menuitem'][{words}]"
            f" | {within}//*[{words} and not(*)]"
        )
        self.click_path(path, f"{text!r} can be clicked")

    def click_path(self, path: str, what: str) -> None:
        """Click the first visible thing at an XPath."""

        def clicked() -> bool:
            for found in self.driver.find_elements(By.XPATH, path):
                if found.is_displayed() and found.is_enabled() and found.get_attribute("aria-disabled") != "true":
                    try:
                        found.click()
                    except ElementClickInterceptedException:
                        continue
                    return True
            return False

        self.wait(clicked, what)

    def field(self, path: str, text: str, *then: str) -> None:
        """Replace what stands in an input field; `then` are keys to press after it."""
        found: WebElement = self.wait(
            lambda: next((f for f in self.driver.find_elements(By.XPATH, path) if f.is_displayed()), None),
            f"there is a field {path}",
        )
        found.send_keys(Keys.CONTROL, "a")
        found.send_keys(text, *then)

    def paste(self, path: str, text: str) -> None:
        """Replace what stands in a text editor in one go, as pasting does: an editor would indent typed lines."""
        self.click_path(path, "the editor takes the focus")
        self.driver.switch_to.active_element.send_keys(Keys.CONTROL, "a")
        self.driver.execute_cdp_cmd("Input.insertText", {"text": text})

    def picture(self, name: str) -> None:
        """Keep what the page shows as NAME.png, when pictures are taken."""
        if self._pictures is not None:
            time.sleep(1.0)  # what still moves on the page would blur the picture
            self.driver.save_screenshot(str(self._pictures / f"{name}.png"))


def _quoted(text: str) -> str:
    return f"'{text}'" if "'" not in text else f'"{text}"'
