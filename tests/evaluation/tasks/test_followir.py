"""FollowIR is read from its layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks import catalogue
from tests.evaluation import published
from tests.evaluation.published import DOCUMENTS, edit, texts


def test_followir_ranks_candidates_under_two_instructions(tmp_path: Path) -> None:
    task = catalogue.load("followir/core17", str(published.followir_like(tmp_path)))

    first, second = task.queries[:2]
    assert (first.id, first.kind, second.id, second.kind) == ("312-og", "og", "312-changed", "changed")
    assert first.query == second.query
    assert "were written after 2000" in (second.instruction or "")
    assert "were written after 2000" not in (first.instruction or "")
    assert task.candidates is not None
    assert len(task.candidates["312-og"]) == 48
    assert texts(task)[task.candidates["312-og"][0]] == f"{DOCUMENTS[0].title} {DOCUMENTS[0].text}"
    assert [(figure.measure, figure.kind) for figure in task.figures] == [("p-MRR", None), ("MAP@1000", "og")]
    assert len(task.changes) == 6
    change = task.changes[0]
    assert (change.original, change.changed) == ("312-og", "312-changed")
    for document in change.documents:
        assert task.qrels["312-og"][document] > 0
        assert task.qrels["312-changed"][document] == 0


def test_news21_reports_ndcg_at_5(tmp_path: Path) -> None:
    task = catalogue.load("followir/news21", str(published.followir_like(tmp_path)))

    assert [figure.name for figure in task.figures] == ["p-MRR", "nDCG@5"]


FOLLOWIR_FAULTS = {
    "a query without candidates": ("top_ranked/top_ranked", lambda rows: rows[1:], "query 312-og without candidates"),
    "empty candidates": (
        "top_ranked/top_ranked",
        lambda rows: [rows[1] | {"query-id": "312-og", "corpus-ids": []}, *rows[1:]],
        "query 312-og without candidates",
    ),
    "unknown candidates": (
        "top_ranked/top_ranked",
        lambda rows: [rows[0] | {"corpus-ids": ["none"]}, *rows[1:]],
        "candidates name document none, not in the corpus",
    ),
    "a document for the list of candidates": (
        "top_ranked/top_ranked",
        lambda rows: [r | {"corpus-ids": r["corpus-ids"][0]} for r in rows],
        "row 1: column corpus-ids holds '1000000_0'; give a list",
    ),
    "two lists of candidates": (
        "top_ranked/top_ranked",
        lambda rows: [*rows, rows[0] | {"corpus-ids": rows[0]["corpus-ids"][:1]}],
        "query 312-og has two rows in `top_ranked`",
    ),
    "two instructions": (
        "instruction/instruction",
        lambda rows: [*rows, rows[0] | {"instruction": "another"}],
        "query 312-og has two rows in `instruction`",
    ),
    "two lists of changes": (
        "qrel_diff/qrel_diff",
        lambda rows: [*rows, rows[0] | {"corpus-ids": []}],
        "query 312 has two rows in `qrel_diff`",
    ),
    "a query without judgements": (
        "data/test",
        lambda rows: [r for r in rows if r["query-id"] != "312-og"],
        "query 312-og without judgements",
    ),
    "unknown changes": (
        "qrel_diff/qrel_diff",
        lambda rows: [rows[0] | {"corpus-ids": ["none"]}],
        "changed judgements name document none",
    ),
    "changes of no query": (
        "qrel_diff/qrel_diff",
        lambda rows: [rows[0] | {"query-id": "9"}],
        "need query 9-og and 1 other, not in queries",
    ),
    "a query without instruction": (
        "instruction/instruction",
        lambda rows: rows[1:],
        "query 312-og has no row in `instruction`",
    ),
    "no score": (
        "data/test",
        lambda rows: [{k: v for k, v in r.items() if k != "score"} for r in rows],
        "column score is missing",
    ),
}


@pytest.mark.parametrize("fault", FOLLOWIR_FAULTS)
def test_a_faulty_followir_is_rejected(tmp_path: Path, fault: str) -> None:
    file, change, message = FOLLOWIR_FAULTS[fault]
    root = published.followir_like(tmp_path)
    edit(root / published.FOLLOWIR["core17"] / f"{file}-00000-of-00001.parquet", change)

    with pytest.raises(InputError, match=f"tasks=followir/core17: .*{message}"):
        catalogue.load("followir/core17", str(root))


def test_a_query_under_neither_instruction_is_rejected(tmp_path: Path) -> None:
    root = published.followir_like(tmp_path)
    for file, key in (("queries/queries", "_id"), ("instruction/instruction", "query-id")):
        edit(
            root / published.FOLLOWIR["core17"] / f"{file}-00000-of-00001.parquet",
            lambda rows, key=key: [*rows, rows[0] | {key: "312-reversed"}],
        )

    with pytest.raises(InputError, match="query 312-reversed ends neither in -og nor in -changed"):
        catalogue.load("followir/core17", str(root))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    root = published.followir_like(tmp_path)
    file = root / published.FOLLOWIR["core17"] / "corpus" / "corpus-00000-of-00001.parquet"
    file.write_bytes(file.read_bytes()[:100])

    with pytest.raises(InputError, match=rf"tasks=followir/core17: file={file}: not readable as Parquet"):
        catalogue.load("followir/core17", str(root))
