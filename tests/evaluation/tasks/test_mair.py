"""MAIR is read from its layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import bm25s
import pytest
import pytrec_eval

from infembed_ray.errors import InputError
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.evaluation.scoring import means, score
from infembed_ray.evaluation.tasks import catalogue, layouts
from infembed_ray.evaluation.tasks.checks import checked
from infembed_ray.evaluation.tasks.repository import Repository
from tests.evaluation import published
from tests.evaluation.published import DOCUMENTS, edit, texts


def test_mair_grades_documents(tmp_path: Path) -> None:
    task = catalogue.load("mair/fr-21", str(published.mair_like(tmp_path)))

    assert task.candidates is None
    assert {score for judged in task.qrels.values() for score in judged.values()} == {1, 2}
    assert task.queries[1].query == "electric buses"
    assert (task.queries[1].instruction or "").startswith("You search an archive.")


def test_parts_of_a_mair_task_are_searched_separately(tmp_path: Path) -> None:
    root = published.mair_like(tmp_path)
    repositories = [
        Repository(root / name, name, "mair/Twofold") for name in (published.MAIR_QUERIES, published.MAIR_DOCS)
    ]

    task = checked(layouts.read_mair(*repositories, "Twofold"))

    assert len(task.queries) == 12
    assert len(task.corpus) == len(DOCUMENTS)
    assert task.candidates is not None
    for query in task.queries:
        part = query.id.partition("/")[0]
        assert part in ("norway", "chile")
        assert len(task.candidates[query.id]) == len(DOCUMENTS) // 2
        assert all(part.capitalize() in texts(task)[document] for document in task.candidates[query.id])
        assert set(task.qrels[query.id]) <= set(task.candidates[query.id])


@pytest.mark.parametrize("label", ["d7", {"id": "d7"}, {"score": 1}])
def test_a_label_without_id_or_score_is_rejected(tmp_path: Path, label: object) -> None:
    root = published.mair_like(tmp_path)
    edit(
        root / published.MAIR_QUERIES / "DD_2015" / "queries.jsonl",
        lambda rows: [rows[0] | {"labels": [label]}, *rows[1:]],
    )

    with pytest.raises(InputError, match=r"tasks=mair/dd-15: query DD_2015-0 has the label .*; a label has an id and"):
        catalogue.load("mair/dd-15", str(root))


def by_mairs_script(qrels: dict[str, dict[str, int]], run: dict[str, dict[str, float]]) -> float:
    """Follow trec_eval() of MAIR's mair.py: nDCG@10 of one split, rounded to five decimals."""
    scores = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10"}).evaluate(run)
    return round(sum(values["ndcg_cut_10"] for values in scores.values()) / len(scores), 5)


def rows_of(root: Path, repository: str, file: str) -> list[dict[str, Any]]:
    with (root / repository / file).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_bm25_scores_as_in_mairs_script(tmp_path: Path) -> None:
    root = published.mair_like(tmp_path)
    rows = rows_of(root, published.MAIR_QUERIES, "DD_2015/queries.jsonl")
    docs = rows_of(root, published.MAIR_DOCS, "DD_2015/docs.jsonl")
    theirs = bm25s.BM25()  # eval_bm25() of mair.py
    theirs.index(bm25s.tokenize([d["doc"] for d in docs], stopwords="en", show_progress=False), show_progress=False)
    expected = {}
    for row in rows:
        terms = bm25s.tokenize(row["instruction"] + " " + row["query"], show_progress=False)
        hits, scores = theirs.retrieve(terms, corpus=[d["id"] for d in docs], k=100, show_progress=False)
        expected[row["qid"]] = dict(zip(hits[0].tolist(), map(float, scores[0]), strict=True))
    qrels = {row["qid"]: {label["id"]: int(label["score"]) for label in row["labels"]} for row in rows}

    as_mair = {"kind": "bm25", "instructed_query": "{instruction} {query}", "plain_query": "{query}"}
    bm25 = baselines.load(baselines.resolve("BM25", as_mair | {"bm25": {"stemmer": None}}))
    task = catalogue.load("mair/dd-15", str(root))
    found = means(score(task, bm25.rank(task, 100)))["nDCG@10"]

    assert found == pytest.approx(by_mairs_script(qrels, expected), abs=1e-5)
    assert 0.1 < found < 1


def test_a_given_run_of_a_task_with_parts_scores_as_in_mairs_script(tmp_path: Path) -> None:
    """MAIR's script weighs the splits of a task by their queries; the first has one query less here."""
    root = published.mair_like(tmp_path)
    edit(root / published.MAIR_QUERIES / "Twofold" / "norway_queries.jsonl", lambda rows: rows[1:])
    repositories = [
        Repository(root / name, name, "mair/Twofold") for name in (published.MAIR_QUERIES, published.MAIR_DOCS)
    ]
    task = checked(layouts.read_mair(*repositories, "Twofold"))
    weighted, lines = [], []
    for part in ("norway", "chile"):
        rows = rows_of(root, published.MAIR_QUERIES, f"Twofold/{part}_queries.jsonl")
        docs = rows_of(root, published.MAIR_DOCS, f"Twofold/{part}_docs.jsonl")
        run = {row["qid"]: {d["id"]: crc32((row["qid"] + d["id"]).encode()) / 2**32 for d in docs} for row in rows}
        qrels = {row["qid"]: {label["id"]: int(label["score"]) for label in row["labels"]} for row in rows}
        weighted.append((by_mairs_script(qrels, run), len(rows)))
        lines += [f"{part}/{q} Q0 {part}/{d} 0 {s} theirs\n" for q, own in run.items() for d, s in own.items()]
    (tmp_path / "theirs.run").write_text("".join(lines))
    given = baselines.load(baselines.resolve("theirs", {"kind": "run", "runs": [str(tmp_path / "theirs.run")]}))

    found = means(score(task, given.rank(task, 100)))["nDCG@10"]

    (norway, few), (chile, many) = weighted
    assert (few, many) == (5, 6)
    assert found == pytest.approx((norway * few + chile * many) / (few + many), abs=1e-5)
    assert abs(norway - chile) > 0.01
