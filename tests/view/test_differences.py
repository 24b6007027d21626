"""The order of queries and the ranks of their passages against the runs themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infembed_ray.errors import InputError
from infembed_ray.evaluation.metrics import p_mrr, rank_change, ranks
from infembed_ray.evaluation.rankings import DEPTH
from infembed_ray.evaluation.scoring import score
from infembed_ray.evaluation.tasks.task import Figure
from infembed_ray.storage.object_store import Folder
from infembed_ray.view.differences import PASSAGES, QUERIES, Differences, DifferencesQuery
from infembed_ray.view.server import open_view
from tests.support.object_store import upload
from tests.view.outputs import MODELS, evaluation, followir, write_evaluation

TASK, RUNS = evaluation()
SCORES = {model: score(TASK, run) for model, run in RUNS.items()}
FIGURES = [figure.name for figure in TASK.figures]


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> Differences:
    return Differences(write_evaluation(tmp_path_factory.mktemp("results"), TASK, RUNS))


def all_rows(view: Differences, asked: DifferencesQuery) -> list[dict]:
    pages = view.page(asked)["pages"]
    return [row for n in range(pages) for row in view.page(asked.model_copy(update={"page": n + 1}))["rows"]]


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("order", ["largest", "a", "b"])
def test_queries_are_sorted_by_their_difference(view: Differences, figure: str, order: str) -> None:
    asked = DifferencesQuery(figure=figure, a="three", b="one", order=order)
    a, b = SCORES["three"][figure], SCORES["one"][figure]
    better = {"largest": a.keys(), "a": {q for q in a if a[q] > b[q]}, "b": {q for q in a if b[q] > a[q]}}[order]
    rows = all_rows(view, asked)
    assert {row["key"]: (row["a"], row["b"]) for row in rows} == {q: (a[q], b[q]) for q in better}
    sizes = [abs(row["b"] - row["a"]) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    found = view.page(asked)
    assert len(found["rows"]) == min(QUERIES, len(better))
    assert found["counts"] == {
        "queries": len(a),
        "a": sum(a[q] > b[q] for q in a),
        "b": sum(b[q] > a[q] for q in a),
    }
    assert found["means"] == {
        "a": pytest.approx(sum(a.values()) / len(a)),
        "b": pytest.approx(sum(b.values()) / len(b)),
    }


def test_passages_are_the_first_of_either_ranking_and_the_relevant_ones(view: Differences) -> None:
    texts = dict(zip(TASK.corpus["id"].to_pylist(), TASK.corpus["text"].to_pylist(), strict=True))
    for row in all_rows(view, DifferencesQuery(figure="MAP@1000", a="one", b="two")):
        (query,) = row["queries"]
        assert query["query"] == row["key"]
        of = {side: ranks(RUNS[model][row["key"]]) for side, model in (("a", "one"), ("b", "two"))}
        relevant = TASK.qrels[row["key"]]
        changes = [change for change in TASK.changes if row["key"] in (change.original, change.changed)]
        changed = {passage for change in changes for passage in change.documents}
        expected = {p for p in texts if min(of["a"][p], of["b"][p]) <= PASSAGES or p in {*relevant, *changed}}
        assert {passage["id"] for passage in query["passages"]} == expected
        for passage in query["passages"]:
            name = passage["id"]
            assert (passage["text"], passage["relevance"]) == (texts[name], relevant.get(name, 0))
            assert passage["changed"] == (name in changed)
            for side in "ab":
                known = of[side][name] <= DEPTH or name in {*relevant, *changed}
                assert passage[side] == (of[side][name] if known else None)
        places = [passage["b"] or float("inf") for passage in query["passages"]]
        assert places == sorted(places)


def test_p_mrr_shows_the_original_and_the_changed_query(view: Differences) -> None:
    changed = {change.original: change.changed for change in TASK.changes}
    for row in view.page(DifferencesQuery(figure="p-MRR"))["rows"]:
        assert [query["query"] for query in row["queries"]] == [row["key"], changed[row["key"]]]
        assert all(query["passages"] for query in row["queries"])


def test_robustness_shows_all_queries_of_the_group(tmp_path: Path) -> None:
    figure = "Robustness@10"
    view = Differences(write_evaluation(tmp_path, replace(TASK, figures=(Figure(figure, figure),)), RUNS))
    for row in view.page(DifferencesQuery())["rows"]:
        expected = [query.id for query in TASK.queries if query.group == row["key"]]
        assert [query["query"] for query in row["queries"]] == expected


def test_p_mrr_of_followir_shows_both_queries_with_the_passages_that_decide_it(tmp_path: Path) -> None:
    task, runs = followir()
    view = Differences(write_evaluation(tmp_path, task, runs))
    rows = view.page(DifferencesQuery(figure="p-MRR"))["rows"]
    assert len(rows) == len(task.changes)
    for row in rows:
        (change,) = (change for change in task.changes if change.original == row["key"])
        original, changed = row["queries"]
        assert (original["query"], changed["query"]) == (change.original, change.changed)
        found = [{p["id"]: p for p in query["passages"] if p["changed"]} for query in (original, changed)]
        for side, model in (("a", "one"), ("b", "two")):
            ranked = [{name: passage[side] for name, passage in of.items()} for of in found]
            assert [set(of) for of in ranked] == [set(change.documents)] * 2
            moves = [rank_change(ranked[0][name], ranked[1][name]) for name in change.documents]
            assert row[side] == pytest.approx(p_mrr([change], runs[model])[change.original])
            assert row[side] == pytest.approx(sum(moves) / len(moves))
        assert {passage["relevance"] for passage in found[1].values()} == {0}


def test_without_a_choice_the_first_models_task_and_figure_are_compared(view: Differences) -> None:
    found = view.page(DifferencesQuery())
    assert found["chosen"] == {"task": TASK.name, "figure": FIGURES[0], "a": MODELS[0], "b": MODELS[1]}
    assert found["choices"] == {"task": [TASK.name], "figure": FIGURES, "a": list(MODELS), "b": list(MODELS)}


def test_one_model_is_compared_with_itself(tmp_path: Path) -> None:
    view = Differences(write_evaluation(tmp_path, TASK, {"one": RUNS["one"]}))
    found = view.page(DifferencesQuery())
    assert found["chosen"]["a"] == found["chosen"]["b"] == "one"
    assert found["counts"]["a"] == found["counts"]["b"] == 0
    assert found["rows"][0]["queries"][0]["passages"]


def test_an_output_without_rankings_still_shows_the_values(tmp_path: Path) -> None:
    view = Differences(write_evaluation(tmp_path, TASK, RUNS, rankings=False))
    found = view.page(DifferencesQuery(figure="MAP@1000"))
    assert not found["rankings"]
    assert len(found["rows"]) == QUERIES
    assert all(row["queries"] == [] for row in found["rows"])


@pytest.mark.parametrize("asked", [{"a": "one", "b": "one", "order": "b"}, {"page": 1000}], ids=str)
def test_a_page_without_a_query_is_empty(view: Differences, asked: dict[str, Any]) -> None:
    found = view.page(DifferencesQuery(**asked))
    assert found["rows"] == []
    assert found["counts"]["queries"] == len(SCORES["one"][FIGURES[0]])


@pytest.mark.parametrize("wrong", [{"task": "x"}, {"figure": "x"}, {"a": "x"}, {"b": "x"}])
def test_an_unknown_name_is_rejected_with_the_known_ones(view: Differences, wrong: dict[str, str]) -> None:
    with pytest.raises(InputError, match=r"=x: not in these results; choose one of \w+"):
        view.page(DifferencesQuery(**wrong))


def test_damaged_rankings_are_named(tmp_path: Path) -> None:
    write_evaluation(tmp_path, TASK, RUNS)
    (tmp_path / "queries.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="evaluate again"):
        Differences(tmp_path)


def test_an_output_in_an_object_store_is_read_in_place(tmp_path: Path, bucket: str, view: Differences) -> None:
    folder = Folder.open(f"{bucket}/{tmp_path.name}", "DIR")
    upload(write_evaluation(tmp_path / "results", TASK, RUNS), folder)
    stored = open_view(folder)
    assert isinstance(stored, Differences)
    for asked in (DifferencesQuery(), DifferencesQuery(figure=FIGURES[-1], a="three", b="one", page=2)):
        assert stored.page(asked) == view.page(asked)
