"""CPU seconds of this process and its descendants by kind, over the time of a measurement."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType

import numpy as np
import psutil

EVERY_S = 0.25
"""Seconds between two samples; each takes some milliseconds of CPU, which count for this process."""


class CpuUse:
    """Samples the CPU of this process and all its descendants, in a thread.

    Args:
        kind_of: command line of a descendant -> its kind. This process has the kind `driver`.
    """

    def __init__(self, kind_of: Callable[[str], str]) -> None:
        self._kind_of = kind_of
        self._seen: dict[int, float] = {}
        self._used: Counter[str] = Counter()
        self._samples: list[tuple[float, Counter[str]]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> CpuUse:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def between(self, began: float, ended: float) -> dict[str, float]:
        """Return CPU seconds per kind between two times (`time.monotonic`)."""
        times = [at for at, _ in self._samples]
        used = {kind: [sample[kind] for _, sample in self._samples] for kind in self._used}
        return {
            kind: float(np.interp(ended, times, values) - np.interp(began, times, values))
            for kind, values in used.items()
        }

    def _run(self) -> None:
        this = psutil.Process()
        while True:
            for process in (this, *this.children(recursive=True)):
                try:
                    kind = "driver" if process == this else self._kind_of(" ".join(process.cmdline()))
                    cpu = process.cpu_times()
                except psutil.Error:  # it has ended
                    continue
                seconds = cpu.user + cpu.system
                self._used[kind] += seconds - self._seen.get(process.pid, seconds if not self._samples else 0.0)
                self._seen[process.pid] = seconds
            self._samples.append((time.monotonic(), Counter(self._used)))
            if self._ended.wait(EVERY_S):
                return
