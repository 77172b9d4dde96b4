"""Take the screenshots of docs/figures/ from a page that `dragoman inspect` has written.

    python tools/inspection_screenshots.py page.html docs/figures

This writes inspection-attention.png, the attention of one token, and inspection-search.png, the search. It needs
Playwright (`pip install dragoman[dev]`) and Chromium on the PATH. The page must have cross-attention and a search.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

WIDTH, MARGIN = 1340, 12  # pixels
MAX_HEIGHT = 800  # pixels of a screenshot


def main(page_file: Path, folder: Path) -> None:
    """Open the page and write both screenshots."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("there is no Chromium: install it, for example with `apt-get install chromium`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        page = browser.new_page(viewport={"width": WIDTH, "height": 1200}, color_scheme="light")
        page.goto(page_file.resolve().as_uri())
        queries = page.locator(".column.queries button")
        queries.nth(queries.count() // 2).click()
        take_screenshot(page, "attention", folder)
        take_screenshot(page, "search", folder)
        browser.close()


def take_screenshot(page: Page, section: str, folder: Path) -> None:
    """Write the screenshot of a section, from its top."""
    box = page.locator(f"#{section}").bounding_box()
    assert box is not None
    height = min(box["height"] + 2 * MARGIN, MAX_HEIGHT)
    clip = {"x": box["x"] - MARGIN, "y": box["y"] + 2, "width": box["width"] + 2 * MARGIN, "height": height}
    page.screenshot(path=folder / f"inspection-{section}.png", clip=clip, full_page=True)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
