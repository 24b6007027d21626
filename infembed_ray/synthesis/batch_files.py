"""Batches on disk: their requests, their state, and the answers that the endpoint returned."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from infembed_ray import durable
from infembed_ray.llm.chat import Completion, Dialect, Request, RunFailure, adapted
from infembed_ray.llm.endpoint import CHAT, Unanswered, completion_of, one_line


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
    unanswered: list[str] = field(default_factory=list)
    """Keys of the requests without an answer, once it is collected."""

    @classmethod
    def prepare(cls, directory: Path, base_url: str, requests: Sequence[Request], worst_usd: float) -> Batch:
        """Write a new batch durably; its tag is a hash of its requests."""
        keys = "".join(request.key for request in requests)
        tag = hashlib.sha256(keys.encode()).hexdigest()[:24]
        batch = cls(directory, tag, base_url, len(requests), worst_usd)
        with durable.replacing(batch.path("requests")) as stream:
            stream.writelines(json.dumps(asdict(each), ensure_ascii=False).encode() + b"\n" for each in requests)
        batch.save()
        return batch

    @classmethod
    def load(cls, file: Path) -> Batch:
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


def read_answers(files: Iterable[Path]) -> tuple[dict[str, Completion], dict[str, str]]:
    """Read a batch's output and error files.

    Returns:
        Request key -> answer; request key -> why it has no answer. A request may be in neither.

    Raises:
        RunFailure: a file is damaged.
    """
    answers: dict[str, Completion] = {}
    faults: dict[str, str] = {}
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
                    faults[key] = str(fault)
                except (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError) as error:
                    raise RunFailure(f"batches: the endpoint's file is damaged ({error}); run it again") from error
                except (ValueError, RecursionError):  # this line exceeds Python's limits: its request is unanswered
                    continue
    return answers, faults


def _fault(entry: dict[str, Any], response: dict[str, Any]) -> str:
    """Return the error code of a line without an answer, or its HTTP status."""
    body = response.get("body")
    error = entry.get("error") or (body.get("error") if isinstance(body, dict) else None)
    code = error.get("code") if isinstance(error, dict) else None
    return one_line(code or f"HTTP {response.get('status_code')}")
