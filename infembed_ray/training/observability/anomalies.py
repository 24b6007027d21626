"""Anomaly detection: judges each training step and warns, skips its update or stops the run.

All figures that it judges by are the same on every worker, so all workers decide alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from infembed_ray.config.training import TrainSettings
from infembed_ray.training.observability.events import Action, Event, EventLog, Kind

WINDOW = 50
"""Number of preceding losses whose median is the usual loss."""
FEWEST = 10
"""Minimum number of losses for that median."""
SKIPPED = 10
"""Steps in a row without an update, because they were not finite, after which the run stops."""
_LISTED_RECORDS = 8
"""Maximum number of records that a message lists."""
_TO_CONTINUE: Mapping[Kind, Action] = {"nonfinite": "skip", "no_negatives": "warn", "spike": "warn"}
"""Kind of anomaly -> value of its setting with which a stopped run can continue."""


class Monitor:
    """Judges every step by its loss before the update and by its gradient norm after it.

    A message names the step, the anomaly, the records and the remedy.

    Args:
        settings: Settings of the run; `anomalies` holds the actions.
        events: Where anomalies are logged.
        losses: Logged losses of the earlier steps that had negatives, in order.

    Attributes:
        stopped: Why the run stops after this step, which makes no update; None while it continues.
    """

    def __init__(self, settings: TrainSettings, events: EventLog, losses: Sequence[float | None] = ()) -> None:
        self.stopped: str | None = None
        self._policy = settings.anomalies
        self._skipped = 0  # steps in a row without an update, because they were not finite
        self._lower = f"lower learning_rate={settings.learning_rate:g}, which starts the run from the beginning"
        self._remedy = f"inspect these records, or lower learning_rate={settings.learning_rate:g}"
        self._events = events
        self._losses = deque((loss for loss in losses if loss is not None), maxlen=WINDOW)
        self._without_negatives = False  # in the step before

    def approves(self, step: int, measured: Mapping[str, float], records: Sequence[str]) -> bool:
        """Return whether the step may update the weights; called before its last backward pass.

        Args:
            step: Number of the step, from 1.
            measured: Its `loss`, and the share of its rows `without_negatives`.
            records: Ids of its records.
        """
        loss = measured["loss"]
        if not math.isfinite(loss):
            return self._not_finite(step, f"the loss is {loss}", records)
        repeated, self._without_negatives = self._without_negatives, measured["without_negatives"] == 1.0
        if self._without_negatives:
            if repeated and self._policy.no_negatives == "warn":
                return True
            problem = "no row has a negative, so that the loss is 0 whatever the weights"
            remedy = "remove records that share their texts, or raise records_per_step or instruction_negatives"
            return self._act("no_negatives", self._policy.no_negatives, step, problem, records, remedy)
        before, factor = list(self._losses), self._policy.spike_factor
        self._losses.append(loss)
        usual = median(before) if len(before) >= FEWEST else math.inf
        if factor is not None and usual > 0 and loss > factor * usual:
            problem = f"the loss is {loss:.4g}, {loss / usual:.3g} times the median of the last {len(before)}"
            return self._act("spike", self._policy.spike, step, problem, records, self._remedy)
        return True

    def check_gradients(self, step: int, norm: float, records: Sequence[str]) -> None:
        """Judge the gradient norm of an approved step. The engine makes no update if it is not finite."""
        if not math.isfinite(norm):
            self._not_finite(step, "the loss is finite, but its gradients are not", records)
        else:
            self._skipped = 0

    def check_embeddings(self, step: int, finite: bool) -> None:
        """Judge the weights after a step, by whether embeddings are finite. No action continues with others."""
        if not finite:
            self._stop(step, "the model gives embeddings that are not finite, so its weights have diverged")

    def _not_finite(self, step: int, problem: str, records: Sequence[str]) -> bool:
        self._skipped += 1
        if self._policy.nonfinite == "skip" and self._skipped >= SKIPPED:
            self._stop(step, f"{problem}, and {SKIPPED} steps in a row had no update, so the weights have diverged")
            return False
        return self._act("nonfinite", self._policy.nonfinite, step, problem, records, self._remedy)

    def _stop(self, step: int, problem: str) -> None:
        self.stopped = f"step {step}: {problem}: stopped, nothing is published; {self._lower}"
        self._events.write(Event(step, "nonfinite", "stop", self.stopped))

    def _act(self, kind: Kind, action: Action, step: int, problem: str, records: Sequence[str], remedy: str) -> bool:
        """Log the anomaly; return whether the step may update the weights."""
        listed = ", ".join(records[:_LISTED_RECORDS])
        more = f" and {len(records) - _LISTED_RECORDS} more" if len(records) > _LISTED_RECORDS else ""
        outcome = {
            "warn": "training continues",
            "skip": "the update was skipped",
            "stop": f"stopped, the last checkpoint is kept; to continue, set anomalies.{kind}={_TO_CONTINUE[kind]}",
        }
        message = f"step {step}: {problem} (records {listed}{more}): {outcome[action]}; {remedy}"
        self._events.write(Event(step, kind, action, message))
        if action == "stop":
            self.stopped = message
        return action == "warn"
