"""Requests that batches leave unanswered: how often each was tried, and what happens with the rest (`batches.rest`)."""

from __future__ import annotations

import math
from collections import Counter

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm.chat import Request, RunFailure
from infembed_ray.progress import counted, say
from infembed_ray.synthesis.batch_files import Batch, Fault
from infembed_ray.synthesis.pipeline import steps_of

BUDGET = "the budget"
"""Why a request is in no batch."""


class Rest:
    """The unanswered requests of a run."""

    def __init__(self, settings: SynthesizeSettings) -> None:
        assert settings.batches is not None
        self._settings = settings
        self._batches = settings.batches
        self._steps = steps_of(settings)
        self._attempts: Counter[str] = Counter()
        """Key -> batches that left the request unanswered."""
        self._faults: dict[str, Fault] = {}
        """Key -> why the last batch left it unanswered."""
        self._left: dict[str, float] = {}
        """Key of a request that no batch answers -> estimated price, online, of it and the later ones of its row."""

    def note(self, batch: Batch) -> None:
        """Note the unanswered requests of a collected batch."""
        for keys, refused in ((batch.unanswered, False), (batch.refused, True)):
            self._attempts.update(keys.keys())
            self._faults.update({key: Fault(reason, refused) for key, reason in keys.items()})

    def note_over_budget(self, request: Request) -> None:
        """Note a request that is in no batch, because the budget does not cover it."""
        self._attempts[request.key] = self._batches.attempts
        self._faults[request.key] = Fault(BUDGET, refused=False)

    def gives_up(self, request: Request, usd: float) -> bool:
        """Return whether no further batch is to ask a request.

        Args:
            request: the next one of its row.
            usd: estimated list price of a request.
        """
        fault = self._faults.get(request.key)
        if fault is None or not (fault.refused or self._attempts[request.key] >= self._batches.attempts):
            return False
        later = len(self._steps) - self._steps.index(request.step)
        self._left[request.key] = 0.0 if fault.refused else usd * later  # a refusal costs nothing
        return True

    @property
    def reasons(self) -> Counter[str]:
        """Reason -> number of requests that no batch answers."""
        return Counter(self._faults[key].reason for key in self._left)

    def settle(self) -> dict[str, str]:
        """Treat the rest as `batches.rest` says.

        Returns:
            Key -> reason, for requests that must not be asked online: their rows become dead letters.

        Raises:
            RunFailure: `batches.rest` is stop, or the budget is used up.
        """
        if not self._left:
            return {}
        rest, reasons = self._batches.rest, self.reasons
        shown = ", ".join(f"{reason}: {number}" for reason, number in reasons.most_common(5))
        what = f"{counted(len(self._left), 'request')} that no batch answered ({shown})"
        usd = sum(self._left.values())
        price = f"about {usd:.2g} USD" if math.isfinite(usd) else "at an unknown price"
        if rest == "online":
            say(f"synthesize: batches.rest=online: {what} and their rows' later steps are asked at full price, {price}")
            return {}
        if reasons[BUDGET]:
            raise RunFailure(
                f"limits.budget_usd={self._settings.limits.budget_usd}: the budget is used up; there are {what}; raise it, "
                "the same command resumes"
            )
        if rest == "stop" and not all(self._faults[key].refused for key in self._left):
            raise RunFailure(
                f"batches.rest=stop: there are {what}; set batches.attempts={self._batches.attempts + 2} to batch them again, "
                f"batches.rest=online to ask them and their rows' later steps at full price ({price}), or "
                "batches.rest=dead_letter to do without these rows"
            )
        say(f"synthesize: {what}: their rows become dead letters")
        return {key: self._faults[key].reason for key in self._left}
