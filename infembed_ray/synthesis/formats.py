"""The form of an answer: one value behind its label, as the paper asks for it, or in a JSON object by a schema.

Whatever the form, an answer is read as labelled text; so the steps need not know which one was asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infembed_ray.synthesis.chat import Malformed, sound

_SHOWN = re.compile(r"(?P<label>\w+): (?P<hint><.+>)")


@dataclass(frozen=True)
class AnswerFormat:
    """What the value is called and how the prompt describes it: `Query: <your new query>`."""

    label: str
    hint: str

    @classmethod
    def parse(cls, shown: str) -> AnswerFormat:
        """The format as a prompt file writes it."""
        parts = _SHOWN.fullmatch(shown)
        assert parts is not None, f"{shown!r} is not like `Query: <your new query>`"
        return cls(parts["label"], parts["hint"])

    @property
    def name(self) -> str:
        """The value's name in JSON."""
        return self.label.lower()

    def shown(self, structured: bool) -> str:
        """The format as a prompt shows it."""
        return json.dumps({self.name: self.hint}) if structured else f"{self.label}: {self.hint}"

    def response_format(self, choices: Sequence[str] = ()) -> dict[str, Any]:
        """The request's `response_format`: a strict JSON schema, the value one of `choices` where there are any."""
        value = {"type": "string", "enum": list(choices)} if choices else {"type": "string"}
        schema = {
            "type": "object",
            "properties": {self.name: value},
            "required": [self.name],
            "additionalProperties": False,
        }
        return {"type": "json_schema", "json_schema": {"name": self.name, "strict": True, "schema": schema}}

    def as_text(self, answer: str) -> str:
        """A JSON answer as the labelled text it stands for.

        Raises:
            Malformed: it is no JSON object that holds the value as a string.
        """
        try:
            value = json.loads(answer)[self.name]
        except (ValueError, LookupError, TypeError, RecursionError):
            value = None
        if not isinstance(value, str):
            raise Malformed(f'{{"{self.name}": "..."}}', answer)
        return f"{self.label}: {sound(value.strip())}"


def labelled(label: str, text: str) -> str:
    """What follows `label:` in an answer, up to its end; blanks around it are cut, line breaks before it are not.

    The label may be in bold or behind some preamble, as models like to write it.

    Raises:
        Malformed: no line begins with the label.
    """
    bold = r"(?:\*+[ \t]*:|:\*+|:)"  # an asterisk behind a blank is the value's own
    found = re.search(rf"^[ \t*#>]*{label}[ \t]*{bold}[ \t]*(.*)", text, re.IGNORECASE | re.MULTILINE | re.DOTALL)
    if found is None:
        raise Malformed(f"{label}:", text)
    return found[1].rstrip()
