"""mteb's layout and InstructIR, which is published in it."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from infembed_ray.evaluation.tasks import catalogue
from tests.evaluation import published
from tests.evaluation.published import edit


def test_instructir_queries_of_one_text_are_a_group(tmp_path: Path) -> None:
    task = catalogue.load("instructir", str(published.instructir_like(tmp_path)))

    assert {query.group for query in task.queries} == {str(1_078_446 + topic) for topic in range(6)}
    assert len({query.instruction for query in task.queries}) == len(task.queries)
    assert [figure.name for figure in task.figures] == ["Robustness@10", "nDCG@10"]


def test_instructions_may_be_a_column_of_queries_and_ids_may_be_called_id(tmp_path: Path) -> None:
    """The form that mteb's own upload writes."""
    root = published.instructir_like(tmp_path)
    expected = catalogue.load("instructir", str(root))
    repository = root / published.INSTRUCTIR
    written = pq.read_table(repository / "instruction" / "instruction-00000-of-00001.parquet").to_pylist()
    instructions = {row["query-id"]: row["instruction"] for row in written}
    edit(
        repository / "queries" / "queries-00000-of-00001.parquet",
        lambda rows: [{"id": r["_id"], "text": r["text"], "instruction": instructions[r["_id"]]} for r in rows],
    )
    card = (repository / "README.md").read_text(encoding="utf-8")
    (repository / "README.md").write_text(
        card.replace("config_name: instruction", "config_name: other"), encoding="utf-8"
    )

    assert catalogue.load("instructir", str(root)).queries == expected.queries
