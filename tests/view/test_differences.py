"""The order of queries and the ranks of their passages against the runs themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infembed_ray.errors import InputError
from infembed_ray.evaluation.metrics import ranks
from infembed_ray.evaluation.rankings import DEPTH
from infembed_ray.evaluation.scoring import score
from infembed_ray.view.differences import PASSAGES, QUERIES, Differences, DifferencesQuery
from tests.view.outputs import MODELS, evaluation, write_evaluation

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
        expected = {p for p in texts if min(of["a"][p], of["b"][p]) <= PASSAGES or p in relevant}
        assert {passage["id"] for passage in query["passages"]} == expected
        for passage in query["passages"]:
            name = passage["id"]
            assert (passage["text"], passage["relevance"]) == (texts[name], relevant.get(name, 0))
            for side in "ab":
                known = of[side][name] <= DEPTH or name in relevant
                assert passage[side] == (of[side][name] if known else None)
        places = [passage["b"] or float("inf") for passage in query["passages"]]
        assert places == sorted(places)


def test_p_mrr_shows_all_queries_of_the_record_the_original_first(view: Differences) -> None:
    for row in view.page(DifferencesQuery(figure="p-MRR"))["rows"]:
        record = row["key"].split("/")[1]
        shown = [query["query"] for query in row["queries"]]
        assert shown[0] == row["key"]
        assert set(shown) == {query.id for query in TASK.queries if query.group == record}
        assert all(query["passages"] for query in row["queries"])


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
