"""Progress of long steps: a bar on a terminal, plain lines in a job log."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from infembed_ray import telemetry

Advance = Callable[..., None]
"""`advance(n=1, note="")` adds n finished units and shows the note beside the bar."""

LOG_INTERVAL_S = 10.0


def say(line: str) -> None:
    """Print one line without buffering, because job logs are read while the job runs."""
    print(telemetry.log_line(line), flush=True)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: 1 worker, 2 workers."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows of a table, each with as many cells, as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


@contextmanager
def track(title: str, total: int | None, done: int = 0) -> Iterator[Advance]:
    """Show the progress of a step.

    The remaining time is estimated from the second update on, because the first one includes the start of workers.

    Args:
        total: number of units; None if unknown.
        done: units finished by an earlier run; the estimate leaves them out.
    """
    bar = _terminal if sys.stdout.isatty() and not telemetry.json_logs() else _log
    with bar(title, total, done) as show:

        def advance(n: int = 1, note: str = "") -> None:
            nonlocal done
            done += n
            telemetry.report(step_done={title: done}, step_units={title: total})
            telemetry.show_progress(f"{title}: {done}{'' if total is None else f'/{total}'}  {note}".rstrip())
            show(n, note)

        yield advance


@contextmanager
def in_thread(work: Callable[[threading.Event], None], name: str = "progress") -> Iterator[None]:
    """Run a function in a thread while the block runs; at the end its event is set, after which it must return."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _terminal(title: str, total: int | None, done: int) -> Iterator[Advance]:
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(file=sys.stdout)) as bars:
        task = bars.add_task(title, total=total, completed=done, note="")
        yield lambda n=1, note="": bars.update(task, advance=n, note=note)


@contextmanager
def _log(title: str, total: int | None, done: int) -> Iterator[Advance]:
    start = last = time.monotonic()
    before = done
    first: tuple[float, int] | None = None  # time and count of the first update
    latest_note = ""
    printed: tuple[int, str] | None = None

    def line() -> str:
        of_total = f"/{total}" if total is not None else ""
        now = time.monotonic()
        remaining = ""
        if total and first and first[1] < done < total:
            left_s = (now - first[0]) / (done - first[1]) * (total - done)
            remaining = f", {left_s:.0f} s left, until {time.strftime('%H:%M', time.localtime(time.time() + left_s))}"
        return f"{title}: {done}{of_total}  {now - start:.0f} s{remaining}  {latest_note}".rstrip()

    def advance(n: int = 1, note: str = "") -> None:
        nonlocal done, last, first, latest_note, printed
        done += n
        if first is None and done > before:
            first = time.monotonic(), done
        latest_note = note or latest_note
        if time.monotonic() - last >= LOG_INTERVAL_S:
            last = time.monotonic()
            printed = done, latest_note
            say(line())

    yield advance
    if printed != (done, latest_note):  # else the last line said the same
        say(line())
