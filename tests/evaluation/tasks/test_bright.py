"""BRIGHT is read from its layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks import catalogue
from tests.evaluation import published
from tests.evaluation.published import edit


def test_bright_excludes_the_named_documents_and_none_for_n_a(tmp_path: Path) -> None:
    root = str(published.bright_like(tmp_path))

    with_none, with_some = catalogue.load("bright/biology", root), catalogue.load("bright/leetcode", root)

    assert with_none.excluded == {}
    assert with_some.excluded["0"] == {"coffee_and_sleep/leetcode_18.txt"}
    assert set(with_some.qrels["0"].values()) == {1}
    assert with_some.queries[0].instruction is None


def test_a_document_that_is_excluded_and_relevant_is_rejected(tmp_path: Path) -> None:
    root = published.bright_like(tmp_path)
    edit(
        root / published.BRIGHT / "examples" / "leetcode-00000-of-00001.parquet",
        lambda rows: [row | {"excluded_ids": row["gold_ids"][:1]} for row in rows],
    )

    with pytest.raises(InputError, match=r"query 0 excludes relevant document coffee_and_sleep/leetcode_0.txt"):
        catalogue.load("bright/leetcode", str(root))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: {k: v for k, v in row.items() if k != "excluded_ids"}, "excluded_ids is missing or null"),
        (lambda row: row | {"excluded_ids": row["excluded_ids"][0]}, "excluded_ids holds 'coffee.*; give a list"),
        (lambda row: row | {"gold_ids": row["gold_ids"][0]}, "gold_ids holds 'coffee.*; give a list"),
    ],
)
def test_examples_with_malformed_exclusions_are_rejected(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    root = published.bright_like(tmp_path)
    edit(
        root / published.BRIGHT / "examples" / "leetcode-00000-of-00001.parquet",
        lambda rows: [change(row) for row in rows],
    )

    with pytest.raises(InputError, match=f"tasks=bright/leetcode: .*row 1: column {message}"):
        catalogue.load("bright/leetcode", str(root))
