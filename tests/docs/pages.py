"""The pages of the documentation, their code blocks, links and inline code."""

import inspect
import re
import shlex
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from scripts import reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"(?P<before>[^\n]*)\n```(?P<language>\w+)\n(?P<code>.*?)```", re.DOTALL)
_MARKER = re.compile(r"<!-- (?P<kind>needs|tested): (?P<value>.+) -->")


@dataclass(frozen=True)
class Block:
    """A fenced code block. `needs` and `tested` come from the comment before it."""

    page: str
    line: int
    language: str
    code: str
    needs: str | None
    tested: str | None
    follows: bool
    """Whether it directly follows another block."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def written() -> dict[str, str]:
    """Path from the root -> Markdown of every page that people write."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
    people = [file for file in files if reference.REFERENCE not in file.parents]
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in people}


@cache
def docstrings() -> str:
    """The docstrings of the public API, with their examples; tests/test_client.py runs those of the clients."""
    modules = (
        (f"infembed_ray.{name}", names) for public in reference.PYTHON.values() for name, names in public.items()
    )
    values = (getattr(import_module(m), name) for m, names in modules if not m.endswith(".client") for name in names)
    return "\n\n".join(inspect.getdoc(value) or "" for value in values)


@cache
def all_pages() -> dict[str, str]:
    """The written pages and those of docs/reference/."""
    return written() | {f"docs/reference/{name}": text for name, text in reference.generated().items()}


def prose(text: str) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


@cache
def blocks() -> list[Block]:
    """Every fenced block of the written pages and of the public functions' docstrings."""
    found = []
    for page, text in {**written(), "docs/reference/python.md": docstrings()}.items():
        end = 0
        for match in _FENCE.finditer(text):
            marker = _MARKER.search(match["before"])
            values = {marker["kind"]: marker["value"]} if marker else {}
            found.append(
                Block(
                    page,
                    text[: match.start("code")].count("\n"),
                    match["language"],
                    match["code"],
                    values.get("needs"),
                    values.get("tested"),
                    follows=end > 0 and not text[end : match.start()].strip() and not match["before"].strip(),
                )
            )
            end = match.end()
    return found


def inline_code(page: str) -> list[str]:
    """The inline code of a page's prose, without the names of earlier versions in the first column of the upgrade page."""
    text = prose(written()[page])
    if page == "docs/start/upgrade.md":
        text = re.sub(r"^\|(?:[^|\\]|\\.)*\|", "|", text, flags=re.MULTILINE)
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)


def install_commands(directory: Path) -> None:
    """Create a directory with `infembed` and `python`, which run this checkout's package with this interpreter."""
    directory.mkdir()
    for name, module in (("infembed", " -m infembed_ray.cli"), ("python", "")):
        tool = directory / name
        tool.write_text(f'#!/bin/sh\nexec "{sys.executable}"{module} "$@"\n')
        tool.chmod(0o755)


def commands(code: str) -> list[list[str]]:
    """The arguments of every `infembed` command and job script in a shell script."""
    found = []
    for line in re.sub(r"\\\n\s*", " ", code).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quote that goes on in the next line: no command of ours has one
            continue
        words = ["ended" if word in ("&&", "|", ">") else word for word in words]
        for position, word in enumerate(words):
            verb = re.fullmatch(r"jobs/(\w+)\.py", word)
            if (word == "infembed" and words[position - 1] not in ("cd", "-n")) or verb:
                arguments = words[position + 1 :]
                if "ended" in arguments:
                    arguments = arguments[: arguments.index("ended")]
                found.append(([verb[1]] if verb else []) + arguments)
    return found


def anchors(text: str) -> set[str]:
    """The anchors of a page: explicit ones, and the slugs of its headings."""
    found = set(re.findall(r"\{ ?#([\w-]+)", text))
    for heading in re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE):
        plain = re.sub(r"\{.*?\}$|`", lambda m: "" if m[0] == "`" or "#" in m[0] else m[0], heading)
        slug = re.sub(r"[^\w\s-]", "", plain).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", slug))
    return found
