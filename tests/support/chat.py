"""Requests and completions for tests."""

from dataclasses import replace
from pathlib import Path

from infembed_ray.llm.chat import Completion, Request


def request(text: str = "hello", model: str = "small", row: str = "r", step: str = "s") -> Request:
    return Request(model, ({"role": "user", "content": text},), "test=1", step, row)


def completion(text: str, model: str = "small-2026-01-01", tokens: tuple[int, int] = (7, 3)) -> Completion:
    return Completion(text, "stop", model, *tokens)


def passage_request(query: str, model: str = "small") -> Request:
    """Return a request that the stand-in endpoint understands."""
    asked = request(f"Query: {query}\n\nInstruction: be brief\n\nPassage: <your passage>", model)
    return replace(asked, parameters={"max_completion_tokens": 150})


def unreadable(*segments: Path) -> None:
    """Replace each file with a directory, so reading fails even for root."""
    for segment in segments:
        segment.unlink(missing_ok=True)
        segment.mkdir()
