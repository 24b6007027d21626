"""Chat requests, completions, and the ways in which a request fails, as plain values."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from infembed_ray.errors import InputError

UNREADABLE = "unreadable"
"""Finish reason of a complete response whose JSON exceeds Python's limits. It was paid for, so it is journaled."""

CAP = "max_completion_tokens"
"""Parameter that bounds the tokens of an answer."""
PROBE = "probe"
"""Step of a short question that shows whether an endpoint answers."""

_MESSAGE_TOKENS = 64  # a message's role, separators and chat-template tokens
_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=False, check_circular=False)
_CAPPED = re.compile(rb'\{"%b": \d+, ' % CAP.encode())
# Finish reasons in the words of all providers, in lower case and letters only.
_ENDED = "stop stopsequence stopstringfound endturn endofturn endoftext eot eotid eos eostoken eosfound complete completed finish finished"
_CUT_OFF = (
    "length maxlength lengthlimit maxtokens maxnewtokens maxoutputtokens maxcompletiontokens modellength tokenlimit"
)
_FILTERED = (
    "contentfilter contentfiltered safety imagesafety recitation blocklist spii prohibitedcontent refusal sensitive"
)
_END_OF = {
    **dict.fromkeys(["", UNREADABLE, *_ENDED.split()], "ended"),
    **dict.fromkeys([*_CUT_OFF.split(), "maxtokensreached", "maxpredictedtokensreached"], "cut off"),
    **dict.fromkeys([*_FILTERED.split(), "guardrailintervened", "errortoxic"], "refused"),
}

_BEGIN = r"(?:<(?:seed:)?(?:think|thinking|thought|reasoning)>|\[THINK\]|◁think▷)"
_END = _BEGIN.replace("<(", "</(").replace(r"\[", r"\[/").replace("◁", "◁/")
_UNQUOTED = r"(?<![ \t`'\"(])"  # a text that mentions a mark has one of these before it
_REASONING = re.compile(rf"^[ \t]*{_BEGIN}.*?{_END}", re.DOTALL | re.MULTILINE)
_BEFORE_ANSWER = re.compile(
    rf"\A(?:(?!{_BEGIN}).)*(?:{_UNQUOTED}{_END}|{_END}(?=\s*(?:\n|\Z)))"
    r"|\A.*<\|channel\|>final\b.*?<\|message\|>|\Aanalysis.*?assistantfinal",
    re.DOTALL,
)
_AFTER_ANSWER = re.compile(rf"^[ \t]*{_BEGIN}|{_UNQUOTED}<\|\w+\|>|<\|\w+\|>\s*\Z", re.MULTILINE)
_MARKS = ("<", "[THINK]", "◁", "assistantfinal")  # one of them is in every text with reasoning
_JSON = json.JSONDecoder(strict=False)  # models write line breaks into strings
_OBJECT = re.compile(r'\{\s*"')
_SHOWN = re.compile(r"(?P<label>\w+): (?P<hint><.+>)")


class RowFailure(Exception):
    """This row cannot be completed: it becomes a dead letter and the run goes on."""


class Unusable(RowFailure):
    """A model answered, but not with anything that the row can use."""


class Malformed(Unusable):
    """An answer lacks what was asked for (`wanted`); asking again may help."""

    def __init__(self, wanted: str, text: str) -> None:
        self.fault = f"no `{wanted}` in {_shortened(text)!r}"
        super().__init__(f"malformed answer: {self.fault}")


class RunFailure(InputError):
    """No row can be completed (a refused key, an unknown model): the run ends. The message is one line."""


class Unjournaled(RunFailure):
    """A request is in no journal, and nothing may be sent."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"row {request.row}, step {request.step}: a request to {request.model} is in no journal")
        self.request = request


@dataclass(frozen=True)
class Request:
    """A chat-completions request. `prompt`, `step` and `row` are not sent."""

    model: str
    messages: tuple[Mapping[str, str], ...]
    prompt: str
    """Name and version of the prompt file, for example `judge=1`."""
    step: str
    row: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The other members of the body."""

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the HTTP request."""
        return {"model": self.model, "messages": list(self.messages), **self.parameters}

    @cached_property
    def sent(self) -> bytes:
        """The body as it is sent, with sorted keys."""
        return _CANONICAL.encode(self.body).encode()

    @cached_property
    def most_prompt_tokens(self) -> int:
        """Upper bound of its prompt's tokens: a text has at most as many as UTF-8 bytes."""
        texts = (*(message["content"] for message in self.messages), str(self.parameters.get("response_format", "")))
        return sum(len(text.encode()) for text in texts) + _MESSAGE_TOKENS * len(self.messages)

    @cached_property
    def key(self) -> str:
        """SHA-256 (64 hex digits) of everything that decides the answer, body and prompt version."""
        return self._hash(self.sent)

    @cached_property
    def complete_key(self) -> str:
        """The journal key of a complete answer: the hash without the token cap, which then decided nothing."""
        capped = _CAPPED.match(self.sent)
        return self._hash(b"{" + self.sent[capped.end() :]) if capped else self.key

    @cached_property
    def cut_off_key(self) -> str:
        """The journal key of a cut-off answer, which differs from `complete_key` also if the request has no cap."""
        return self.key if self.key != self.complete_key else self._hash(self.sent + b"cut off")

    @property
    def keys(self) -> tuple[str, ...]:
        """The journal keys under which its answer may be.

        `cut_off_key` comes first: a complete answer to a further request with a higher cap must not hide the cut-off one.
        """
        return self.cut_off_key, self.complete_key

    def _hash(self, body: bytes) -> str:
        decides = b'{"body": %b, "prompt": %b}' % (body, _CANONICAL.encode(self.prompt).encode())
        return hashlib.sha256(decides).hexdigest()

    def journal_key(self, completion: Completion) -> str:
        """Return the key under which an answer is journaled."""
        return self.cut_off_key if completion.cut_off else self.complete_key


