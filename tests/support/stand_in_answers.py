"""Behaviour of the stand-in LLM: rule-based answers to the pipeline's prompts, and faults. Equal requests get equal answers."""

import hashlib
import json
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Behaviour:
    """How the endpoint behaves. Rates are shares of 1."""

    latency_s: float = 0.0
    jitter_s: float = 0.0
    """Up to this much is added to the latency, evenly spread."""
    key: str = ""
    """The bearer key to require; empty: none."""
    models: str = ""
    """Known models, separated by commas; empty: any."""
    breaks_after: int = 0
    """Answers until the endpoint answers nothing more; 0: it does not break."""
    breaks: str = "quota"
    """How it breaks: a name of `BREAKS`."""
    ignored_caps: str = ""
    """Names of the cap of an answer that the endpoint takes but ignores, separated by commas."""
    seed: int = 0
    # Faults of an attempt.
    rate_limited: float = 0.0
    retry_after_s: float = 0.05
    server_error: float = 0.0
    hang: float = 0.0
    dropped: float = 0.0
    """The connection is closed without an answer."""
    truncated: float = 0.0
    """Half of a response body."""
    # Faults of a request, the same at every attempt.
    bad_request: float = 0.0
    refusal: float = 0.0
    empty: float = 0.0
    cut_off: float = 0.0
    malformed: float = 0.0
    """An answer that is not in the format asked for."""
    mistaken: float = 0.0
    """The judge is wrong: it picks another candidate than the right one, or the passage of a `poor` one."""
    mistaken_models: str = ""
    """Other rates of mistakes for some models: `gpt-4o-mini=0.1,o4-mini=0.02`."""
    stubborn: float = 0.0
    """Share of the mistakes that do not depend on the order of the candidates."""
    poor: float = 0.0
    """A generated passage misses its instruction and query, so no candidate is right."""
    reasoning_models: str = ""
    """Completion tokens that some models use before each answer: `o4-mini=300`."""
    refused_model: str = ""
    """HTTP 400 for this model, whatever the prompt."""
    refused_parameters: str = ""
    """HTTP 400 for parameters of models, for example `small:temperature,judge:json_schema`."""
    # A rate limit of one model, in its headers and by 429s.
    limited_model: str = ""
    model_limit: int = 0
    """Requests in a window, which refill steadily."""
    model_window_s: float = 60.0
    chaos: float = 0.0
    """Share of attempts with a fault of `CHAOS`, each equally likely."""
    # Batches.
    batch_s: float = 0.0
    """Processing time of a batch."""
    batch_expired: float = 0.0
    """Share of its requests that are not answered when a batch expires; 0: batches complete."""
    batch_failed: float = 0.0
    """A whole batch is refused when its file is validated."""
    enqueued_tokens: int = 0
    """Prompt tokens of a model that may be in batches that have not ended; 0: unlimited."""
    enqueued_refusal: str = (
        "Enqueued token limit reached for {model} in organization org-1. Limit: {limit:,} enqueued tokens."
    )
    """Message of a batch that exceeds them."""
    enqueued_elsewhere_s: float = 0.0
    """Seconds, from the first batch, for which other jobs of the account use up the quota."""
    enqueued_status: int = 0
    """HTTP status that refuses the submission; 0: the submission is accepted, and the batch then fails."""
    batch_fault: float = 0.0
    """A request of a batch is not answered."""

    def completion(self, body: Mapping[str, Any], fault: str | None) -> dict[str, Any]:
        """Return the response body of a request, with its fault."""
        rates, reasoning = (
            {model: float(value) for model, value in (pair.split("=") for pair in given.split(",") if pair)}
            for given in (self.mistaken_models, self.reasoning_models)
        )
        mistaken = rates.get(body["model"], self.mistaken)
        said = completion(body, fault, mistaken, self.stubborn, self.poor)
        said["usage"]["completion_tokens"] += int(reasoning.get(body["model"], 0))
        ignored = self.ignored_caps.split(",")
        caps = [body[name] for name in ("max_completion_tokens", "max_tokens") if name in body and name not in ignored]
        if caps and said["usage"]["completion_tokens"] > caps[0]:
            choice = said["choices"][0]
            words = str(choice["message"]["content"] or "").split(" ")
            choice["message"]["content"] = " ".join(words[: caps[0]])
            choice["finish_reason"] = "length"
            said["usage"] |= {"completion_tokens": caps[0], "total_tokens": said["usage"]["prompt_tokens"] + caps[0]}
        return said


