"""Your own data set is a task if it is consistent."""

from __future__ import annotations

from pathlib import Path

import pytest

from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks import catalogue
from tests.evaluation import published
from tests.evaluation.published import DOCUMENTS, edit, texts


def test_your_own_directory_is_a_task(tmp_path: Path) -> None:
    name = str(published.beir_like(tmp_path))

    task, dev = catalogue.load(name), catalogue.load(f"{name}/qrels/dev.tsv")

    assert task.name == name
    assert [query.id for query in task.queries] == ["q0", "q1", "q2", "q3"]
    assert [query.instruction for query in task.queries[:2]] == ["Only official reports count.", None]
    assert [query.id for query in dev.queries] == ["q4", "q5"]
    assert texts(task)["0"] == f"{DOCUMENTS[0].title} {DOCUMENTS[0].text}"
    assert task.qrels["q0"]["0"] == 2
    assert task.corpus.equals(dev.corpus)


BEIR_FAULTS = {
    "a document twice": (
        "corpus.jsonl",
        lambda rows: [*rows, rows[0] | {"text": "other"}],
        "two documents have the id 0",
    ),
    "no text": (
        "corpus.jsonl",
        lambda rows: [{"_id": r["_id"], "body": "x"} for r in rows],
        "row 1: column text is missing or null .found: _id, body",
    ),
    "no documents": ("corpus.jsonl", lambda rows: [], "the corpus is empty"),
    "an empty relevant document": (
        "corpus.jsonl",
        lambda rows: [rows[0] | {"title": "", "text": " "}, *rows[1:]],
        "relevant document 0 without text",
    ),
    "a judged document is gone": (
        "corpus.jsonl",
        lambda rows: rows[2:],
        "qrels name document 0 and 1 other, not in the corpus",
    ),
    "a text that is a list": (
        "queries.jsonl",
        lambda rows: [rows[0] | {"text": ["a", "b"]}, *rows[1:]],
        r"row 1: column text holds \['a', 'b'\]; give a single value",
    ),
    "an instruction that is a list": (
        "queries.jsonl",
        lambda rows: [rows[0] | {"instruction": ["only", "reports"]}, *rows[1:]],
        r"query q0 has the instruction \['only', 'reports'\]; write it as text",
    ),
    "a query twice": ("queries.jsonl", lambda rows: [*rows, rows[0]], "two queries have the id q0"),
    "an empty query": ("queries.jsonl", lambda rows: [rows[0] | {"text": " "}, *rows[1:]], "query q0 is empty"),
    "a judged query is gone": ("queries.jsonl", lambda rows: rows[1:], "qrels name query q0, not in queries"),
}


@pytest.mark.parametrize("fault", BEIR_FAULTS)
def test_a_faulty_directory_is_rejected(tmp_path: Path, fault: str) -> None:
    file, change, message = BEIR_FAULTS[fault]
    name = str(published.beir_like(tmp_path))
    edit(tmp_path / file, change)

    with pytest.raises(InputError, match=f"tasks={name}: .*{message}") as error:
        catalogue.load(name)

    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("q0\t0\t3", "document 0 of query q0 has two scores"),
        ("q0\t5\tyes", "document 5 of query q0 has the score yes; scores are whole numbers"),
        ("q0\t5\t0.5", "has the score 0.5"),
        ("q0\t5\tnan", "has the score nan"),
        ("q0\t5\t2000000000", "has the score 2000000000; scores are whole numbers up to 1,000,000"),
        ("q0\t5", "another number of fields than the header"),
    ],
)
def test_a_faulty_judgement_is_rejected(tmp_path: Path, line: str, message: str) -> None:
    name = str(published.beir_like(tmp_path))
    with (tmp_path / "qrels" / "test.tsv").open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")

    with pytest.raises(InputError, match=message):
        catalogue.load(name)


def test_judgements_without_a_header_are_rejected(tmp_path: Path) -> None:
    name = str(published.beir_like(tmp_path))
    (tmp_path / "qrels" / "test.tsv").write_text("q0\t0\t1\nq0\t1\t1\n", encoding="utf-8")

    with pytest.raises(InputError, match="column query-id is missing"):
        catalogue.load(name)


def test_a_directory_without_its_files_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"no corpus\.jsonl in .*with corpus\.jsonl, queries\.jsonl and qrels/test\.tsv"
    ):
        catalogue.load(str(tmp_path))
