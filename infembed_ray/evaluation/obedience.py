"""Obedience controls: the same queries under other instructions, which show whether p-MRR measures obedience.

p-MRR also rises if a benchmark rewards words that the instruction shares with the passage, if a model reacts to any text, or
if it forgets the query. So a task with changed instructions is asked under further `CONDITIONS`, and each has all figures:
p-MRR, quality under the original and under the changed instruction, pairs reversed and violation@2. The gates of a release are
what a model must keep, against the first model, before its p-MRR counts as obedience.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from infembed_ray.config.base import nearest
from infembed_ray.config.evaluation import EvaluateSettings, GateSettings
from infembed_ray.errors import GateError, InputError
from infembed_ray.evaluation import results
from infembed_ray.evaluation.metrics import Change, Run, p_mrr, ranks, trec_measures
from infembed_ray.evaluation.results import Results
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.evaluation.significance import IntervalEstimate, Stratum, compare
from infembed_ray.evaluation.tasks.task import Obedience, Query, Task, averaged
from infembed_ray.progress import say
from infembed_ray.storage.places import place_of
from infembed_ray.storage.steps import Published

MEANINGS = {
    "as given": "the task's own instructions",
    "query only": "no instruction; p-MRR is exactly 0",
    "generic": "two instructions that ask for nothing in particular; p-MRR should be near 0",
    "shuffled": "both instructions of another query, the mean of several; p-MRR should be near 0",
    "inverted": "the two instructions exchanged: p-MRR is negated, quality should collapse",
    "paraphrased": "the task's own instructions in another sentence; nothing should move",
}
AS_GIVEN, QUERY_ONLY, GENERIC, SHUFFLED, INVERTED, PARAPHRASED = CONDITIONS = tuple(MEANINGS)
BM25 = "BM25"
"""Label of the reference model: word overlap."""

NO_CHANGES = ("no task has changed instructions", "evaluate InF-IR records or FollowIR")
"""Fault of a gate, and remedy."""
VIOLATION_DEPTH = 2
"""Cut-off of violation@k, as in CoDeR."""
_SHUFFLES = 4
"""Foreign instructions per query, whose values are averaged: one leaves a standard error of some points."""
_SEED = 42
_GENERIC = ("Find passages that answer the query.", "Retrieve the documents that are relevant to this question.")
_PARAPHRASE = "Here is what I am looking for. {instruction} Please keep that in mind."

Pair = tuple[str, str]
"""Ids of a query and of the same query under the changed instruction."""
Asked = Mapping[str, str]
"""Query id -> id of the query whose ranking is used instead of its own."""


@dataclass(frozen=True)
class Controls:
    """The further queries of a task, and which of them each condition asks."""

    queries: tuple[Query, ...]
    twins: Mapping[str, str]
    """Further query -> the task's query whose candidates and exclusions it has."""
    asked: Mapping[str, Sequence[Asked]]
    """Condition -> which rankings it measures; the values of several are averaged."""

    @classmethod
    def from_task(cls, task: Task) -> Controls | None:
        """Make the controls of a task; None without a changed instruction. Equal tasks have equal controls."""
        pairs = pairs_of(task.changes)
        if not pairs:
            return None
        query_of = {query.id: query for query in task.queries}
        own = {pair: [query_of[query].instruction for query in pair] for pair in pairs}
        told: dict[str, Mapping[Pair, Sequence[str | None]]] = {
            QUERY_ONLY: dict.fromkeys(pairs, (None, None)),
            GENERIC: dict.fromkeys(pairs, _GENERIC),
            **{f"{SHUFFLED}-{n}": {p: own[foreign[p]] for p in pairs} for n, foreign in enumerate(_foreign(pairs), 1)},
            PARAPHRASED: {p: [i and _PARAPHRASE.format(instruction=i) for i in both] for p, both in own.items()},
        }
        asked: dict[str, list[Asked]] = {condition: [] for condition in CONDITIONS}
        asked[AS_GIVEN] = [{query: query for pair in pairs for query in pair}]
        asked[INVERTED] = [{query: other for a, b in pairs for query, other in ((a, b), (b, a))}]
        further: dict[str, Query] = {}
        twins: dict[str, str] = {}
        for name, instructions in told.items():
            ids: dict[str, str] = {}
            for (a, b), both in instructions.items():
                for query, instruction in zip((a, b), both, strict=True):
                    ids[query] = f"{query}~{name.replace(' ', '-')}"
                    if query == b and name == QUERY_ONLY and query_of[a].query == query_of[b].query:
                        ids[b] = ids[a]  # one ranking of both, so that p-MRR is exactly 0
                        continue
                    further[ids[query]] = replace(query_of[query], id=ids[query], instruction=instruction)
                    twins[ids[query]] = query
            asked[name.partition("-")[0]].append(ids)
        return cls(tuple(further.values()), twins, {name: several for name, several in asked.items() if several})

    def ask(self, task: Task) -> Task:
        """Return the task with the further queries, to be ranked like its own."""
        candidates = task.candidates and {**task.candidates, **{q: task.candidates[t] for q, t in self.twins.items()}}
        excluded = {**task.excluded, **{q: task.excluded[t] for q, t in self.twins.items() if t in task.excluded}}
        return replace(task, queries=(*task.queries, *self.queries), candidates=candidates, excluded=excluded)

    def measure(self, task: Task, run: Run) -> dict[str, dict[str, dict[str, float]]]:
        """Compute the figures of every condition.

        Args:
            task: the task without further queries.
            run: rankings of all queries of `ask`.

        Returns:
            condition -> figure -> query -> value, not scaled by 100. A condition without rankings is left out. p-MRR has a
            value per query with documents that its change excludes, violation@k per changed query, pairs reversed per pair
            that has any.
        """
        runs = {
            condition: [{query: run.get(name, {}) for query, name in own.items()} for own in several]
            for condition, several in self.asked.items()
            if condition == AS_GIVEN or all(name in run for own in several for name in own.values())
        }
        scores = {c: averaged([_figures(task, own) for own in several]) for c, several in runs.items()}
        return {c: {figure: values for figure, values in own.items() if values} for c, own in scores.items()}


