"""The report shows the queries on which models differ most, with their passages."""

from __future__ import annotations

import json
import re

import pytest

from infembed_ray.evaluation.differences import PASSAGES, QUERIES, Differences
from infembed_ray.evaluation.metrics import Run
from infembed_ray.evaluation.paper.results_report import of_evaluation
from infembed_ray.evaluation.results import Results, TaskSummary
from infembed_ray.evaluation.scoring import score
from infembed_ray.evaluation.tasks.task import Task
from tests.support.evaluation_output import MARKUP, evaluation, followir
from tests.support.pages import Page


def compared(task: Task, runs: dict[str, Run]) -> tuple[Differences, Results]:
    differences = Differences()
    for model, run in runs.items():
        differences.add(model, task, run)
    scores = {model: {task.name: score(task, run)} for model, run in runs.items()}
    return differences, Results(
        {task.name: TaskSummary.from_task(task, "")}, {model: {} for model in runs}, scores, depth=1000
    )


@pytest.fixture(scope="module", params=[evaluation, followir])
def made(request: pytest.FixtureRequest) -> tuple[Task, dict[str, Run]]:
    task, runs = request.param()
    return task, runs


def test_each_figure_has_its_largest_differences_first(made: tuple[Task, dict[str, Run]]) -> None:
    task, runs = made
    differences, results = compared(task, runs)
    largest = differences.largest([task], results)

    for figure in task.figures:
        of_models = {model: results.scores[model][task.name][figure.name] for model in runs}
        spreads = sorted(
            (
                max(v[key] for v in of_models.values()) - min(v[key] for v in of_models.values())
                for key in of_models["one"]
            ),
            reverse=True,
        )
        shown = [d for d in largest if d.figure == figure.name]
        found = [max(d.values.values()) - min(d.values.values()) for d in shown]
        assert found == [spread for spread in spreads if spread > 0][:QUERIES]
        for difference in shown:
            key = difference.queries[0][0].id if figure.measure != "p-MRR" else None
            if key is not None:
                assert difference.values == {model: values[key] for model, values in of_models.items()}


def test_a_value_of_p_mrr_shows_both_queries_and_the_passages_that_decide_it() -> None:
    task, runs = followir()
    differences, results = compared(task, runs)
    (first, *_) = [d for d in differences.largest([task], results) if d.figure == "p-MRR"]
    change = next(c for c in task.changes if c.changed == first.queries[0][0].id)

    assert {query.id for query, _ in first.queries} == {change.original, change.changed}
    for query, passages in first.queries:
        assert {p.id for p in passages if p.changed} == set(change.documents)
        for model, run in runs.items():
            ordered = sorted(run[query.id], key=lambda d: run[query.id][d], reverse=True)
            assert set(ordered[:PASSAGES]) <= {p.id for p in passages}
            for passage in passages:
                rank = passage.ranks[model]
                assert rank is None or ordered[rank - 1] == passage.id
        assert all(p.text == f"text of {p.id}" for p in passages)
        assert {p.relevance for p in passages if p.id in task.qrels[query.id]} == {1}


def test_the_page_has_every_difference_for_its_filters_and_shows_markup_as_text() -> None:
    task, runs = evaluation()
    differences, results = compared(task, runs)
    largest = differences.largest([task], results)
    html = of_evaluation("runs/x", results, largest).as_html()
    page = Page(html)

    assert "Where the models differ most" in page.text
    assert page.text.count(MARKUP) > 10
    assert "<img src=x" not in html
    cards = re.findall(
        r'<article class="difference" data-task="records" data-figure="([^"]+)" data-values="([^"]+)">', html
    )
    assert [name for name, _ in cards] == [d.figure for d in largest]
    values = [json.loads(value.replace("&#34;", '"')) for _, value in cards]
    assert values == [dict(d.values) for d in largest]
    assert html.count("<option>three</option>") == 2


def test_a_single_model_has_no_differences() -> None:
    task, runs = evaluation()
    differences, results = compared(task, {"one": runs["one"]})

    assert differences.largest([task], results) == []
    assert "Where the models differ" not in of_evaluation("runs/x", results).as_html()
