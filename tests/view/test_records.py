"""Pages, searches and counts against loops over the rows in plain Python."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from infembed_ray.errors import InputError
from infembed_ray.records.tables import KEPT_FILE, REJECTED_FILE
from infembed_ray.storage.object_store import Folder
from infembed_ray.view.records import CHOICES, ROWS, Records, RecordsQuery
from infembed_ray.view.server import open_view
from tests.support.object_store import upload
from tests.view.outputs import synthesis_rows, write_synthesis

ROWS_OF = synthesis_rows()
ALL = [{"kind": kind, **row} for kind, rows in ROWS_OF.items() for row in rows]


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return Records(write_synthesis(tmp_path_factory.mktemp("records"), ROWS_OF))


def value_of(row: dict[str, Any], name: str) -> str | None:
    return row.get("error", row.get("reason")) if name == "reason" else row.get(name)


def matching(q: str = "", **filters: str) -> list[dict[str, Any]]:
    def contains(row: dict[str, Any], word: str) -> bool:
        return any(isinstance(v, str) and word in v.lower() for name, v in row.items() if name != "kind")

    return [
        row
        for row in ALL
        if all(contains(row, word) for word in q.lower().split())
        and all(value_of(row, name) == value for name, value in filters.items())
    ]


CONDITIONS: list[dict[str, str]] = [
    {},
    {"q": "ASPIRIN"},
    {"q": "aspirin CAFÉ"},
    {"q": "a+b"},
    {"q": "50% naïve sleep"},
    {"q": "row/4"},
    {"q": "nowhere"},
    {"kind": "rejected"},
    {"kind": "dead letter", "q": "http"},
    {"topic": "tea", "source": "leetcode"},
    {"reason": "the judge picked none", "q": "x"},
    {"step": "query_negative", "kind": "kept"},
    {"source": "unheard of"},
]


@pytest.mark.parametrize("conditions", CONDITIONS, ids=str)
def test_every_page_has_the_rows_that_match_in_the_order_of_the_files(
    view: Records, conditions: dict[str, str]
) -> None:
    expected = [row["id"] for row in matching(**conditions)]
    first = view.page(RecordsQuery(**conditions))
    assert (first["total"], first["matching"], first["pages"]) == (len(ALL), len(expected), -(-len(expected) // ROWS))
    pages = [view.page(RecordsQuery(**conditions, page=n + 1))["rows"] for n in range(first["pages"])]
    assert [row["id"] for page in pages for row in page] == expected
    assert all(len(page) == ROWS for page in pages[:-1])


@pytest.mark.parametrize("conditions", CONDITIONS, ids=str)
def test_a_filter_counts_the_rows_that_its_other_values_would_give(view: Records, conditions: dict[str, str]) -> None:
    for name, found in view.page(RecordsQuery(**conditions))["filters"].items():
        others = matching(**{key: value for key, value in conditions.items() if key != name})
        expected = Counter(value_of(row, name) for row in others) - Counter({None: len(ALL)})
        assert {one["value"]: one["count"] for one in found} == expected, name
        assert [one["count"] for one in found] == sorted(expected.values(), reverse=True)


def test_a_chosen_value_is_counted_even_if_many_others_are_more_frequent(tmp_path: Path) -> None:
    rows = synthesis_rows(2 * CHOICES + 1, 0, 0)
    for number, row in enumerate(rows["kept"]):
        row["topic"] = f"topic {number // 2}"
    view = Records(write_synthesis(tmp_path, rows))
    rare = f"topic {CHOICES}"
    assert rare not in [one["value"] for one in view.page(RecordsQuery())["filters"]["topic"]]
    found = view.page(RecordsQuery(topic=rare))
    assert found["matching"] == 1
    assert found["filters"]["topic"][-1] == {"value": rare, "count": 1}
    assert len(found["filters"]["topic"]) == CHOICES + 1


def test_a_row_has_all_its_columns_and_a_kept_one_its_complement(view: Records) -> None:
    for kind, rows in ROWS_OF.items():
        found = view.page(RecordsQuery(kind=kind))["rows"]
        for row, written in zip(found, rows, strict=False):
            written = {name: value for name, value in written.items() if name != "provenance"}
            assert written.items() <= row.items()
            if kind == "kept":
                assert row["complement"] == {"instruction_complement": f"complement of {row['id']}", "fault": None}
                assert row["provenance"]["verdicts"]["positive"] == "positive"
            else:
                assert not row.get("complement")


def test_beyond_the_last_page_there_are_no_rows(view: Records) -> None:
    assert view.page(RecordsQuery(page=1000))["rows"] == []


@pytest.mark.parametrize("wrong", [{"page": 0}, {"q": "x" * 201}, {"colour": "red"}])
def test_a_wrong_query_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RecordsQuery(**wrong)


def test_records_alone_are_enough(tmp_path: Path) -> None:
    write_synthesis(tmp_path, ROWS_OF, complements=False)
    for name in ("rejected.parquet", "dead_letter.parquet"):
        (tmp_path / name).unlink()
    found = Records(tmp_path).page(RecordsQuery())
    assert found["matching"] == len(ROWS_OF["kept"])
    assert list(found["filters"]) == ["kind", "source", "topic"]  # nothing else differs between the rows


def test_an_output_without_any_row_has_an_empty_page(tmp_path: Path) -> None:
    write_synthesis(tmp_path, {"kept": [], "rejected": [], "dead letter": []})
    view = Records(tmp_path)
    assert view.page(RecordsQuery(q="x"))["rows"] == view.page(RecordsQuery())["rows"] == []


@pytest.mark.parametrize("name", [KEPT_FILE, REJECTED_FILE])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    write_synthesis(tmp_path, ROWS_OF)
    (tmp_path / name).write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"not readable .* run the stage again"):
        Records(tmp_path)


def test_an_output_in_an_object_store_is_read_in_place(tmp_path: Path, bucket: str, view: Records) -> None:
    folder = Folder.open(f"{bucket}/{tmp_path.name}", "DIR")
    upload(write_synthesis(tmp_path / "records", ROWS_OF), folder)
    stored = open_view(folder)
    assert isinstance(stored, Records)
    for asked in (RecordsQuery(), RecordsQuery(page=3), RecordsQuery(q="aspirin", source="msmarco")):
        assert stored.page(asked) == view.page(asked)
