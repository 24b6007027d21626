"""MkDocs hooks: show links to files that are no part of the site as paths, and inline the diagrams. Needs no network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links to results of benchmarks and to CONTRIBUTING.md, which are no part of the site, by the path of the file."""
    return re.sub(r"\[[^\]]+\]\((?:\.\./)+(benchmarks/[^)]+|CONTRIBUTING\.md)\)", r"`\1`", markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Inline the SVG diagrams, so that they follow the light and dark mode of the site."""

    def inline(match: re.Match[str]) -> str:
        svg = (ROOT / "docs" / "assets" / match["name"]).read_text(encoding="utf-8")
        return re.sub(r"<style>.*?</style>", "", svg, count=1, flags=re.DOTALL)

    return re.sub(r'<img [^>]*src="[^"]*assets/(?P<name>[\w-]+\.svg)"[^>]*>', inline, html)
