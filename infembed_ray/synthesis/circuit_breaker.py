"""Circuit breaker: stops a run in which every row fails at the same step for the same reason, although the models answer.

Rows that fail end sooner than rows that pass, so a row passes a step when its next step is asked. An endpoint that answers
nothing, or refuses everything, stops the run in the client.
"""

from __future__ import annotations

from collections import Counter

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm.chat import Complete, Completion, Request
from infembed_ray.synthesis import judge
from infembed_ray.synthesis.batch_files import LEFT_OUT
from infembed_ray.synthesis.outcome import Outcome, kind_of
from infembed_ray.synthesis.pipeline import STEPS, model_of

ALIKE = 20
"""Rows that must fail alike at a step, before any row passes it, to stop the run; at least half of an actor's requests
in flight, because failures can arrive before the first success. Each actor counts its own rows."""


class CircuitBreaker:
    """Counts the dead letters of steps that no row has passed yet.

    A failed complement does not count, because its record is kept. A replayed answer that fails its row does not count
    either: it costs nothing, and the settings may have changed since. Nor does a request that batches left unanswered.

    Args:
        alike: failures of one kind that trip the breaker; default: see `ALIKE`.
    """

    def __init__(self, settings: SynthesizeSettings, alike: int | None = None) -> None:
        self._settings = settings
        self._alike = alike or max(ALIKE, settings.in_flight // 2)
        self._passed = 0
        """Number of steps, from the first, that some row has passed."""
        self._failures: Counter[tuple[str, str]] = Counter()
        self.failure: str | None = None
        """Why no row can pass; None until the breaker trips."""

    def watch(self, complete: Complete) -> Complete:
        """Wrap `complete` to note the steps that rows pass."""

        async def ask(request: Request) -> Completion:
            if not request.step.endswith("_complement"):  # it may follow the cheap judge alone
                self._note_passed(STEPS.index(request.step))
            return await complete(request)

        return ask

    def add(self, outcome: Outcome) -> str | None:
        """Count an outcome; return `failure`."""
        step = outcome.row.get("step")  # a kept row has none
        passed = _passed_by_kept(outcome) if step is None else STEPS.index(step) + (outcome.kind == "rejected")
        self._note_passed(passed)
        if step is not None and outcome.kind == "dead_letter":
            replayed = outcome.from_journal and outcome.traceback is None
            if passed >= self._passed and not replayed and not outcome.row["error"].startswith(LEFT_OUT):
                self._count_failure(step, outcome.row["error"])
        return self.failure

    def _count_failure(self, step: str, error: str) -> None:
        failed = step, kind_of(error)
        self._failures[failed] += 1
        if self._failures[failed] >= self._alike and self.failure is None:
            setting, model = model_of(self._settings, step)
            self.failure = (
                f"{setting}.model={model.model}: step {step} failed alike for all of the first "
                f"{self._failures[failed]} rows ({error}); correct the settings of {setting} or of the endpoint"
            )

    def _note_passed(self, steps: int) -> None:
        """Note that a row has passed the first `steps` steps."""
        self._passed = max(self._passed, steps)


def _passed_by_kept(outcome: Outcome) -> int:
    """Return how many steps a kept row has passed: not those of the judge if only the cheap judge was asked."""
    judges = set(((outcome.row.get("provenance") or {}).get("judged_by") or {}).values())
    return STEPS.index(f"judge_{judge.ORDER[0]}") if judges == {"cheap_judge"} else len(STEPS)
