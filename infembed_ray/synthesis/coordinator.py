"""What the actors of a run share: its limits, the dialects of its models, and the rows of its tasks."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import pyarrow as pa

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm import budget, prices
from infembed_ray.llm.chat import RunFailure
from infembed_ray.llm.client import run_in_thread
from infembed_ray.llm.dialects import Dialects, learn, most_usd
from infembed_ray.llm.journal_store import JournalPlace
from infembed_ray.synthesis.preflight import endpoints, probes


class Coordinator(budget.DurableLedger):
    """The ledger of a run. It also hands out the rows of tasks, because other nodes may share no directory.

    Args:
        tasks: file of the seeds, a record batch for each task.
        learned: the dialects, if this run has asked the models before.
    """

    def __init__(
        self,
        settings: SynthesizeSettings,
        spent_usd: float,
        journal: JournalPlace,
        tasks: Path,
        learned: Dialects | None = None,
    ) -> None:
        super().__init__(settings.limits, spent_usd, journal)
        self._settings = settings
        self._file = tasks
        self._dialects: Dialects | str | None = learned

    @cached_property
    def _tasks(self) -> pa.RecordBatchFileReader:
        return pa.ipc.open_file(pa.memory_map(str(self._file)))

    def rows(self, task: int) -> pa.RecordBatch:
        """Return the numbered seeds of a task."""
        return self._tasks.get_batch(task)

    def learned(self) -> Dialects | None:
        """Return the dialects of each endpoint's models; None as long as no model was asked."""
        return None if isinstance(self._dialects, str) else self._dialects

    def dialects(self) -> Dialects | str:
        """Return the dialects of each endpoint's models, or why a model cannot be asked.

        The first call asks the models. An actor calls it before its first request, so a run that the journal answers asks
        nothing, and nothing else is sent meanwhile.
        """
        if self._dialects is None:
            budget_usd = self._settings.limits.budget_usd
            given = endpoints(self._settings), probes(self._settings), prices.load(self._settings.prices)
            if budget_usd is not None and self.committed_usd + (most := most_usd(*given)) > budget_usd:
                self._dialects = (
                    f"limits.budget_usd={budget_usd:g}: used up ({self.committed_usd:.4f} USD spent; to find out the models' "
                    f"parameters may take {most:.4f}); raise it, or set endpoint.probe=false"
                )
                return self._dialects
            try:
                learned = run_in_thread(learn(*given))
            except RunFailure as failure:
                self._dialects = str(failure)
            else:
                self._dialects = learned.dialects
                self.charge(learned.used, learned.report)
        return self._dialects
