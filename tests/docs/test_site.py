"""The documentation site builds without a warning and asks no other host for anything."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

pytest.importorskip("mkdocs", reason="pip install mkdocs-material 'mkdocstrings[python]'")

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LOADED = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc="?(?P<src>https?:[^" >]+)|<link\b(?P<link>[^>]*)>""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(directory)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return directory


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