BREAKS: Mapping[str, tuple[int, dict[str, Any] | str, dict[str, str]]] = {
    "quota": (429, {"message": "You exceeded your current quota.", "code": "insufficient_quota"}, {}),
    "quota_type": (429, {"message": "You exceeded your quota.", "type": "insufficient_quota", "code": None}, {}),
    "key_limit": (403, {"message": "Key limit exceeded (monthly)", "code": 403}, {}),
    "credit": (400, {"message": "Your credit balance is too low.", "type": "invalid_request_error"}, {}),
    "payment": (402, {"message": "Insufficient credits.", "code": 402}, {}),
    "model": (404, {"message": "The model does not exist.", "code": "model_not_found"}, {}),
    "server": (500, {"message": "The server had an error.", "code": "server_error"}, {}),
    "limited": (429, {"message": "Rate limit reached.", "code": "rate_limit_exceeded"}, {}),
    "limited_long": (429, {"message": "Try again tomorrow.", "code": "rate_limit_exceeded"}, {"Retry-After": "36000"}),
    "hang": (0, {}, {}),
    "page": (200, "<html><style>p {}</style><title>Sign in</title></html>", {}),
    "moved": (301, "<html>moved</html>", {"Location": "https://new.example/v1"}),
    "key": (401, {"message": "Incorrect API key provided.", "code": "invalid_api_key"}, {}),
}
"""Ways in which an endpoint stops answering for good: status, error or page, and headers; status 0: it never responds."""
ATTEMPT_FAULTS = ("rate_limited", "server_error", "hang", "dropped", "truncated")
REQUEST_FAULTS = ("bad_request", "refusal", "empty", "cut_off", "malformed")

TRANSPORT = (
    *("rate_limited", "rate_limited_until", "rate_limited_bare", "rate_limited_in_body", "server_error", "hang"),
    *("dropped", "reset", "truncated", "wrong_length", "wrong_charset", "drip"),
)
"""Faults of a response. All but `drip`, which delivers it in small pieces, leave the client without an answer."""
UNUSABLE = ("refusal", "filtered", "empty", "cut_off", "malformed", "wrong_keys")
"""Answers that no client can use. They were paid for, and another one may be better."""
UNMENDABLE = ("bad_request", "unreadable")
"""Faults that no further attempt may mend."""
READABLE = (
    *("fenced", "reasoning", "unopened_reasoning", "channels", "preamble", "parts"),
    *("nested_json", "duplicate_keys", "surrogate"),
)
"""Answers that a tolerant reader understands."""
CHAOS = (*TRANSPORT, *UNUSABLE, *UNMENDABLE, *READABLE)
assert len(CHAOS) == 29

AUDIENCES = ("schoolchildren", "engineers", "beginners", "journalists", "policy makers", "patients", "shoppers")
ANGLES = ("costs", "history", "risks", "safety rules", "regional differences", "common mistakes", "alternatives")
POOR = "(It misses the request.)"
"""Mark of a poor passage, by which the judge recognizes it."""
PROBE = "This is a test."
_WORD = re.compile(r"[a-z][a-z'-]+")
_STAMP = re.compile(r"\(Note \d+\)")
_SHOWN_AS_JSON = re.compile(r'^\{"(\w+)": "(<.*>)"\}$', re.MULTILINE)


def answer(body: Mapping[str, Any], mistaken: float = 0.0, stubborn: float = 0.0, poor: float = 0.0) -> str:
    """Return the answer to a request, in JSON if its prompt asks for that."""
    prompt = body["messages"][0]["content"]
    if not _SHOWN_AS_JSON.search(prompt):
        return say(prompt, mistaken, stubborn, poor)
    as_text = _SHOWN_AS_JSON.sub(lambda shown: f"{shown[1].capitalize()}: {shown[2]}", prompt)
    label, value = say(as_text, mistaken, stubborn, poor).split(": ", 1)
    return json.dumps({label.lower(): value})


