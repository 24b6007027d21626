"""Prompt templates: files with a version, rendered to chat requests.

A prompt file has a front matter with its `version` and the format of its `answer`, then the text of one user message with
`{fields}`. `sources/<source>/` holds additions for seeds of that source. The versions are part of the journal's key, so a
changed prompt is asked again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

import yaml

from infembed_ray.config.llm import ChatModel
from infembed_ray.llm.chat import Malformed, Request
from infembed_ray.llm.structured_output import AnswerFormat

DIRECTORY = Path(__file__).with_name("prompts")
_SOURCES = DIRECTORY / "sources"
_PROBE = AnswerFormat("Answer", "<the word yes>")
_FRONT_MATTER = re.compile(r"---\n(?P<header>.*?)\n---\n(?P<text>.*)", re.DOTALL)


@dataclass(frozen=True)
class Template:
    """One prompt, with its addition for one source."""

    version: str
    """Name and version of each of its files: `query_poisoning=1 leetcode/query_poisoning=1`."""
    text: str
    answer: AnswerFormat

    def request(
        self, model: ChatModel, step: str, row: str, values: Mapping[str, str], choices: Sequence[str] = ()
    ) -> Request:
        """Render the request that asks `model` this prompt.

        Args:
            model: the model and its parameters.
            step: the pipeline's step.
            row: the seed's id.
            values: field -> text; fields that the prompt lacks are ignored.
            choices: the only valid answers, where they are few.
        """
        shown = self.answer.shown(model.structured)
        return Request(
            model=model.model,
            messages=({"role": "user", "content": self.text.format_map({**values, "answer": shown})},),
            parameters=_parameters(model, self.answer, choices),
            prompt=self.version,
            step=step,
            row=row,
        )

    @property
    def fields(self) -> set[str]:
        """The fields that `request` needs."""
        return {field for _, field, _, _ in Formatter().parse(self.text) if field} - {"answer"}


def probe(model: ChatModel) -> Request:
    """Return a short request with the parameters of a model, which shows whether an endpoint takes them."""
    shown = _PROBE.shown(model.structured)
    return Request(
        model=model.model,
        messages=({"role": "user", "content": f"This is a test. Answer in this form:\n\n{shown}"},),
        parameters=_parameters(model, _PROBE),
        prompt="probe=1",
        step="probe",
        row="",
    )


def load(name: str, source: str = "") -> Template:
    """Return the prompt `name` with its addition for seeds of `source`, if there is one."""
    source = source.casefold()
    return _load(name, source if source in _sources() else "")


def repair(request: Request, answer: str, fault: Malformed) -> Request:
    """Return the request that follows a malformed answer: it says what is wrong and asks for the answer again."""
    header, text = _read(DIRECTORY / "repair.md")
    return replace(
        request,
        messages=(
            *request.messages,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": text.format(fault=fault.fault)},
        ),
        prompt=f"{request.prompt} repair={header['version']}",
    )


def _parameters(model: ChatModel, answer: AnswerFormat, choices: Sequence[str] = ()) -> dict[str, Any]:
    parameters = {
        "temperature": model.temperature,
        "max_completion_tokens": model.max_tokens,
        "reasoning_effort": model.reasoning_effort,
        "response_format": answer.response_format(choices) if model.structured else None,
    }
    return {name: value for name, value in parameters.items() if value is not None}


@cache
def _sources() -> frozenset[str]:
    return frozenset(directory.name for directory in _SOURCES.iterdir())


@cache
def _load(name: str, source: str) -> Template:
    header, text = _read(DIRECTORY / f"{name}.md")
    version, addition = f"{name}={header['version']}", ""
    file = _SOURCES / source / f"{name}.md"
    if source and file.is_file():
        added, words = _read(file)
        version, addition = f"{version} {source}/{name}={added['version']}", f"\n\n{words}"
    return Template(version, text.replace("{addition}", addition), AnswerFormat.parse(header["answer"]))


@cache
def _read(file: Path) -> tuple[dict[str, Any], str]:
    """Return front matter and text of a prompt file."""
    parts = _FRONT_MATTER.fullmatch(file.read_text(encoding="utf-8"))
    assert parts is not None, f"{file} has no front matter"
    return yaml.safe_load(parts["header"]), parts["text"].strip()