def pairs_of(changes: Iterable[Change]) -> list[Pair]:
    """Return the (original, changed) queries of changes; two changes in opposite directions are one pair."""
    pairs: dict[Pair, None] = {}
    for change in changes:
        if change.documents and (change.changed, change.original) not in pairs:
            pairs[change.original, change.changed] = None
    return list(pairs)


def word_overlap(task: Task, depth: int) -> float | None:
    """Return the p-MRR that BM25 reaches on a task; None without values."""
    values = p_mrr(task.changes, baselines.rank(baselines.resolve(BM25, "bm25"), task, depth)).values()
    return fmean(values) if values else None


def _foreign(pairs: Sequence[Pair]) -> list[Mapping[Pair, Pair]]:
    """Give each pair another one, in up to `_SHUFFLES` ways; none of a single pair."""
    order = random.Random(_SEED).sample(pairs, len(pairs))
    shifts = range(1, min(_SHUFFLES, len(pairs) - 1) + 1)
    return [dict(zip(order, [*order[shift:], *order[:shift]], strict=True)) for shift in shifts]


def _figures(task: Task, run: Run) -> dict[str, dict[str, float]]:
    """Compute the figures of one condition from the ranking that it uses for each query of the pairs."""
    pairs = pairs_of(task.changes)
    measure = next((f.measure for f in task.figures if f.measure.startswith(("nDCG@", "MAP@"))), "nDCG@10")
    of_query = trec_measures({query: task.qrels[query] for pair in pairs for query in pair}, run, [measure])
    first = {query: set(list(ranks(ranking))[:VIOLATION_DEPTH]) for query, ranking in run.items()}
    return {
        "p-MRR": p_mrr(task.changes, run),
        **{
            f"{measure} {side}": {pair[at]: of_query[pair[at]][measure] for pair in pairs}
            for at, side in enumerate(("original", "changed"))
        },
        "pairs reversed": _reversed(task, run),
        f"violation@{VIOLATION_DEPTH}": {
            change.changed: float(not first[change.changed].isdisjoint(change.documents))
            for change in task.changes
            if change.documents
        },
    }


def _reversed(task: Task, run: Run) -> dict[str, float]:
    """Return, per pair of queries, the share of labelled document pairs that each instruction puts in its own order."""
    lost = {(change.original, change.changed): change.documents for change in task.changes}
    shares = {}
    for a, b in pairs_of(task.changes):
        only_a, only_b = lost[a, b], lost.get((b, a), ())
        if not only_b:  # no document is relevant only under the changed instruction
            continue
        rank_a, rank_b = ranks(run[a]), ranks(run[b])
        last_a, last_b = len(rank_a) + 1, len(rank_b) + 1
        shares[a] = fmean(
            rank_a.get(one, last_a) < rank_a.get(other, last_a) and rank_b.get(other, last_b) < rank_b.get(one, last_b)
            for one in only_a
            for other in only_b
        )
    return shares


def check_gate(settings: EvaluateSettings) -> None:
    """Check before any work that the gate can be decided; InputError if not."""
    gate, labels = settings.gate, list(settings.models)
    if gate is None:
        return
    if gate not in labels[1:]:
        why = "is the base itself" if gate in labels else f"is not a label of models; {nearest(gate, labels)}"
        raise InputError.of("gate", gate, why, "give the label of a later model than the first, its base")
    if not settings.controls:
        raise InputError.of("gate", gate, "needs the controls", "leave controls unset")


