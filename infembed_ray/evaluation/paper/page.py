"""The evaluation report as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from infembed_ray.evaluation import tables
from infembed_ray.evaluation.paper import published
from infembed_ray.evaluation.paper.collection import Collection
from infembed_ray.evaluation.paper.figures import Chart, Panel
from infembed_ray.evaluation.paper.sheets import Sheet
from infembed_ray.evaluation.results import conventions_of
from infembed_ray.evaluation.tasks import infir
from infembed_ray.reporting import page


def render(
    outputs: Mapping[str, str],
    collection: Collection,
    ours: Sequence[Sheet],
    papers: Sequence[Sheet],
    charts: Sequence[Chart],
    panels: Sequence[Panel],
) -> str:
    """Render the report; equal arguments give equal HTML.

    Args:
        outputs: label -> path of each evaluated output.
        collection: its results.
        ours: our tables.
        papers: the paper's tables, with our rows.
        charts: Figure 5.
        panels: Figure 6.
    """
    scores = collection.results.scores.values()
    return page.render(
        "infembed_ray.evaluation.paper",
        "page.html",
        outputs=outputs,
        collection=collection,
        ours=ours,
        papers=papers,
        bar_charts=charts,
        panels=panels,
        runs=sum(len(model.runs) for model in collection.models.values()),
        values=sum(len(v) for of_model in scores for of_task in of_model.values() for v in of_task.values()),
        spread=any(len(model.runs) > 1 for model in collection.models.values()),
        baselines=baselines(collection),
        mark=tables.MARK,
        note=tables.note(baselines(collection)),
        conventions=conventions_of(collection.results.measures),
        notation={
            mark: meaning
            for mark, meaning in infir.MEANINGS.items()
            if any(figure.name.endswith(mark) for task in collection.results.tasks.values() for figure in task.figures)
        },
        source=published.SOURCE,
        spans=lambda sheet: [(over, len(list(same))) for over, same in groupby(sheet.columns, key=lambda c: c[0])],
    )


def baselines(collection: Collection) -> str | None:
    """Name the baseline of the differences, in words; None without differences."""
    compared = [model for key, model in collection.models.items() if model.baseline != key]
    named = list(dict.fromkeys(model.baseline for model in compared))
    if not named:
        return None
    return repr(named[0]) if len(named) == 1 else "the first model of the same output, of a sweep its backbone as it is"
