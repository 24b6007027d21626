"""Results of a run on disk: JSON lines as they come, and tables for people."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

_NOTES = ("skipped", "not run", "error")
"""Kinds of lines that hold no result."""


class Results:
    """Collects the lines of all cases, writes each at once and prints it.

    Args:
        directory: of the two files.
        device: cuda or cpu; names the files until the machine has said its own name.
    """

    def __init__(self, directory: Path, device: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._device = device
        self._stem: Path | None = None
        self._lines: list[dict[str, Any]] = []
        self._seconds: dict[str, float] = {}

    def add(self, case: str, line: dict[str, Any]) -> None:
        """Add a line of a case: a result, why it was skipped or did not run, or its error."""
        line = {"case": case, **line}
        self._lines.append(line)
        print(_told(line), flush=True)
        self._write()

    def ended(self, case: str, seconds: float) -> None:
        """Note the time that a case took."""
        self._seconds[case] = round(seconds, 1)
        self._write()

    def close(self) -> int:
        """Print the outcome as one JSON object; return the exit status."""
        failed = [f"{line['case']}: {name}" for line in self._lines for name in line.get("failed", ())]
        errors = [f"{line['case']}: {line['error']}" for line in self._lines if "error" in line]
        skipped, not_run = (
            {line["case"]: line[kind] for line in self._lines if kind in line} for kind in ("skipped", "not run")
        )
        outcome = {
            "checks": sum(len(line.get("checks", ())) for line in self._lines),
            "failed": failed,
            "errors": errors,
            "skipped": skipped,
            "not run": not_run,
            "seconds": self._seconds,
            "results": None if self._stem is None else str(self._stem.with_suffix(".md")),
        }
        print(json.dumps(outcome))
        return 1 if failed or errors else 0

    def _write(self) -> None:
        if self._stem is None:
            self._stem = self._directory / f"{date.today().isoformat()}-gpu-{self._device_name()}"
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self._lines)
        for suffix, content in (".jsonl", text), (".md", as_markdown(self._lines, self._seconds)):
            whole = self._stem.with_name(f".{self._stem.name}{suffix}")
            whole.write_text(content, encoding="utf-8")
            whole.replace(f"{self._stem}{suffix}")  # a run that is killed leaves whole files

    def _device_name(self) -> str:
        name = next((line["figures"]["device"] for line in self._lines if "device" in line.get("figures", {})), None)
        return re.sub(r"[^a-z0-9]+", "-", (name or self._device).lower()).strip("-")


def as_markdown(lines: list[dict[str, Any]], seconds: dict[str, float]) -> str:
    """Format the lines as a page: the machine, a table a case, and what did not run."""
    machine = next((line["figures"] for line in lines if "device" in line.get("figures", {})), {})
    parts = [f"# The GPU path on {machine.get('device', 'one device')}, {date.today().isoformat()}", ""]
    parts += [", ".join(f"{name} {value}" for name, value in machine.items() if name != "device") + ".", ""]
    for case in dict.fromkeys(line["case"] for line in lines):
        took = f" ({seconds[case]:.0f} s)" if case in seconds else ""
        parts += [f"## {case}{took}", "", *_of_case([line for line in lines if line["case"] == case]), ""]
    parts += ["Made by `python -m benchmarks.gpu`. A check passes if its value is at most its bound."]
    return "\n".join(parts) + "\n"


def _of_case(lines: list[dict[str, Any]]) -> list[str]:
    results = [line for line in lines if "result" in line]
    notes = [f"{kind}: {line[kind]}" for line in lines for kind in _NOTES if kind in line]
    if not results:
        return notes
    columns = list(dict.fromkeys(name for line in results for name in line["figures"]))
    rows = [f"| | {' | '.join([*columns, 'checks'])} |", f"|---{'|---:' * len(columns)}|---|"]
    for line in results:
        cells = [f"{line['figures'].get(name, '')}" for name in columns]
        checks = ", ".join(
            f"{'**failed** ' * (name in line['failed'])}{name} {value} <= {bound}"
            for name, (value, bound) in line["checks"].items()
        )
        rows.append(f"| {' | '.join([line['result'], *cells, checks])} |")
    return [*rows, *([""] if notes else []), *notes]


def _told(line: dict[str, Any]) -> str:
    """Format a line for the terminal."""
    if "result" not in line:
        (kind,) = (kind for kind in _NOTES if kind in line)
        return f"{line['case']}: {'ERROR' if kind == 'error' else kind}: {line[kind]}"
    figures = ", ".join(f"{name} {value}" for name, value in line["figures"].items())
    checks = ", ".join(f"{name} {value} <= {bound}" for name, (value, bound) in line["checks"].items())
    failed = f"  FAILED: {', '.join(line['failed'])}" if line["failed"] else ""
    return f"{line['case']}: {line['result']}: " + "; ".join(filter(None, (figures, checks))) + failed