def require_gates(settings: EvaluateSettings, published: Published) -> Published:
    """Check a published evaluation, if the settings have a gate; return it with what the gates compared.

    Raises:
        GateError: some gates failed; one line each. Undecided gates do not fail.
        InputError: no task has changed instructions.
    """
    if settings.gate is None:
        return replace(published, gates={"off": ["evaluate.gate=null"]})
    evaluated = results.read(place_of(published.address), "output")
    gates = list(decided(evaluated, settings.gate, settings.gates))
    if failed := [f"gate={settings.gate}: {task}: {gate}" for task, gate in gates if gate.fails]:
        raise GateError(*failed)
    say("\n  ".join([f"evaluate: {settings.gate} fails no gate", *(f"{task}: {gate}" for task, gate in gates)]))
    return replace(published, gates={"figures": {f"{task}: {gate.figure}": gate.verdict for task, gate in gates}})


@dataclass(frozen=True)
class Gate:
    """A figure that must be above its limit.

    Attributes:
        estimate: value and 95 % interval over groups of queries, in points; None without rankings, which fails.
    """

    figure: str
    estimate: IntervalEstimate | None
    limit: float

    @property
    def fails(self) -> bool:
        """Whether no part of the interval is above the limit."""
        return self.estimate is None or self.estimate.high <= self.limit

    @property
    def verdict(self) -> str:
        """Value, interval, limit, and `passes`, `fails` or, if the limit lies in the interval, `undecided`."""
        if self.estimate is None:
            return "not measured: evaluate a model, not a run"
        verdict = "fails" if self.fails else "passes" if self.estimate.low > self.limit else "undecided"
        value = f"{self.estimate.value:+.1f} [{self.estimate.low:+.1f}, {self.estimate.high:+.1f}]"
        return f"{value}, must be > {self.limit:g}: {verdict}"

    def __str__(self) -> str:
        return f"{self.figure} is {self.verdict}"


def decided(evaluated: Results, label: str, limits: GateSettings) -> Iterator[tuple[str, Gate]]:
    """Yield the gates of a model against the first model, with their task; figures without values have no gate.

    Raises:
        InputError: no task has changed instructions.
    """
    base = evaluated.obedience.get(next(iter(evaluated.models)), {})
    if not evaluated.obedience.get(label):
        raise InputError.of("gate", label, *NO_CHANGES)
    for task, own in evaluated.obedience[label].items():
        for name, terms, limit in _limits(own, base[task], limits):
            if any(condition not in model for _, model, condition, _ in terms):
                yield task, Gate(name, None, limit)
                continue
            values = [model[condition].get(figure, {}) for _, model, condition, figure in terms]
            if queries := [query for query in values[0] if all(query in of_term for of_term in values)]:
                factors = [100 * factor for factor, *_ in terms]
                points = [[sum(f * v[query] for f, v in zip(factors, values, strict=True))] for query in queries]
                groups = evaluated.tasks[task].groups
                stratum = Stratum.from_values(np.array(points), [groups.get(query, query) for query in queries])
                yield task, Gate(name, compare([stratum])[0].mean, limit)


Terms = Sequence[tuple[float, Obedience, str, str]]
"""A sum: factor, model, condition and figure."""


def _limits(own: Obedience, base: Obedience, limits: GateSettings) -> Iterator[tuple[str, Terms, float]]:
    """Yield what each gate compares: its name, the sum and the limit."""

    def gain(condition: str, figure: str, factor: float = 1.0) -> Terms:
        return [(factor, own, condition, figure), (-factor, base, condition, figure)]

    yield "p-MRR above the base's", gain(AS_GIVEN, "p-MRR"), 0.0
    for name in (GENERIC, SHUFFLED):
        share = gain(AS_GIVEN, "p-MRR", limits.foreign_share / 100)
        figure = f"{limits.foreign_share:g} % of that gain, less the gain under {name} instructions,"
        yield figure, [*share, *gain(name, "p-MRR", -1.0)], 0.0
    for figure in own[AS_GIVEN]:
        if figure == "pairs reversed":
            yield "labelled pairs reversed, above the base's,", gain(AS_GIVEN, figure), -limits.tolerance
        elif figure.endswith((" original", " changed")):
            yield f"{figure} above the base's", gain(AS_GIVEN, figure), -limits.tolerance
            moved = [*gain(PARAPHRASED, figure), *gain(AS_GIVEN, figure, -1.0)]
            yield f"{figure}, move by a paraphrase above the base's,", moved, -limits.tolerance
