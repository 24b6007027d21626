"""The documentation site builds without a warning and asks no other host for anything."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

pytest.importorskip("zensical", reason="pip install zensical")

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LOADED = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc="?(?P<src>https?:[^" >]+)|<link\b(?P<link>[^>]*)>""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "scripts.site", str(directory)]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return directory


def test_diagrams_are_part_of_their_pages(site: Path) -> None:
    for page, label in (("index", "One query under two instructions"), ("concepts/architecture", "Data flow")):
        text = (site / f"{page}.html").read_text(encoding="utf-8")
        assert re.search(f'<svg[^>]*aria-label="{label}', text)
        assert not re.search(r"<img[^>]*assets/\w+\.svg", text)


@pytest.mark.parametrize("fault", ["[x](nowhere.md)", "[x](quality.md#nowhere)", "![x](assets/nowhere.png)"])
def test_a_broken_link_fails_the_build(fault: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("scripts", "zensical.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    with (tmp_path / "docs" / "status.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{fault}\n")
    build = "import sys; from pathlib import Path; from scripts import site; site.ROOT = Path(sys.argv[1]); "
    build += "site.WORK = site.ROOT / '.cache'; site.build(site.ROOT / 'site')"
    built = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert built.returncode == 1
    assert "status" in built.stderr
    assert not (tmp_path / "site").exists()


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        for match in LOADED.finditer(page.read_text(encoding="utf-8")):
            assert match["src"] is None, (page, match["src"])
            assert not re.search("https?:", match["link"] or "") or 'rel="canonical"' in match["link"], (
                page,
                match["link"],
            )
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:", style.read_text(encoding="utf-8")), style
