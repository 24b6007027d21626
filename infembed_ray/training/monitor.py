"""Watches a run for steps that go wrong, and decides what becomes of them.

What it judges by are figures that all workers share, so all decide alike and none waits for another in a collective.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from infembed_ray.config import TrainSettings
from infembed_ray.training.events import Action, Event, EventLog, Kind

WINDOW = 50
"""Losses before a step whose median tells what is usual."""
FEWEST = 10
"""Losses that there must be for that."""
_NAMED = 8  # records of a step
_GOES_ON: Mapping[Kind, Action] = {"nonfinite": "skip", "no_negatives": "warn", "spike": "warn"}


class Monitor:
    """Judges every step, by its loss before the update and by its gradients' norm after it.

    A message names the step, what is wrong with it, its records and the remedy.

    Args:
        settings: of the run; `anomalies` says what to do.
        events: where it tells.
        losses: of the steps before that had negatives, in order, as they were logged.

    Attributes:
        stopped: why the run is to end with this step, of which no update is made; None: it goes on.
    """

    def __init__(self, settings: TrainSettings, events: EventLog, losses: Sequence[float | None] = ()) -> None:
        self.stopped: str | None = None
        self._policy = settings.anomalies
        self._gentler = f"look at these records, or lower learning_rate={settings.learning_rate:g}"
        self._events = events
        self._losses = deque((loss for loss in losses if loss is not None), maxlen=WINDOW)
        self._without_negatives = False  # the step before

    def approves(self, step: int, measured: Mapping[str, float], records: Sequence[str]) -> bool:
        """Is the step to change the weights? To be asked before its last backward pass.

        Args:
            step: counted from 1.
            measured: its `loss`, and the share of its rows `without_negatives`.
            records: ids of its records.
        """
        loss = measured["loss"]
        if not math.isfinite(loss):
            return self._act("nonfinite", self._policy.nonfinite, step, f"the loss is {loss}", records, self._gentler)
        again, self._without_negatives = self._without_negatives, measured["without_negatives"] == 1.0
        if self._without_negatives:
            if again and self._policy.no_negatives == "warn":
                return True
            what = "no row has a single negative, the loss is 0 whatever the weights"
            remedy = "remove records that share their texts, or raise records_per_step or instruction_negatives"
            return self._act("no_negatives", self._policy.no_negatives, step, what, records, remedy)
        before, factor = list(self._losses), self._policy.spike_factor
        self._losses.append(loss)
        usual = median(before) if len(before) >= FEWEST else math.inf
        if factor is not None and usual > 0 and loss > factor * usual:
            what = f"the loss is {loss:.4g}, {loss / usual:.3g} times the median of the last {len(before)}"
            return self._act("spike", self._policy.spike, step, what, records, self._gentler)
        return True

    def check_gradients(self, step: int, norm: float, records: Sequence[str]) -> None:
        """Judge the gradient norm of a step that was approved; of one that is not finite the engine makes no update."""
        if not math.isfinite(norm):
            what = "the loss is finite, its gradients are not"
            self._act("nonfinite", self._policy.nonfinite, step, what, records, self._gentler)

    def _act(self, kind: Kind, action: Action, step: int, what: str, records: Sequence[str], remedy: str) -> bool:
        named = ", ".join(records[:_NAMED])
        more = f" and {len(records) - _NAMED} more" if len(records) > _NAMED else ""
        followed = {
            "warn": "the run went on",
            "skip": "no update was made",
            "stop": f"stopped, the last state is kept; to go on set anomalies.{kind}={_GOES_ON[kind]}",
        }
        message = f"step {step}: {what} (records {named}{more}): {followed[action]}; {remedy}"
        self._events.write(Event(step, kind, action, message))
        if action == "stop":
            self.stopped = message
        return action == "warn"
