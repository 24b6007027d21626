"""The report as one HTML file that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from jinja2 import Environment, PackageLoader

from infembed_ray.evaluation import tables
from infembed_ray.evaluation.report import figures, paper
from infembed_ray.evaluation.report.collection import Collection
from infembed_ray.evaluation.report.figures import Chart, Panel
from infembed_ray.evaluation.report.sheets import Sheet
from infembed_ray.evaluation.results import conventions_of


def render(
    outputs: Mapping[str, str],
    collection: Collection,
    ours: Sequence[Sheet],
    papers: Sequence[Sheet],
    charts: Sequence[Chart],
    panels: Sequence[Panel],
) -> str:
    """The page. The same arguments give the same page; `outputs` is label -> where it lies."""
    environment = Environment(loader=PackageLoader("infembed_ray.evaluation.report", "."), autoescape=True)
    scores = collection.results.scores.values()
    return environment.get_template("page.html").render(
        outputs=outputs,
        collection=collection,
        ours=ours,
        papers=papers,
        charts=charts,
        panels=panels,
        runs=sum(len(model.runs) for model in collection.models.values()),
        values=sum(len(v) for of_model in scores for of_task in of_model.values() for v in of_task.values()),
        spread=any(len(model.runs) > 1 for model in collection.models.values()),
        baselines=baselines(collection),
        mark=tables.MARK,
        note=tables.note(baselines(collection)),
        conventions=conventions_of(collection.results.measures),
        source=paper.SOURCE,
        spans=lambda sheet: [(over, len(list(same))) for over, same in groupby(sheet.columns, key=lambda c: c[0])],
        width=figures.WIDTH,
        height=figures.HEIGHT,
        left=figures.LEFT,
        right=figures.WIDTH - figures.RIGHT,
        bottom=figures.HEIGHT - figures.BOTTOM,
    )


def baselines(collection: Collection) -> str | None:
    """What differences are to, in words; None where there are none."""
    compared = [model for key, model in collection.models.items() if model.baseline != key]
    named = list(dict.fromkeys(model.baseline for model in compared))
    if not named:
        return None
    return repr(named[0]) if len(named) == 1 else "the first model of the same output, of a sweep its backbone as it is"
