"""Take the pictures of the documentation from the quickstart's outputs: python -m scripts.screenshots [ADDRESS]

It needs `make quickstart`, playwright and a Chromium. ADDRESS is a running API of the quickstart's index; without it, the script
starts one. All pictures go to .cache/screenshots, at 1440 and at 390 pixels, and those that a page shows also to docs/assets.
"""

import base64
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import Browser, sync_playwright

from infembed_ray.config.serving import ServeSettings
from infembed_ray.progress import say
from infembed_ray.quickstart.chain import INSTRUCTIONS, QUERY
from infembed_ray.serving.distributed import serving
from infembed_ray.storage.steps import resolve
from tests.support.ports import free_port

ROOT = Path(__file__).parents[1]
OUTPUTS = Path("runs/quickstart")
ALL = ROOT / ".cache" / "screenshots"
ASSETS = ROOT / "docs" / "assets"
BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
SIZES = {1440: 900, 390: 844}
"""Width -> height of the window, in CSS pixels."""
QUALITY = 80
"""Quality of the WebP files, of 100."""
LARGEST = 150_000
"""Bytes of a picture."""
RELATIVE = """root => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(root, "");
}"""
"""Script that makes the paths of a page relative, so that no picture shows the machine's directories."""


def main(address: str | None) -> None:
    """Take all pictures.

    Raises:
        SystemExit: there is no Chromium, or a picture is too large.
    """
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        raise SystemExit(f"no browser: install one of {', '.join(BROWSERS)}")
    shutil.rmtree(ALL, ignore_errors=True)
    ALL.mkdir(parents=True)
    with served(address) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, page in pages(url).items():
            for width, height in SIZES.items():
                take(browser, page, width, height, ALL / f"{name}-{width}.webp")
        browser.close()
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    for picture in filter(lambda picture: picture.name in text, sorted(ALL.iterdir())):
        shutil.copy(picture, ASSETS)
        say(f"docs/assets/{picture.name}: {picture.stat().st_size / 1000:.0f} kB")


@contextmanager
def served(address: str | None) -> Iterator[str]:
    """The base URL of an API: the given one, or one that serves the quickstart's index while the block runs."""
    if address:
        yield address.rstrip("/")
    else:
        with serving(ServeSettings(index=str(OUTPUTS / "index"), port=free_port(), api_keys_env=None)) as url:
            yield url


def pages(url: str) -> dict[str, str]:
    """Name of a picture -> address of its page."""
    reports = {
        "analysis": resolve(OUTPUTS / "analysis") / "report.html",
        "evaluation": resolve(OUTPUTS / "results") / "report.html",
        "quickstart": OUTPUTS / "report.html",
    }
    question = urlencode({"q": QUERY, "b": list(INSTRUCTIONS.values())[-1]})
    return {"playground": f"{url}/#{question}", **{name: file.resolve().as_uri() for name, file in reports.items()}}


def take(browser: Browser, address: str, width: int, height: int, file: Path) -> None:
    """Write what a window shows of a page, once its requests are answered."""
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light", reduced_motion="reduce")
    page.goto(address, wait_until="networkidle")
    page.evaluate(RELATIVE, f"{Path.cwd()}/")
    taken = page.context.new_cdp_session(page).send("Page.captureScreenshot", {"format": "webp", "quality": QUALITY})
    file.write_bytes(base64.b64decode(taken["data"]))
    page.close()
    if file.stat().st_size > LARGEST:
        raise SystemExit(f"{file}: {file.stat().st_size:,} bytes, more than {LARGEST:,}: lower QUALITY")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
