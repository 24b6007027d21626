"""Answer formats: one value after its label, as in the paper's prompts, or in a JSON object by a strict schema.

Both are read as labelled text, so the pipeline's steps do not depend on the format.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from infembed_ray.llm.chat import Malformed, replace_surrogates

_JSON = json.JSONDecoder(strict=False)  # models write line breaks into strings
_OBJECT = re.compile(r'\{\s*"')
_SHOWN = re.compile(r"(?P<label>\w+): (?P<hint><.+>)")


@dataclass(frozen=True)
class AnswerFormat:
    """Label and description of the value, as a prompt shows them: `Query: <your new query>`."""

    label: str
    hint: str

    @classmethod
    def parse(cls, shown: str) -> AnswerFormat:
        """Parse the format as a prompt file writes it."""
        parts = _SHOWN.fullmatch(shown)
        assert parts is not None, f"{shown!r} is not like `Query: <your new query>`"
        return cls(parts["label"], parts["hint"])

    @property
    def name(self) -> str:
        """The value's name in JSON."""
        return self.label.lower()

    def shown(self, structured: bool) -> str:
        """Return the format as a prompt shows it."""
        return json.dumps({self.name: self.hint}) if structured else f"{self.label}: {self.hint}"

    def response_format(self, choices: Sequence[str] = ()) -> dict[str, Any]:
        """Return the request's `response_format`: a strict JSON schema; the value is one of `choices` if there are any."""
        value = {"type": "string", "enum": list(choices)} if choices else {"type": "string"}
        schema = {
            "type": "object",
            "properties": {self.name: value},
            "required": [self.name],
            "additionalProperties": False,
        }
        return {"type": "json_schema", "json_schema": {"name": self.name, "strict": True, "schema": schema}}

    def as_text(self, answer: str) -> str:
        """Convert a JSON answer to labelled text: the last JSON object with the value counts, whatever surrounds it.

        Raises:
            Malformed: no JSON object in the answer holds the value as a string.
        """
        value, at = None, 0
        with contextlib.suppress(ValueError, RecursionError):  # beyond Python's limits
            while begin := _OBJECT.search(answer, at):
                at = begin.end()
                with contextlib.suppress(json.JSONDecodeError):
                    answered, end = _JSON.raw_decode(answer, begin.start())
                    if isinstance(answered.get(self.name), str):
                        value, at = answered[self.name], end
        if value is None:
            raise Malformed(f'{{"{self.name}": "..."}}', answer)
        return f"{self.label}: {replace_surrogates(value.strip())}"


def labelled(label: str, text: str) -> str:
    """Return what follows `label:` in an answer, with line breaks but without surrounding blanks.

    The label may be bold and may follow a preamble, and both may be in a fenced block, as models often write it.

    Raises:
        Malformed: no line begins with the label.
    """
    labelled_text = _labelled(label).search(text)
    if labelled_text is None:
        raise Malformed(f"{label}:", text)
    fenced = text.count("```", 0, labelled_text.start()) % 2 == 1
    return (labelled_text[1].rpartition("```")[0] or labelled_text[1] if fenced else labelled_text[1]).rstrip()


@cache
def _labelled(label: str) -> re.Pattern[str]:
    bold = r"(?:\*+[ \t]*:|:\*+|:)"  # an asterisk after a blank belongs to the value
    return re.compile(rf"^[ \t*#>]*{label}[ \t]*{bold}[ \t]*(.*)", re.IGNORECASE | re.MULTILINE | re.DOTALL)