def say(prompt: str, mistaken: float = 0.0, stubborn: float = 0.0, poor: float = 0.0) -> str:
    """Return the answer to one of the pipeline's prompts."""
    rng = random.Random(prompt)
    if prompt.startswith(PROBE):
        return f"Answer: {' '.join(map(str, range(1, 101))) if 'Count' in prompt else 'yes'}"
    if "Candidates:" in prompt:
        return f"Answer: {_judge(prompt, rng, mistaken, stubborn)}"
    if "Passage: <" in prompt:
        return f"Passage: {_passage(_field(prompt, 'Query'), _field(prompt, 'Instruction'), rng, poor)}"
    document = _field(prompt, "Document")
    if "Query: <" in prompt:
        return f"Query: {_other_query(_field(prompt, 'Positive Query'), rng)}"
    if "Other Document:" in prompt:
        return f"Instruction: Nothing but the text that carries {_STAMP.findall(document)[0]} will do for me."
    if "Positive Instruction:" in prompt:
        positive = _field(prompt, "Positive Instruction")
        audience, angle = _other(AUDIENCES, positive, rng), _other(ANGLES, positive, rng)
        return f"Instruction: Written for {audience} and only about the {angle}; not what a general overview says."
    mentioned = ", ".join(rng.sample(sorted(_words(document)), k=min(4, len(_words(document)))))
    audience, angle = rng.choice(AUDIENCES), rng.choice(ANGLES)
    return f"Instruction: I want a text for {audience} that touches on {mentioned}; nothing about the {angle}, please."


def _judge(prompt: str, rng: random.Random, mistaken: float, stubborn: float) -> str:
    query, instruction = _field(prompt, "Query"), _field(prompt, "Instruction")
    shown = re.split(r"^\[\d+\] ", _field(prompt, "Candidates"), flags=re.MULTILINE)[1:]
    asked_for = _STAMP.findall(instruction) or [_stamp(query, instruction)]
    stamped = [number for number, text in enumerate(shown, start=1) if asked_for[0] in text]
    if stamped:
        right = stamped[0]
    else:
        wanted = _words(f"{query} {instruction}")
        unstamped = [number for number, text in enumerate(shown, start=1) if not _STAMP.search(text)]
        right = max(unstamped, key=lambda number: len(wanted & _words(shown[number - 1])), default=0)
    intended = right
    if intended and POOR in shown[intended - 1]:
        right = 0
    if random.Random(f"{query}/{instruction}/{mistaken}").random() < mistaken * stubborn:
        return "none" if right else str(intended)
    if rng.random() < mistaken * (1 - stubborn):
        if not right:
            return str(intended or "none")
        right = rng.choice([0, *(number for number in range(1, len(shown) + 1) if number != right)])
    return str(right or "none")


def _passage(query: str, instruction: str, rng: random.Random, poor: float) -> str:
    misses = random.Random(f"{query}/{instruction}").random() < poor
    detail = rng.sample(ANGLES, k=3)
    return (
        f"On {query}: this passage was put together for one request, namely {instruction.rstrip('.')}. "
        f"It starts from what most readers ask first, goes on to the {detail[0]} and the {detail[1]}, and ends with a "
        f"word about the {detail[2]}, as far as they matter here. {_stamp(query, instruction)}{f' {POOR}' if misses else ''}"
    )


def _other_query(query: str, rng: random.Random) -> str:
    words = query.split()
    words[rng.randrange(len(words))] = rng.choice(("modern", "northern", "wooden", "electric", "medieval"))
    return " ".join([*words, "compared"])


def _stamp(query: str, instruction: str) -> str:
    """Return the mark of a passage written for (query, instruction), by which the judge recognizes it."""
    return f"(Note {int(hashlib.sha256(f'{query}/{instruction}'.encode()).hexdigest(), 16) % 1_000_000})"


