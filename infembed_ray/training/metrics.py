"""The log of a training run: one JSON line a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


class MetricsLog:
    """Writes the log; lines of steps that a resumed run does again are cut first.

    Args:
        directory: of the run.
        start: steps already done in the state the run resumes from.
    """

    def __init__(self, directory: Path, start: int) -> None:
        path = directory / METRICS
        kept = path.read_text(encoding="utf-8").splitlines()[:start] if path.exists() else []
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        self._stream = path.open("a", encoding="utf-8", buffering=1)

    def write(self, **values: Any) -> None:
        """Append one step; on disk at once, because the driver shows progress from it."""
        self._stream.write(json.dumps(values) + "\n")


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """All whole lines so far; empty before the first step."""
    path = directory / METRICS
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
