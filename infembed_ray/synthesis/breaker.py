"""Circuit breaker: stops a run in which every row fails at the same step for the same reason.

With a wrong parameter, the endpoint refuses every request with HTTP 400 or 422. Each refusal fails only its row, but no
row can pass, so the run stops after a few of them. The same holds for answers that are all cut off or malformed.
"""

from __future__ import annotations

import re
from collections import Counter

from infembed_ray.config import SynthesizeSettings
from infembed_ray.synthesis.steps import STEPS, Outcome, model_of

ALIKE = 20
"""Rows that must fail alike at a step, before any row passes it, to stop the run. Each actor counts its own rows."""


class Breaker:
    """Count the dead letters of steps that no row has passed yet.

    A complement that fails does not count: its record is kept.

    Args:
        settings: of the run; the message names the model's setting.
        alike: failures of one kind that trip the breaker.
    """

    def __init__(self, settings: SynthesizeSettings, alike: int = ALIKE) -> None:
        self._settings = settings
        self._alike = alike
        self._passed = 0
        """Steps that some row has passed, from the first."""
        self._failures: Counter[tuple[str, str]] = Counter()
        self.failure: str | None = None
        """Why no row can pass; None until the breaker trips."""

    def add(self, outcome: Outcome) -> str | None:
        """Count an outcome; returns `failure`."""
        step = outcome.row.get("step")  # a kept row has none
        if step is not None and step not in STEPS:  # the seed itself is at fault
            return self.failure
        passed = len(STEPS) if step is None else STEPS.index(step) + (outcome.kind == "rejected")
        self._passed = max(self._passed, passed)
        if step is not None and outcome.kind == "dead_letter" and passed >= self._passed:
            error = outcome.row["error"]
            failed = step, _kind(error)
            self._failures[failed] += 1
            if self._failures[failed] >= self._alike and self.failure is None:
                setting, model = model_of(self._settings, step)
                self.failure = (
                    f"{setting}.model={model.model}: step {step} failed alike for all of the first "
                    f"{self._failures[failed]} rows ({error}); correct the settings of {setting} or of the endpoint"
                )
        return self.failure


def _kind(error: str) -> str:
    """The part of an error's text before its details, for example `HTTP 400`."""
    return re.split("[:;(]", error, maxsplit=1)[0].strip()
