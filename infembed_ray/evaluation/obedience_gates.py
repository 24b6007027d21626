"""The gates of a release: what a model must keep, against the first model, before its p-MRR counts as obedience."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from infembed_ray.config.base import nearest
from infembed_ray.config.evaluation import EvaluateSettings, GateSettings
from infembed_ray.errors import GateError, InputError
from infembed_ray.evaluation import results
from infembed_ray.evaluation.obedience import AS_GIVEN, GENERIC, PARAPHRASED, SHUFFLED
from infembed_ray.evaluation.results import Results
from infembed_ray.progress import say
from infembed_ray.storage.places import place_of
from infembed_ray.storage.steps import Published

Means = Mapping[str, Mapping[str, float | None]]
"""Condition -> figure -> mean."""


def check(settings: EvaluateSettings) -> None:
    """Check before any work that the gate can be decided; InputError if not."""
    gate, labels = settings.gate, list(settings.models)
    if gate is None:
        return
    if gate not in labels[1:]:
        why = "is the base itself" if gate in labels else f"is not a label of models; {nearest(gate, labels)}"
        raise InputError.of("gate", gate, why, "give the label of a later model than the first, its base")
    if not settings.controls:
        raise InputError.of("gate", gate, "needs the controls", "leave controls unset")


def require(settings: EvaluateSettings, published: Published) -> None:
    """Check a published evaluation, if the settings have a gate.

    Raises:
        GateError: some gates failed; one line each.
        InputError: no task has changed instructions.
    """
    if settings.gate is None:
        return
    evaluated = results.read(place_of(published.address), "output")
    if failed := list(failures(evaluated, settings.gate, settings.gates)):
        raise GateError(*failed)
    say(f"evaluate: {settings.gate} passes all gates")


def failures(evaluated: Results, label: str, limits: GateSettings) -> Iterator[str]:
    """Yield a line for each gate that a model fails: task, figure, value and limit.

    Raises:
        InputError: no task has changed instructions.
    """
    means, base = evaluated.obedience_means, next(iter(evaluated.models))
    if not means.get(label):
        raise InputError.of("gate", label, "no task has changed instructions", "evaluate InF-IR records or FollowIR")
    for task, own in means[label].items():
        for condition in (GENERIC, SHUFFLED, PARAPHRASED):
            if condition not in own:
                yield f"gate={label}: {task}: has no rankings under {condition} instructions; evaluate a model, not a run"
        for figure, value, sign, limit in _limits(own, means[base][task], limits):
            if not (value > limit if sign == ">" else value >= limit if sign == ">=" else abs(value) <= limit):
                yield f"gate={label}: {task}: {figure} is {value:+.1f}, must be {sign} {limit:g}"


def _limits(own: Means, base: Means, limits: GateSettings) -> Iterator[tuple[str, float, str, float]]:
    """Yield figure, value in points, `>`, `>=` or `within +-`, and limit; figures without values have no gate."""

    def gain(condition: str, figure: str, other: Means = base, reference: str | None = None) -> float | None:
        one, two = own.get(condition, {}).get(figure), other.get(reference or condition, {}).get(figure)
        return None if one is None or two is None else 100 * (one - two)

    share = own[AS_GIVEN].get("pairs reversed")
    every = [("p-MRR above the base's", gain(AS_GIVEN, "p-MRR"), ">", 0.0)]
    for condition in (GENERIC, SHUFFLED):
        name = f"p-MRR above the base's, {condition} instructions,"
        every.append((name, gain(condition, "p-MRR"), "within +-", limits.tolerance))
    reversed_by_inverse = None if share is None else 100 * share
    every.append(("labelled pairs reversed by the inverse", reversed_by_inverse, ">=", limits.pairs_reversed))
    for figure in [figure for figure in own[AS_GIVEN] if figure.endswith((" original", " changed"))]:
        moved = gain(PARAPHRASED, figure, own, AS_GIVEN)
        every.append((f"{figure} above the base's", gain(AS_GIVEN, figure), ">=", -limits.tolerance))
        every.append((f"{figure}, change by a paraphrase,", moved, "within +-", limits.tolerance))
    yield from ((figure, value, sign, limit) for figure, value, sign, limit in every if value is not None)
