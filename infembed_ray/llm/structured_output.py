"""Answer formats: one value after its label, as in the paper's prompts, or in a JSON object by a strict schema.

Both are read as labelled text, so the pipeline's steps do not depend on the format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from infembed_ray.llm.chat import Malformed, replace_surrogates

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
        """Convert a JSON answer to labelled text.

        Raises:
            Malformed: the answer is no JSON object that holds the value as a string.
        """
        try:
            value = json.loads(answer)[self.name]
        except (ValueError, LookupError, TypeError, RecursionError):
            value = None
        if not isinstance(value, str):
            raise Malformed(f'{{"{self.name}": "..."}}', answer)
        return f"{self.label}: {replace_surrogates(value.strip())}"


def labelled(label: str, text: str) -> str:
    """Return what follows `label:` in an answer, with line breaks but without surrounding blanks.

    The label may be bold and may follow a preamble, as models often write it.

    Raises:
        Malformed: no line begins with the label.
    """
    found = _labelled(label).search(text)
    if found is None:
        raise Malformed(f"{label}:", text)
    return found[1].rstrip()


@cache
def _labelled(label: str) -> re.Pattern[str]:
    bold = r"(?:\*+[ \t]*:|:\*+|:)"  # an asterisk after a blank belongs to the value
    return re.compile(rf"^[ \t*#>]*{label}[ \t]*{bold}[ \t]*(.*)", re.IGNORECASE | re.MULTILINE | re.DOTALL)