def _field(prompt: str, name: str) -> str:
    found = re.search(rf"^{name}:\s(.*?)(?=\n\n[A-Z][A-Za-z ]*:\s|\n\nYour task|\n\nMany|\Z)", prompt, re.M | re.S)
    assert found is not None, f"no {name} in the prompt"
    return found[1].strip()


def _words(text: str) -> set[str]:
    return {word for word in _WORD.findall(text.lower()) if len(word) > 4}


def _other(options: Sequence[str], text: str, rng: random.Random) -> str:
    return rng.choice([option for option in options if option not in text])


def completion(
    body: Mapping[str, Any], fault: str | None = None, mistaken: float = 0.0, stubborn: float = 0.0, poor: float = 0.0
) -> dict[str, Any]:
    """Return the response body of a request, with a fault of its own if there is one."""
    prompt = " ".join(message["content"] for message in body["messages"])
    text: str | None = answer(body, mistaken, stubborn, poor)
    refusal, finish_reason = None, "stop"
    if fault == "refusal":
        text, refusal = None, "I'm sorry, I can't help with that."
    elif fault == "empty":
        text = ""
    elif fault == "cut_off":
        text, finish_reason = text and text[: len(text) // 2], "length"
    elif fault == "filtered":
        text, finish_reason = text and text[:9], "SAFETY"
    elif fault in ("malformed", "wrong_keys"):
        text = "Certainly! Here is what you asked for." if fault == "malformed" else '{"output": "9", "Choice": "9"}'
    usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len((text or "").split())}
    message = {"role": "assistant", "content": text, "refusal": refusal}
    if text is not None:
        _dress(message, text, fault, "response_format" in body)
    return {
        "id": "chatcmpl-stand-in",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": f"{body['model']}-2026-01-01",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        "usage": {**usage, "total_tokens": sum(usage.values())},
    }


def _dress(message: dict[str, Any], text: str, fault: str | None, is_json: bool) -> None:
    """Give an answer one of the forms of `READABLE`, if that is its fault. Reasoning holds other answers."""
    decoys = 'Answer: 9\nInstruction: no.\nQuery: no\nPassage: no\n{"answer": "9", "query": "no", "passage": "no"}\n'
    forms = {
        "fenced": f"```{'json' if is_json else ''}\n{text}\n```",
        "reasoning": f"<think>{decoys}</think>\n\n{text}",
        "unopened_reasoning": f"{decoys}</think>\n{text}",
        "channels": f"<|channel|>analysis<|message|>{decoys}<|end|><|start|>assistant<|channel|>final<|message|>{text}",
        "preamble": f"Of course, here it is:\n\n{text}{' I hope that it fits {the} request.' if is_json else ''}",
        "nested_json": f'{{"output": {text}}}' if is_json else text,
        "duplicate_keys": text.replace("{", '{"answer": "9", "query": "no", "passage": "no", ', 1) if is_json else text,
    }
    message["content"] = forms.get(fault or "", text)
    if fault == "parts":
        halves = [{"type": "text", "text": part} for part in (text[:5], text[5:])]
        message["content"] = [{"type": "reasoning", "text": decoys}, *halves]
        message |= {"reasoning_content": decoys, "reasoning": decoys}
    elif fault == "surrogate":
        message |= {"reasoning_content": "\ud83d", "name": "\udc00"}


def prompt_tokens(body: Mapping[str, Any]) -> int:
    """Count a request's prompt tokens as a quota of batches does: four bytes each."""
    return sum(len(message["content"].encode()) for message in body["messages"]) // 4


def draw(behaviour: Behaviour, names: Sequence[str], rng: random.Random) -> str | None:
    """Draw at most one of the named faults, each with its rate."""
    at = rng.random()
    for name in names:
        at -= getattr(behaviour, name)
        if at < 0:
            return name
    return None


def encoded(response: dict[str, Any], unreadable: bool) -> str:
    """Encode a response body, perhaps with a member that is nested too deep to be read."""
    text = json.dumps({**response, **({"logprobs": "<deep>"} if unreadable else {})})
    return text.replace('"<deep>"', "[" * 10_000 + "]" * 10_000)
