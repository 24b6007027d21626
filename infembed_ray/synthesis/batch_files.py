"""Batches on disk: their requests, their state, and the answers that the endpoint returned."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from infembed_ray.llm.chat import Complete, Completion, Request, RowFailure, RunFailure
from infembed_ray.llm.endpoint import PATH, ErrorBody, Unanswered, completion_of, error_message, one_line
from infembed_ray.storage import durable

LEFT_OUT = "no batch answered"
"""Beginning of the error of a dead letter whose request was not asked online."""
BYTES_PER_TOKEN = 3
"""UTF-8 bytes that count as a token of the quota: fewer than a token has in most languages."""
_REFUSED = {"400", "413", "422"}


def prompt_tokens(request: Request) -> int:
    """Return about how many tokens of the quota of enqueued tokens a request takes."""
    size = sum(len(message["content"].encode()) for message in request.messages)
    return -(-(size + len(str(request.parameters.get("response_format", "")).encode())) // BYTES_PER_TOKEN)


@dataclass
class RequestBatch:
    """A batch's state in TAG.json, and its requests in TAG.requests, until its answers are in the journal."""

    directory: Path
    tag: str
    base_url: str
    model: str
    requests: int
    tokens: int
    """Prompt tokens that count for the quota of enqueued tokens."""
    worst_usd: float
    """Upper bound of its price."""
    stage: Literal["prepared", "submitting", "submitted"] = "prepared"
    file_id: str | None = None
    batch_id: str | None = None

    @classmethod
    def prepare(cls, directory: Path, base_url: str, requests: Sequence[Request], worst_usd: float) -> RequestBatch:
        """Write a new batch of requests to one model durably."""
        model, tokens = requests[0].model, sum(map(prompt_tokens, requests))
        batch = cls(directory, secrets.token_hex(12), base_url, model, len(requests), tokens, worst_usd)
        with durable.replacing(batch.path("requests")) as stream:
            stream.writelines(json.dumps(asdict(each), ensure_ascii=False).encode() + b"\n" for each in requests)
        batch.save()
        return batch

    @classmethod
    def load(cls, file: Path) -> RequestBatch:
        """Read a batch from its TAG.json."""
        return cls(directory=file.parent, **json.loads(file.read_text(encoding="utf-8")))

    def save(self, **changes: Any) -> None:
        """Apply the changes and write them durably."""
        for name, value in changes.items():
            setattr(self, name, value)
        durable.replace_json(self.path("json"), {k: v for k, v in asdict(self).items() if k != "directory"})

    def path(self, kind: str) -> Path:
        """Return the path of one of its files: json, requests, jsonl, output or error."""
        return self.directory / f"{self.tag}.{kind}"

    def read(self) -> Iterator[Request]:
        """Yield its requests."""
        with self.path("requests").open(encoding="utf-8") as stream:
            for line in stream:
                values = json.loads(line)
                yield Request(**{**values, "messages": tuple(values["messages"])})

    def discard(self) -> None:
        """Delete its files, the state first."""
        for kind in ("json", "requests", "jsonl", "output", "error"):
            self.path(kind).unlink(missing_ok=True)


def pending(directory: Path) -> list[Path]:
    """Return the state files of batches that are submitted and not collected; an online run would pay for them again."""
    return [file for file in sorted(directory.glob("*.json")) if RequestBatch.load(file).stage != "prepared"]


def upload_line(request: Request, body: Mapping[str, Any]) -> bytes:
    """Return the line of a request in the uploaded file."""
    line = {"custom_id": request.key, "method": "POST", "url": f"/v1/{PATH}", "body": body}
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


class NoAnswer(NamedTuple):
    """Why a request has no answer."""

    reason: str
    refused: bool = False
    """The endpoint refuses the request itself, so that another attempt is useless."""
    body: bytes = b""
    """Of the endpoint's error."""


def read_answers(files: Iterable[Path]) -> tuple[dict[str, Completion], dict[str, NoAnswer]]:
    """Read a batch's output and error files; RunFailure if one is damaged.

    Returns:
        Request key -> answer; request key -> why it has no answer. A request may be in neither.
    """
    answers: dict[str, Completion] = {}
    unanswered: dict[str, NoAnswer] = {}
    for file in files:
        with file.open("rb") as stream:
            for line in filter(bytes.strip, stream):
                try:
                    entry = json.loads(line)
                    key, response = str(entry["custom_id"]), entry.get("response") or {}
                    if str(response.get("status_code")) == "200":
                        answers[key] = replace(completion_of(response.get("body")), batched=True)
                    else:
                        unanswered[key] = _no_answer(entry, response)
                except ErrorBody as error:
                    unanswered[key] = NoAnswer(str(error), str(error.status) in _REFUSED, error.body)
                except Unanswered as error:
                    unanswered[key] = NoAnswer(str(error))
                except (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError) as error:
                    raise RunFailure(f"batches: the endpoint's file is damaged ({error}); run it again") from error
                except (ValueError, RecursionError):  # this line exceeds Python's limits: its request is unanswered
                    continue
    return answers, unanswered


def _no_answer(entry: dict[str, Any], response: dict[str, Any]) -> NoAnswer:
    """Return the error code of a line without an answer, or its HTTP status, and what the endpoint says."""
    body, status = response.get("body"), str(response.get("status_code"))
    error = entry.get("error") or (body.get("error") if isinstance(body, dict) else None) or body
    text, code = json.dumps({"error": error}).encode(), error.get("code") if isinstance(error, dict) else None
    said = f": {error_message(text)[0]}" if error else ""
    return NoAnswer(one_line(f"{code or f'HTTP {status}'}{said}"), status in _REFUSED, text)


def leaving_out(complete: Complete, unanswered: Mapping[str, str]) -> Complete:
    """Wrap `complete` so that it never sends a request that batches left unanswered: its row becomes a dead letter."""

    async def ask(request: Request) -> Completion:
        if request.key in unanswered:
            raise RowFailure(f"{LEFT_OUT}: {unanswered[request.key]}")
        return await complete(request)

    return ask if unanswered else complete