@dataclass(frozen=True)
class Completion:
    """A model's answer as it arrived, usable or not, because it was paid for."""

    text: str
    finish_reason: str
    model: str
    """The model's name at the endpoint, usually a dated snapshot."""
    prompt_tokens: int
    completion_tokens: int
    refusal: str | None = None
    replayed: bool = False
    """It came from a journal and cost nothing in this run."""
    batched: bool = False
    """It came from the Batch API, at a lower price."""
    cached_tokens: int = 0
    """Prompt tokens that the endpoint had in its cache, at a lower price."""
    usd: float | None = None
    """What the endpoint charged, if it says so."""

    @property
    def _end(self) -> str | None:
        """How it ended; None if no provider is known to name a usable end like this."""
        return _END_OF.get(re.sub(r"[^a-z]", "", self.finish_reason.lower()).removeprefix("finishreason"))

    @property
    def cut_off(self) -> bool:
        """Whether the token cap ended it."""
        return self._end == "cut off"

    @property
    def refused(self) -> bool:
        """Whether the model or a content filter refused to answer."""
        return bool(self.refusal) or self._end == "refused"

    @property
    def interrupted(self) -> bool:
        """Whether something else than the model, a cap or a filter ended it."""
        return self._end is None

    @property
    def empty(self) -> bool:
        """Whether it ended without an answer, apart from reasoning."""
        return self.finish_reason != UNREADABLE and not without_reasoning(self.text).strip()


Complete = Callable[[Request], Awaitable[Completion]]
"""Asks a model; raises RowFailure or RunFailure."""


def usable_text(completion: Completion) -> str:
    """Return the text of a completion that ended normally, without the model's reasoning.

    Raises:
        Unusable: the answer is a refusal, filtered, cut off at the token limit, interrupted, unreadable or empty.
    """
    if completion.refused:
        raise Unusable(f"refused: {_shortened(completion.refusal or 'the content filter of the endpoint stopped it')}")
    if completion.cut_off:
        raise Unusable(f"cut off at the token limit ({completion.completion_tokens} tokens); set a higher max_tokens")
    if completion.finish_reason == UNREADABLE:
        raise Unusable("unreadable answer: its JSON is nested too deeply or holds a number with too many digits")
    if completion.interrupted:
        raise Unusable(f"interrupted answer (finish_reason={_shortened(completion.finish_reason)})")
    if completion.empty:
        raise Unusable("empty answer")
    return without_reasoning(completion.text)


def without_reasoning(text: str) -> str:
    """Remove the reasoning that some models and servers leave in an answer.

    It may be in tags (`<think>`), also without the first tag, which many chat templates write, or without the last one;
    or in the channels of the harmony format, also where the server has removed its special tokens. Tags within a line are
    part of the answer, which may be about them.
    """
    if text.lstrip().startswith("{") or not any(mark in text for mark in _MARKS):
        return text
    answer = _BEFORE_ANSWER.sub("", _REASONING.sub("", text))
    return _AFTER_ANSWER.split(answer)[0]


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can hold but UTF-8 cannot, with question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _shortened(text: str, length: int = 120) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 3]}..."


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
            Malformed: no JSON object in the answer holds the value as a text or a number.
        """
        value, at = None, 0
        with contextlib.suppress(ValueError, RecursionError):  # beyond Python's limits
            while begin := _OBJECT.search(answer, at):
                at = begin.end()
                with contextlib.suppress(json.JSONDecodeError):
                    answered, end = _JSON.raw_decode(answer, begin.start())
                    if isinstance(answered.get(self.name), (str, int)):
                        value, at = str(answered[self.name]), end
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
    bold = r"(?:\*+[ \t]*[:：]|[:：]\*+|[:：])"  # an asterisk after a blank belongs to the value
    return re.compile(rf"^[ \t*#>]*{label}[ \t]*{bold}[ \t]*(.*)", re.IGNORECASE | re.MULTILINE | re.DOTALL)
