"""MAIR is read from its layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks import catalogue, mair
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
    repositories = [Repository(root, name, "mair/Twofold") for name in (published.MAIR_QUERIES, published.MAIR_DOCS)]

    task = checked(mair.read(*repositories, "Twofold"))

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
