"""Telemetry of a process: the run that it works on, figures for Prometheus, and log lines as text or JSON.

Figures are exported by Ray's agent on each node of a cluster. Without Ray, `report` does nothing.
"""

import contextlib
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from infembed_ray.errors import InputError, in_one_line
from infembed_ray.redaction import masked

LOG_FORMAT = "INFEMBED_LOG_FORMAT"
"""Environment variable: with `json`, each log line is a JSON object; with `text`, or unset, it is plain text."""

METRICS: dict[str, tuple[str, str | None]] = {
    "step_done": ("Finished units of a step, such as the passages of `encode`.", "step"),
    "step_units": ("Units of a step, finished or not.", "step"),
    "synthesis_calls_total": ("Attempts to call an LLM: `answered`, `rate_limited` (429) or `failed`.", "outcome"),
    "synthesis_seeds_total": ("Seeds that became records (`kept`), `rejected` rows or dead letters.", "outcome"),
    "synthesis_rejected_total": ("Rejected seeds by the step that rejected them.", "reason"),
    "synthesis_tokens_total": ("Tokens of the answers to finished seeds: `prompt` or `completion`.", "kind"),
    "synthesis_usd_total": ("List price of the answers to finished seeds.", None),
    "synthesis_in_flight": ("LLM calls in flight.", None),
    "synthesis_budget_usd": ("`limits.budget_usd`.", None),
    "synthesis_budget_left_usd": ("Part of the budget that no answer has used.", None),
    "training_steps_total": ("Optimizer steps.", None),
    "training_records_total": ("Records of the steps.", None),
    "training_tokens_total": ("Tokens in the passes of all workers, without padding.", None),
    "training_step_number": ("Steps done since the beginning of the run.", None),
    "training_loss": ("Loss of the last step whose loss was finite.", None),
    "training_grad_norm": ("Gradient norm before clipping of the last step where it was finite.", None),
    "training_learning_rate": ("Learning rate of the last step.", None),
    "training_step_seconds": ("Duration of the last step.", None),
    "training_memory_bytes": ("Peak GPU memory of worker 0; without GPUs, its peak resident memory.", None),
    "training_checkpoint_step_number": ("Steps done in the newest complete checkpoint.", None),
    "training_checkpoint_seconds": ("Time from the start of the newest checkpoint until it was complete.", None),
    "training_events_total": ("Events of the run: `nonfinite`, `no_negatives`, `state`, `resumed`, ...", "kind"),
    "index_passages_total": ("Passages whose vectors were `encoded`, or `reused` from an older version.", "source"),
}
"""Name without the prefix `infembed_` -> meaning, and the label besides `stage` and `run`. `_total`: a counter, else a gauge."""

_run: dict[str, str] = {}
_progress: Callable[[str], None] | None = None
_totals: dict[tuple[str, str], float] = {}


@contextlib.contextmanager
def running(stage: str, run: str, progress: Callable[[str], None] | None = None) -> Iterator[None]:
    """Name the run of this process while the block runs.

    Args:
        progress: called with each line of progress; see `show_progress`.
    """
    global _progress
    before = current(), _progress
    join({"stage": stage, "run": run})
    _progress = progress
    try:
        yield
    finally:
        join(before[0])
        _progress = before[1]


def current() -> dict[str, str]:
    """Return `stage` and `run` of this process, for its workers to `join`; empty outside of a run."""
    return dict(_run)


def join(run: Mapping[str, str]) -> None:
    """Let the figures and log lines of this process name a run."""
    _run.clear()
    _run.update(run)


def show_progress(line: str) -> None:
    """Pass a line of progress to the current run."""
    if _progress is not None:
        _progress(line)


# ------------------------------------------------------------------------------------------------------------ figures


def running_ray() -> Any:
    """Return the module `ray` if this process is connected to a cluster. A process without Ray does not import it."""
    ray = sys.modules.get("ray")
    connected = getattr(ray, "is_initialized", None)  # another thread may be importing it
    return ray if connected and connected() else None


def report(**figures: float | Mapping[Any, float | None] | None) -> None:
    """Export figures of the current run; outside of a run, and without Ray, do nothing.

    Args:
        figures: name in `METRICS` -> value, or a value for each value of its label; None is left out. A total is the sum
            since this process began, or since an earlier sum was greater.
    """
    if not _run or running_ray() is None:
        return
    for name, figure in figures.items():
        label = METRICS[name][1]
        for part, value in (figure if isinstance(figure, Mapping) else {"": figure}).items():
            if value is not None:
                _export(name, float(value), _run | ({label: part} if label else {}))


def _export(name: str, value: float, tags: dict[str, str]) -> None:
    if not name.endswith("_total"):
        _metric(name).set(value, tags)
        return
    key = (name, json.dumps(tags))
    before, _totals[key] = _totals.get(key, 0.0), value
    if (increase := value - before if value >= before else value) > 0:
        _metric(name).inc(increase, tags)


@functools.cache
def _metric(name: str) -> Any:
    from ray.util.metrics import Counter, Gauge

    text, label = METRICS[name]
    kind = Counter if name.endswith("_total") else Gauge
    return kind(f"infembed_{name.removesuffix('_total')}", text, ("stage", "run", *([label] if label else [])))


# ---------------------------------------------------------------------------------------------------------- log lines


def json_logs() -> bool:
    """Return whether log lines are JSON."""
    return os.environ.get(LOG_FORMAT) == "json"


def set_up_logs() -> None:
    """Check the format of the log. JSON includes exceptions that nothing catches.

    Raises:
        InputError: the environment names another format.
    """
    if (value := os.environ.get(LOG_FORMAT, "text")) not in ("text", "json"):
        raise InputError(f"{LOG_FORMAT}={value}: no such format; set text or json")
    if json_logs():
        sys.excepthook = lambda kind, error, where: print_error(in_one_line(error), error)


def log_line(message: str, level: str = "INFO", **more: str) -> str:
    """Return a line of the log. A JSON object has the keys of Ray's own, and `stage` and `run` within a run."""
    message, more = masked(message), {name: masked(text) for name, text in more.items()}
    if not json_logs():
        return message
    now = time.time()
    stamp = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))},{int(now % 1 * 1000):03d}"
    line = {"asctime": stamp, "levelname": level, "message": message.strip(), **_run, **more}
    return json.dumps(line, ensure_ascii=False)


def print_error(message: str, error: BaseException) -> None:
    """Print the traceback of an error and, as the last line, a message; as JSON, both are one line."""
    text = masked("".join(traceback.format_exception(error)))
    if not json_logs():
        print(text, end="", file=sys.stderr)
    print(log_line(message, "ERROR", exc_text=text), file=sys.stderr)
