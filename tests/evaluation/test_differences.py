"""The report shows the queries on which models differ most, with their passages."""

import random

import pytest

from infembed_ray.evaluation.differences import PASSAGES, VALUES, keep, largest
from infembed_ray.evaluation.metrics import ranks
from infembed_ray.evaluation.paper.results_report import of_evaluation
from infembed_ray.evaluation.results import Results, TaskSummary
from infembed_ray.evaluation.tasks.infir import instruction_following
from infembed_ray.evaluation.tasks.task import score
from tests.evaluation.tasks.test_infir import record
from tests.support.pages import Page

MARKUP = "<img src=x onerror=alert(1)>"
TASK = instruction_following([record(f"{number} {MARKUP}") for number in range(15)])
PAIRS = [{change.original, change.changed} for change in TASK.changes]


def ranked(*models):
    """Return random runs of all passages by model, their results and their differences."""
    rng = random.Random(3)
    documents = TASK.corpus["id"].to_pylist()
    runs = {model: {q.id: {d: rng.random() for d in documents} for q in TASK.queries} for model in models}
    scores = {model: {TASK.name: score(TASK, run)} for model, run in runs.items()}
    results = Results({TASK.name: TaskSummary.from_task(TASK, "")}, {model: {} for model in models}, scores, depth=1000)
    return runs, results, largest(TASK, results, {model: keep(TASK, run) for model, run in runs.items()})


def spread(values):
    return max(values) - min(values)


def test_each_figure_has_its_largest_spreads_first():
    _, results, differences = ranked("one", "two", "three")
    for figure in TASK.figures:
        values = [of_model[TASK.name][figure.name] for of_model in results.scores.values()]
        spreads = sorted((spread([of_model[key] for of_model in values]) for key in values[0]), reverse=True)
        shown = [spread(d.values.values()) for d in differences if d.figure == figure.name]
        assert shown == pytest.approx([width for width in spreads if width > 0][:VALUES])


def test_a_value_shows_its_queries_and_the_first_relevant_and_deciding_passages_with_their_ranks():
    runs, results, differences = ranked("one", "two")
    texts = dict(zip(TASK.corpus["id"].to_pylist(), TASK.corpus["text"].to_pylist(), strict=True))
    decides = {query: set(c.documents) for c in TASK.changes for query in (c.original, c.changed)}
    for d in differences:
        names = {query.id for query, _ in d.queries}
        assert (names in PAIRS) if d.figure == "p-MRR" else len(names) == 1
        keys = names & results.scores["one"][TASK.name][d.figure].keys()
        assert d.values in [{m: of[TASK.name][d.figure][key] for m, of in results.scores.items()} for key in keys]
        for query, passages in d.queries:
            shown = {passage.id for passage in passages}
            assert {p.id for p in passages if p.remark == "relevant"} == TASK.qrels[query.id].keys()
            assert decides.get(query.id, set()) <= shown
            for model, run in runs.items():
                rank_of = ranks(run[query.id])
                assert set(list(rank_of)[:PASSAGES]) <= shown
                assert all(p.ranks[model] in (None, rank_of[p.id]) for p in passages)
            assert all(p.text == texts[p.id] for p in passages)


def test_the_page_shows_the_differences_and_their_markup_as_text():
    _, results, differences = ranked("one", "two")
    html = of_evaluation("runs/x", results, differences).as_html()
    page = Page(html)  # fails on an image
    assert page.text.count("records, p-MRR: one") == sum(d.figure == "p-MRR" for d in differences)
    assert page.text.count(MARKUP) > 10


def test_a_single_model_has_no_differences():
    _, results, differences = ranked("one")
    assert differences == []
    assert "Where the models differ" not in of_evaluation("runs/x", results).as_html()
