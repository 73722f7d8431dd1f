"""Look at the demo in a real browser: click through it, in the dark and at a phone's width too; draw its picture.

    pip install playwright            # and a Chromium: the system's, or `playwright install chromium`
    python examples/space/look.py [--out docs/images/space.png]

Raises an error if the page shows one, or if the map, a table or the search is not what it should be.
"""

import argparse
import shutil
from pathlib import Path

import app
from playwright.sync_api import Page, expect, sync_playwright
from sentence_transformers import SentenceTransformer

WAIT = 60_000  # milliseconds; an idle machine needs one or two seconds
POINTS = "#map .mark-symbol path[stroke^='#']"  # without a stroke, a point cannot be seen


def click_through(page: Page, out: Path | None) -> None:
    """Use the page as a visitor would."""
    page.wait_for_selector(POINTS)
    expect(page.locator(POINTS)).to_have_count(len(app.TEXTS[app.MAPS[0]]))
    if out:
        page.screenshot(path=out, clip={"x": 0, "y": 0, "width": 1200, "height": 830})
    first = page.locator("#heat-map img").get_attribute("src")
    page.get_by_label("Example texts").click()
    page.get_by_role("option").nth(1).click()
    expect(page.locator("#heat-map img")).not_to_have_attribute("src", first or "")
    page.wait_for_selector(POINTS)
    page.get_by_text("Edit the texts").click()
    page.locator("#texts textarea").fill("sea | whales\nsea | seals\nland | bread\nland | butter")
    page.get_by_role("button", name="Show these texts").click()
    expect(page.locator(POINTS)).to_have_count(4)
    page.locator("#expert label").first.click()
    expect(page.locator("#spread tr:nth-child(1) td strong")).to_have_count(4)
    expect(page.locator(POINTS)).to_have_count(4)
    page.get_by_role("tab", name="Search").click()
    expect(page.locator("#found-0 li")).to_have_count(6)
    page.get_by_role("tab", name="Which expert?").click()
    expect(page.locator("#answer")).to_contain_text("Expert:")
    expect(page.locator(".toast-wrap .error")).to_have_count(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="picture to draw")
    options = parser.parse_args()
    expect.set_options(timeout=WAIT)
    model = SentenceTransformer(str(app.SMALL_MOTE), trust_remote_code=True)
    address = app.launch(app.Demo(model, str(app.SMALL_MOTE)), prevent_thread_lock=True, quiet=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for width, theme in ((1200, "light"), (1200, "dark"), (390, "light")):
            page = browser.new_page(viewport={"width": width, "height": 830})
            page.set_default_timeout(WAIT)
            page.goto(f"{address}?__theme={theme}")
            click_through(page, options.out if (width, theme) == (1200, "light") else None)
            page.get_by_role("tab", name="Map").click()
            line = page.locator("#spread td").first.bounding_box()
            assert line is not None
            assert line["height"] < 40, f"An expert's name is broken over lines at {width} pixels"
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{wide} pixels wide on a page of {width}"
            page.close()
        browser.close()
    print("The page is as it should be.")


if __name__ == "__main__":
    main()
