"""The prompts: files with a version, rendered to chat requests, and the text format their answers come in.

A prompt file is a front matter with its `version`, then the text of one user message with `{fields}`. The version is
part of the journal's key: a changed prompt is asked anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Formatter

import yaml

from infembed_ray.config import ChatModel
from infembed_ray.synthesis.chat import Request, malformed

DIRECTORY = Path(__file__).with_name("prompts")
_FRONT_MATTER = re.compile(r"---\n(?P<header>.*?)\n---\n(?P<text>.*)", re.DOTALL)


@dataclass(frozen=True)
class Template:
    """One prompt file."""

    name: str
    version: int
    text: str

    def request(self, model: ChatModel, step: str, row: str, values: Mapping[str, str]) -> Request:
        """The request that asks `model` this prompt with its fields filled in."""
        parameters = {"temperature": model.temperature, "max_completion_tokens": model.max_tokens}
        return Request(
            model=model.model,
            messages=({"role": "user", "content": self.text.format_map(values)},),
            parameters={name: value for name, value in parameters.items() if value is not None},
            prompt=f"{self.name}={self.version}",
            step=step,
            row=row,
        )

    @property
    def fields(self) -> set[str]:
        """The names that `request` must be given."""
        return {field for _, field, _, _ in Formatter().parse(self.text) if field}


@cache
def load(name: str) -> Template:
    """The prompt file `name`.md."""
    parts = _FRONT_MATTER.fullmatch((DIRECTORY / f"{name}.md").read_text(encoding="utf-8"))
    assert parts is not None, f"prompts/{name}.md has no front matter"
    return Template(name, yaml.safe_load(parts["header"])["version"], parts["text"].strip())


@cache
def versions() -> str:
    """Names and versions of all prompts, for the provenance: `instruction_generation=1 ... query_poisoning=1`."""
    names = sorted(file.stem for file in DIRECTORY.glob("*.md"))
    return " ".join(f"{name}={load(name).version}" for name in names)


def labelled(label: str, text: str) -> str:
    """What follows `label:` in an answer, up to its end; blanks around it are cut, line breaks before it are not.

    The label may be in bold or behind some preamble, as models like to write it.

    Raises:
        RowFailure: no line begins with the label.
    """
    found = re.search(rf"^[ \t*#>]*{label}[ \t*]*:[ \t*]*(.*)", text, re.IGNORECASE | re.MULTILINE | re.DOTALL)
    if found is None:
        raise malformed(f"{label}:", text)
    return found[1].rstrip()
