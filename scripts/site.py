"""Build the documentation site with Zensical: python -m scripts.site [DIRECTORY]

Zensical builds a copy of docs/, in which the diagrams are part of the pages and links to files that the site does not have are
their paths. Warnings are errors, and so is a link in the built pages that leads nowhere: Zensical does not check images, files and
the navigation. Needs no network.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
WORK = ROOT / ".cache" / "docs"
"""The copies, and Zensical's own cache: deleted before each build, so a warning is never missed."""


def build(site: Path) -> None:
    """Build the site into a directory, which it replaces.

    Raises:
        SystemExit: Zensical failed or warned, or links are broken; it has the reasons.
    """
    shutil.rmtree(WORK, ignore_errors=True)
    shutil.copytree(ROOT / "docs", WORK / "docs")
    shutil.copy(ROOT / "zensical.toml", WORK)
    for page in (WORK / "docs").rglob("*.md"):
        page.write_text(prepared(page.read_text(encoding="utf-8")), encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(WORK / "zensical.toml")]
    done = subprocess.run(command, cwd=WORK, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr.partition("Traceback")[0]))
    if broken := [f"{page.name}: {link} leads nowhere" for page in Page.below(WORK / "site") for link in page.broken()]:
        raise SystemExit("\n".join(broken))
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(WORK / "site", site)


def prepared(markdown: str) -> str:
    """A page for the site: with its diagrams, and with paths in place of links to files outside docs/."""
    markdown = re.sub(r"\[[^\]]+\]\((?:\.\./)+(benchmarks/[^)]+|CONTRIBUTING\.md)\)", r"`\1`", markdown)
    return re.sub(r"^!\[[^\]]*\]\([./]*assets/([\w-]+\.svg)\)$", lambda found: diagram(found[1]), markdown, flags=re.M)


def diagram(name: str) -> str:
    """A diagram as HTML without its own style: that of assets/site.css follows the light and dark mode of the site."""
    svg = (ROOT / "docs" / "assets" / name).read_text(encoding="utf-8")
    return f"<div>{re.sub(r'<style>.*?</style>', '', svg, count=1, flags=re.DOTALL).strip()}</div>"


class Page(HTMLParser):
    """A built page: its anchors, and what it links to or loads."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    @classmethod
    def below(cls, site: Path) -> Iterator["Page"]:
        """All pages of a site but the one for errors, whose links are absolute."""
        return (page(file) for file in sorted(site.rglob("*.html")) if file.name != "404.html")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.links += [given[name] for name in ("href", "src") if name in given]

    def broken(self) -> Iterator[str]:
        """The links that lead to no file of the site, or to no anchor of a page."""
        for link in self.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (self.file.parent / unquote(parts.path)).resolve() if parts.path else self.file
            target = target / "index.html" if target.is_dir() else target
            fragment = unquote(parts.fragment) if target.suffix == ".html" else ""
            if not target.is_file() or (fragment and fragment not in page(target).anchors):
                yield link

    @property
    def name(self) -> str:
        return str(self.file.relative_to(WORK / "site"))


@cache
def page(file: Path) -> Page:
    """A built page, read once."""
    return Page(file)


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".cache" / "site")
