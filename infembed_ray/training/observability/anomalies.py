"""Anomaly detection: stops a run whose figures are not finite, and warns of steps without negatives.

All figures that it judges by are the same on every worker, so all workers decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from infembed_ray.training.observability.logs import Event

_LISTED_RECORDS = 8
"""Maximum number of records that a message lists."""


class Monitor:
    """Judges the figures of every step.

    Args:
        learning_rate: Setting that a message advises to lower.
        log: Logs an event.

    Attributes:
        stopped: Why the run stops after this step, which makes no update; None while it continues.
    """

    def __init__(self, learning_rate: float, log: Callable[[Event], None]) -> None:
        self.stopped: str | None = None
        self._log = log
        self._remedy = f"lower learning_rate={learning_rate:g}, which starts the run from the beginning"
        self._without_negatives = False  # in the step before

    def check(self, step: int, what: str, value: float, records: Sequence[str] = ()) -> None:
        """Stop the run if a figure of a step, from 1, is not finite; `records` are the ids of the step's records."""
        if not math.isfinite(value):
            inspect = "inspect these records, or " if records else ""
            problem = f"{what} is {value}{_listed(records)}"
            self.stopped = f"step {step}: {problem}: stopped, nothing is published; {inspect}{self._remedy}"
            self._log(Event(step, "nonfinite", "stop", self.stopped))

    def check_negatives(self, step: int, without: float, records: Sequence[str]) -> None:
        """Warn of the first of consecutive steps all of whose rows, a share of 1, are `without` negatives."""
        repeated, self._without_negatives = self._without_negatives, without == 1.0
        if self._without_negatives and not repeated:
            problem = f"no row has a negative, so that the loss is 0 whatever the weights{_listed(records)}"
            remedy = "remove records that share their texts, or raise records_per_step or instruction_negatives"
            message = f"step {step}: {problem}: training continues; {remedy}"
            self._log(Event(step, "no_negatives", "warn", message))


def _listed(records: Sequence[str]) -> str:
    more = f" and {len(records) - _LISTED_RECORDS} more" if len(records) > _LISTED_RECORDS else ""
    return f" (records {', '.join(records[:_LISTED_RECORDS])}{more})" if records else ""
