"""The published rankings against the runs themselves."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infembed_ray.evaluation.metrics import Change
from infembed_ray.evaluation.rankings import DEPTH, PASSAGE_CHARACTERS, PASSAGES_FILE, Rankings
from infembed_ray.evaluation.tasks.task import CORPUS, Figure, Query, Task

CORPUS_SIZE = 300
RELEVANT = {f"d{i}": i % 3 for i in range(0, CORPUS_SIZE, 2)}
TASK = Task(
    name="t",
    corpus=pa.table({"id": [f"d{i}" for i in range(CORPUS_SIZE)], "text": ["w" * 3000] * CORPUS_SIZE}, schema=CORPUS),
    queries=(Query("q1", "first", "do this", "og", "g"), Query("q2", "second"), Query("q3", "without a ranking")),
    qrels={"q1": RELEVANT, "q2": {"d5": 2}, "q3": {"d1": 1}},
    figures=(Figure("nDCG@10", "nDCG@10"),),
    changes=(Change("q1", "q2", ("d2", "d31", "d299")),),
)
RUN = {"q1": {f"d{i}": float(i) for i in range(CORPUS_SIZE)}, "q2": {f"d{i}": -float(i % 7) for i in range(40)}}


def published(directory: Path) -> dict[str, list[dict]]:
    with Rankings(directory) as rankings:
        rankings.add("m", TASK, RUN)
        rankings.finish([TASK])
    return {
        name: pq.read_table(directory / f"{name}.parquet").to_pylist() for name in ("queries", "rankings", "passages")
    }


def test_a_ranking_has_its_first_passages_its_first_relevant_ones_and_those_of_a_change(tmp_path: Path) -> None:
    rows = published(tmp_path)["rankings"]
    for query, scores in RUN.items():
        ordered = sorted(scores, key=lambda document: (scores[document], document), reverse=True)
        judged = TASK.qrels[query]
        changed = TASK.changes[0].documents
        wanted = {*ordered[:DEPTH], *[d for d in ordered if judged.get(d, 0) > 0][:DEPTH], *changed}
        expected = [(d, rank, judged.get(d, 0), d in changed) for rank, d in enumerate(ordered, 1) if d in wanted]
        found = [row for row in rows if row["query"] == query]
        assert [(row["passage"], row["rank"], row["relevance"], row["changed"]) for row in found] == expected
        assert {(row["model"], row["task"]) for row in found} == {("m", "t")}
    assert {row["query"] for row in rows} == set(RUN)


def test_queries_and_the_beginnings_of_the_ranked_passages_are_published(tmp_path: Path) -> None:
    found = published(tmp_path)
    assert found["queries"][0] == {
        "task": "t",
        "query": "q1",
        "text": "first",
        "instruction": "do this",
        "kind": "og",
        "group": "g",
        "original": None,
    }
    assert found["queries"][1]["original"] == "q1"
    assert [row["query"] for row in found["queries"]] == ["q1", "q2", "q3"]
    assert {row["passage"] for row in found["passages"]} == {row["passage"] for row in found["rankings"]}
    assert {row["text"] for row in found["passages"]} == {"w" * PASSAGE_CHARACTERS}


def test_passages_are_written_in_row_groups_with_every_passage_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = published(tmp_path)["passages"]
    monkeypatch.setattr("infembed_ray.evaluation.rankings._ROW_GROUP", 7)
    assert published(tmp_path)["passages"] == whole
    metadata = pq.read_metadata(tmp_path / PASSAGES_FILE)
    sizes = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
    assert set(sizes[:-1]) == {7}
    assert 0 < sizes[-1] <= 7
