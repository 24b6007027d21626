"""Anomaly detection: stops a run whose loss, gradients or embeddings are not finite, and warns of steps without negatives.

All figures that it judges by are the same on every worker, so all workers decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from infembed_ray.training.observability.logs import Event

_LISTED_RECORDS = 8
"""Maximum number of records that a message lists."""


class Monitor:
    """Judges every step by its loss before the update and by its gradient norm after it.

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

    def check_loss(self, step: int, measured: Mapping[str, float], records: Sequence[str]) -> None:
        """Judge a step before its backward pass.

        Args:
            step: Number of the step, from 1.
            measured: Its `loss`, and the share of its rows `without_negatives`.
            records: Ids of its records.
        """
        if not math.isfinite(measured["loss"]):
            self._stop(step, f"the loss is {measured['loss']}", records)
        repeated, self._without_negatives = self._without_negatives, measured["without_negatives"] == 1.0
        if self._without_negatives and not repeated:
            problem = f"no row has a negative, so that the loss is 0 whatever the weights{_listed(records)}"
            remedy = "remove records that share their texts, or raise records_per_step or instruction_negatives"
            message = f"step {step}: {problem}: training continues; {remedy}"
            self._log(Event(step, "no_negatives", "warn", message))

    def check_gradients(self, step: int, norm: float, records: Sequence[str]) -> None:
        """Judge the gradient norm of a step. The engine makes no update if it is not finite."""
        if not math.isfinite(norm):
            self._stop(step, "the loss is finite, but its gradients are not", records)

    def check_embeddings(self, step: int, finite: bool) -> None:
        """Judge the weights after a step, by whether embeddings are finite."""
        if not finite:
            self._stop(step, "the model gives embeddings that are not finite, so its weights have diverged", ())

    def _stop(self, step: int, problem: str, records: Sequence[str]) -> None:
        inspect = "inspect these records, or " if records else ""
        self.stopped = (
            f"step {step}: {problem}{_listed(records)}: stopped, nothing is published; {inspect}{self._remedy}"
        )
        self._log(Event(step, "nonfinite", "stop", self.stopped))


def _listed(records: Sequence[str]) -> str:
    more = f" and {len(records) - _LISTED_RECORDS} more" if len(records) > _LISTED_RECORDS else ""
    return f" (records {', '.join(records[:_LISTED_RECORDS])}{more})" if records else ""
