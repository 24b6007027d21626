"""The gates of records: limits on the figures of their quality report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from infembed_ray.config.analysis import AnalyzeGates
from infembed_ray.errors import GateError


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
                yield f"gates.{setting}={limit:g}: {figure} is unknown; analyze the output of `infembed synthesize`"
            elif value < limit if lowest else value > limit:
                yield f"gates.{setting}={limit:g}: {figure} is {value:.4g}, must be at {'least' if lowest else 'most'} {limit:g}"


def _figures(setting: str, report: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Yield the figures that a setting limits, by name."""
    funnel = report["funnel"]
    if setting == "min_kept":
        yield "the share of seeds kept", funnel["kept"] / funnel["seeds"] if funnel["seeds"] else None
    elif setting == "min_records":
        yield "the number of records", funnel["kept"]
    elif setting == "min_judged_right":
        if not report["verdicts"]:
            yield "the judge's share of right answers", None
        for verdict in report["verdicts"]:
            share = verdict["right"] / verdict["judged"] if verdict["judged"] else None
            yield f"the judge's share of right answers, {verdict['scenario']},", share
    elif setting == "max_near_duplicates":
        for found in report["duplicates"]:
            yield f"the share of nearly equal {found['kind']} texts", found["near"] / max(1, found["distinct"])
    else:
        if not report["contaminations"]:
            yield "the share of texts in an evaluation set", None
        for found in report["contaminations"]:
            share = (found["equal"] + found["overlapping"]) / max(1, found["texts"])
            yield f"the share of {found['kind']} texts in {found['evaluation']}", share
