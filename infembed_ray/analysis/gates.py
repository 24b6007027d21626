"""The gates of records: limits on the figures of their quality report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from infembed_ray.config.analysis import AnalyzeGates
from infembed_ray.errors import GateError

_ROUNDING = 1e-9
"""A figure that equals its minimum may be rounded down."""
_SYNTHESIS = "analyze the output of `infembed synthesize`"
_REMEDY = {"max_contaminated": "set evaluations", "min_kappa": "set agreement.raters"}


def require(gates: AnalyzeGates, report: str) -> None:
    """Check a quality report.

    Args:
        gates: the limits.
        report: content of its `report.json`.

    Raises:
        GateError: some limits are not kept; one line each.
    """
    failed = list(failures(gates, json.loads(report)))
    if failed:
        raise GateError(*failed)


def failures(gates: AnalyzeGates, report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each limit that is not kept: setting, figure and its value. A figure without a value fails too."""
    for setting, limit in gates:
        if limit is None:
            continue
        lowest = setting.startswith("min_")
        for figure, value in _figures(setting, report):
            if value is None:
                yield f"gates.{setting}={limit:g}: {figure} is unknown; {_REMEDY.get(setting, _SYNTHESIS)}"
            elif value < limit - _ROUNDING if lowest else value > limit:
                yield f"gates.{setting}={limit:g}: {figure} is {value:.4g}, must be at {'least' if lowest else 'most'} {limit:g}"


def _figures(setting: str, report: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Yield the figures that a setting limits, by name."""
    funnel = report["funnel"]
    if setting == "min_kept":
        yield "the share of seeds kept", funnel["kept"] / funnel["seeds"] if funnel["seeds"] else None
    elif setting == "min_judged_right":
        if not report["verdicts"]:
            yield "the judge's share of right answers", None
        for verdict in report["verdicts"]:
            share = verdict["right"] / verdict["judged"] if verdict["judged"] else None
            yield f"the judge's share of right answers, {verdict['scenario']},", share
    elif setting == "max_near_duplicates":
        for duplicates in report["duplicates"]:
            share = duplicates["near"] / max(1, duplicates["distinct"])
            yield f"the share of nearly equal {duplicates['kind']} texts", share
    elif setting == "min_kappa":
        raters = report["agreement"]["llm_raters"] if report["agreement"] else []
        if not raters:
            yield "the mean kappa of an LLM rater", None
        for rater in raters:
            yield f"the mean kappa of {rater['rater']}", rater["kappa"]["value"]
    else:
        if not report["contaminations"]:
            yield "the share of texts in an evaluation set", None
        for matches in report["contaminations"]:
            share = matches["matching"] / max(1, matches["texts"])
            yield f"the share of {matches['kind']} texts in {matches['evaluation']}", share
