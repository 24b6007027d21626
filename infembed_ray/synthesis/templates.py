"""Prompt templates: files with a version, rendered to chat requests.

A file has a front matter with its `version` and the format of its `answer`, then one user message with `{fields}`. The
versions are part of the journal's key. A user's directory may hold files that replace the bundled ones of the same name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from string import Formatter
from typing import Any

import yaml

from infembed_ray.config.llm import ChatModel
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.llm.chat import AnswerFormat, Malformed, Request
from infembed_ray.storage.steps import resolve_input
from infembed_ray.synthesis import filters

DIRECTORY = Path(__file__).with_name("prompts")
_SHARED_PREFIX = DIRECTORY / "shared_prefix"
_VERSION = re.compile(r"[\w.+-]+")
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
            values: field -> text; fields that the prompt lacks are ignored.
            choices: the only valid answers, where they are few.
        """
        shown = self.answer.shown(model.structured)
        parameters = {
            "temperature": model.temperature,
            "max_completion_tokens": model.max_tokens,
            "reasoning_effort": model.reasoning_effort,
            "response_format": self.answer.response_format(choices) if model.structured else None,
        }
        return Request(
            model=model.model,
            messages=({"role": "user", "content": self.text.format_map({**values, "answer": shown})},),
            parameters={name: value for name, value in parameters.items() if value is not None},
            prompt=self.version,
            step=step,
            row=row,
        )

    def echoed(self, made: str) -> bool:
        """Return whether a generated text is the prompt's own: only words of the placeholder, or at least 4 words of the text."""
        words, placeholder = (re.findall(r"\w+", text.casefold()) for text in (made, self.answer.hint))
        own = len(words) > 3 and filters.plain(made) in filters.plain(self.text)
        return own or {*words} <= {*placeholder, "here", "insert", "text"}


@lru_cache(1024)
def load(name: str, source: str = "", own: str | None = None, shared_prefix: bool = False) -> Template:
    """Return the prompt `name` with its addition for seeds of `source`, if there is one.

    Args:
        own: path or URI of the user's directory (setting `prompts`).
        shared_prefix: with the texts in the order of `shared_prefix/`, unless the user's directory has the prompt.
    """
    files, source = _files(own, shared_prefix), source.casefold()
    header, text = files[name]
    version, addition = f"{name}={header['version']}", ""
    if added := files.get(f"sources/{source}/{name}"):
        version, addition = f"{version} {source}/{name}={added[0]['version']}", f"\n\n{added[1]}"
    return Template(version, text.replace("{addition}", addition), AnswerFormat.parse(header["answer"]))


def repair(request: Request, answer: str, fault: Malformed, own: str | None = None) -> Request:
    """Return the request that follows a malformed answer: it says what is wrong and asks for the answer again."""
    header, text = _files(own)["repair"]
    return replace(
        request,
        messages=(
            *request.messages,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": text.format(fault=fault.fault)},
        ),
        prompt=f"{request.prompt} repair={header['version']}",
    )


def check(own: str | None) -> None:
    """Check a user's prompt files.

    Raises:
        InputError: a file replaces no prompt, lacks its version or a field, or has one that the pipeline does not fill.
    """
    if own is None:
        return
    faults = []
    directory = resolve_input(own, "prompts")
    if not directory.is_dir():
        raise InputError(f"prompts={own}: not a directory; give the directory of your prompt files")
    for file in sorted(each for each in directory.rglob("*") if each.is_file()):
        name = file.relative_to(directory).with_suffix("").as_posix()
        if fault := _fault(name, file):
            faults.append(f"prompts={own}: {name}{file.suffix}: {fault}")
    if faults:
        raise InputError(*faults)


def _fault(name: str, file: Path) -> str | None:
    """Return what is wrong with a user's prompt file."""
    bundled, prompt = _files(None), name.rpartition("/")[2]
    extensible = {each for each, (_, text) in bundled.items() if "{addition}" in text}
    is_addition = prompt in extensible and re.fullmatch(r"sources/[^/]+/[^/]+", name) is not None
    if file.suffix != ".md" or not (is_addition or (name == prompt and prompt in bundled)):
        names = ", ".join(sorted(each for each in bundled if "/" not in each))
        of_source = f"sources/SOURCE/NAME.md ({', '.join(sorted(extensible))})"
        return f"no such prompt; remove it, or name it NAME.md ({names}) or {of_source}"
    try:
        header, text = _read(file)
        version = str(header["version"])
        fields = _fields(text)
        label = None if is_addition or prompt == "repair" else AnswerFormat.parse(header["answer"]).label
    except (AssertionError, LookupError, TypeError, ValueError, OSError, yaml.YAMLError) as error:
        return f"not like the bundled file ({in_one_line(error)}); begin it with `---`, `version: ...`, `answer: ...`, `---`"
    if not _VERSION.fullmatch(version):
        return f"version={version}: write it with letters, digits, `.`, `-`, `+` or `_`"
    ours = bundled.get(name)
    if ours is not None and str(ours[0]["version"]) == version and (header, text) != ours:
        return f"version={version}: that is the bundled prompt's; give your text another version"
    wanted = {"language"} if is_addition else _fields(bundled[prompt][1])
    if faulty := fields - wanted if is_addition else fields ^ wanted:
        correct = f"correct {{{'}, {'.join(sorted(faulty))}}} (write {{{{ and }}}} for braces of the text)"
        return f"must have the fields {{{'}, {'.join(sorted(wanted))}}}; {correct}"
    if label is not None and label != (expected := AnswerFormat.parse(bundled[prompt][0]["answer"]).label):
        return f"answer: the label must be `{expected}:`, by which the answer is found"
    return None


def _fields(text: str) -> set[str]:
    return {field for _, field, _, _ in Formatter().parse(text) if field is not None}


@cache
def _files(own: str | None, shared_prefix: bool = False) -> dict[str, tuple[dict[str, Any], str]]:
    """Return front matter and text of all prompt files by name: `judge`, `sources/leetcode/query_poisoning`."""
    directories = [DIRECTORY, *([_SHARED_PREFIX] if shared_prefix else [])]
    if own is not None:
        directories.append(resolve_input(own, "prompts"))
    return {
        file.relative_to(directory).with_suffix("").as_posix(): _read(file)
        for directory in directories
        for file in directory.rglob("*.md")
        if directory != DIRECTORY or _SHARED_PREFIX not in file.parents
    }


def _read(file: Path) -> tuple[dict[str, Any], str]:
    """Return front matter and text of a prompt file."""
    parts = _FRONT_MATTER.fullmatch(file.read_text(encoding="utf-8"))
    assert parts is not None, f"{file.name} has no front matter"
    return yaml.safe_load(parts["header"]), parts["text"].strip()
