"""Batches on disk: their requests, their state, and the answers that the endpoint returned."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from infembed_ray.llm.batch_quota import prompt_tokens
from infembed_ray.llm.chat import Complete, Completion, Dialect, Request, RowFailure, RunFailure, adapted
from infembed_ray.llm.endpoint import CHAT, ErrorBody, Unanswered, completion_of, one_line
from infembed_ray.storage import durable

LEFT_OUT = "no batch answered"
"""Beginning of the error of a dead letter whose request was not asked online."""
_REFUSED = {400, 413, 422}


@dataclass
class Batch:
    """A batch's state in TAG.json. Its requests are in TAG.requests until it is collected."""

    directory: Path
    tag: str
    base_url: str
    requests: int
    worst_usd: float
    """Upper bound of its price."""
    stage: Literal["prepared", "submitting", "submitted", "collected"] = "prepared"
    file_id: str | None = None
    batch_id: str | None = None
    submitted: float = 0.0
    """Unix time."""
    model: str = ""
    tokens: int = 0
    """Prompt tokens that count for the quota of enqueued tokens."""
    unanswered: dict[str, str] = field(default_factory=dict)
    """Once it is collected: key of a request without an answer -> why."""
    refused: dict[str, str] = field(default_factory=dict)
    """Once it is collected: key of a request that the endpoint refuses, so that no other attempt helps -> why."""

    @classmethod
    def prepare(cls, directory: Path, base_url: str, requests: Sequence[Request], worst_usd: float) -> Batch:
        """Write a new batch of requests to one model durably."""
        model, tokens = requests[0].model, sum(map(prompt_tokens, requests))
        batch = cls(directory, secrets.token_hex(12), base_url, len(requests), worst_usd, model=model, tokens=tokens)
        with durable.replacing(batch.path("requests")) as stream:
            stream.writelines(json.dumps(asdict(each), ensure_ascii=False).encode() + b"\n" for each in requests)
        batch.save()
        return batch

    @classmethod
    def load(cls, file: Path) -> Batch:
        """Read a batch from its TAG.json."""
        values = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(values["unanswered"], list):  # written by release 0.1.0
            values["unanswered"] = dict.fromkeys(values["unanswered"], "no answer")
        return cls(directory=file.parent, **values)

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
        """Delete a batch that was never submitted."""
        self.path("json").unlink()
        self.path("requests").unlink(missing_ok=True)


def pending(directory: Path) -> list[Path]:
    """Return the state files of batches that are submitted and not collected; an online run would pay for them again."""
    return [file for file in sorted(directory.glob("*.json")) if Batch.load(file).stage in ("submitting", "submitted")]


def upload_line(request: Request, deployment: str | None = None, dialect: Dialect | None = None) -> bytes:
    """Return the line of a request in the uploaded file; an Azure deployment replaces the model's name."""
    body = adapted(request.body, dialect or {})
    if deployment is not None:
        body["model"] = deployment
    line = {"custom_id": request.key, "method": "POST", "url": f"/v1/{CHAT.path}", "body": body}
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


class Fault(NamedTuple):
    """Why a request has no answer."""

    reason: str
    refused: bool
    """The endpoint refuses the request itself, so that another attempt is useless."""


def read_answers(files: Iterable[Path]) -> tuple[dict[str, Completion], dict[str, Fault]]:
    """Read a batch's output and error files.

    Returns:
        Request key -> answer; request key -> why it has no answer. A request may be in neither.

    Raises:
        RunFailure: a file is damaged.
    """
    answers: dict[str, Completion] = {}
    faults: dict[str, Fault] = {}
    for file in files:
        with file.open("rb") as stream:
            for line in stream:
                try:
                    entry = json.loads(line)
                    key, response = str(entry["custom_id"]), entry.get("response") or {}
                    if response.get("status_code") == 200:
                        answers[key] = replace(completion_of(response.get("body")), batched=True)
                    else:
                        faults[key] = _fault(entry, response)
                except Unanswered as fault:
                    refused = isinstance(fault, ErrorBody) and fault.status in _REFUSED
                    faults[key] = Fault(str(fault), refused)
                except (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError) as error:
                    raise RunFailure(f"batches: the endpoint's file is damaged ({error}); run it again") from error
                except (ValueError, RecursionError):  # this line exceeds Python's limits: its request is unanswered
                    continue
    return answers, faults


def _fault(entry: dict[str, Any], response: dict[str, Any]) -> Fault:
    """Return the error code of a line without an answer, or its HTTP status."""
    body, status = response.get("body"), response.get("status_code")
    error = entry.get("error") or (body.get("error") if isinstance(body, dict) else None)
    code = error.get("code") if isinstance(error, dict) else None
    return Fault(one_line(code or f"HTTP {status}"), refused=status in _REFUSED)


def leaving_out(complete: Complete, unanswered: Mapping[str, str]) -> Complete:
    """Wrap `complete` so that it never sends a request that batches left unanswered: its row becomes a dead letter."""

    async def ask(request: Request) -> Completion:
        if request.key in unanswered:
            raise RowFailure(f"{LEFT_OUT}: {unanswered[request.key]}")
        return await complete(request)

    return ask if unanswered else complete
