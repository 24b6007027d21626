"""Training tuples in files of every layout, and what is said of files that have none."""

import json

import pyarrow as pa
import pytest

from infembed_ray.errors import InputError
from infembed_ray.records import tables, tuples
from infembed_ray.records.tables import Record
from infembed_ray.records.tuples import Example
from tests.support.files import write_jsonl

ROW = {"query": "q", "positives": ["p"]}


def read(path, columns=None, split=None):
    return list(tuples.stream(path, "sources.mine.path", columns, split))


def test_a_row_has_every_field_and_gets_an_id(tmp_path):
    whole = Example("7", "q", ("p", "p2"), ("n",), "i", "not i", (1.5, 2.0), (-3.0,), "web", "train")
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [{**vars(whole)}, {"query": "r", "positives": "only", "negatives": None, "instruction": float("nan")}],
    )
    assert read(path) == [whole, Example("row-2", "r", ("only",))]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (  # sentence-transformers
            {"anchor": "q", "positive": "p", "negative": "n"},
            Example("row-1", "q", ("p",), ("n",)),
        ),
        (  # FlagEmbedding
            {"query": "q", "pos": ["p"], "neg": ["n", "m"], "pos_scores": [0.5], "neg_scores": [0.25, 0]},
            Example("row-1", "q", ("p",), ("n", "m"), positive_scores=(0.5,), negative_scores=(0.25, 0.0)),
        ),
        (  # Tevatron
            {
                "query_id": "9",
                "query": "q",
                "positive_passages": [{"docid": "1", "title": "t", "text": "p"}],
                "negative_passages": [{"docid": "2", "title": "", "text": "n"}],
            },
            Example("9", "q", ("t p",), ("n",)),
        ),
    ],
)
def test_layouts_of_other_libraries_need_no_column_map(tmp_path, row, expected):
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    assert tuples.found_in(path, "records", {})
    assert read(path) == [expected]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"query": "query_positive", "positives": "document_positive", "negatives": "text"}, True),
        ({"query": "query_positive", "positives": ["document_positive", "text"]}, True),
        ({"positives": "document_positive"}, True),
        ({"query": "text"}, True),
        ({"query_positive": "query", "document_positive": "text"}, False),
        ({"query_positive": "query"}, False),
        ({"id": "text"}, False),
        ({}, False),
    ],
)
def test_a_column_map_decides_whatever_other_columns_a_file_has(tmp_path, columns, expected):
    row = dict.fromkeys(("query_positive", "document_positive", "hard_negative_document_1", "text", "query"), "t")
    assert tuples.found_in(write_jsonl(tmp_path / "a.jsonl", [row]), "records", columns) == expected


def test_rows_of_json_may_have_columns_that_the_first_row_lacks(tmp_path):
    later = {"query": "r", "pos": ["o"], "neg": ["n"], "instruction": "i", "pos_scores": [1], "neg_scores": [0]}
    path = write_jsonl(tmp_path / "a.jsonl", [{"query": "q", "pos": ["p"]}, later, {"id": 0, "query": "s", "pos": "p"}])
    assert read(path) == [
        Example("row-1", "q", ("p",)),
        Example("row-2", "r", ("o",), ("n",), "i", positive_scores=(1.0,), negative_scores=(0.0,)),
        Example("0", "s", ("p",)),
    ]


def test_a_column_map_joins_several_columns(tmp_path):
    """Promptriever's rows: the query without its instruction, and two kinds of negatives."""
    row = {
        "query_id": "1",
        "query": "q only. i",
        "only_query": "q",
        "only_instruction": "i",
        "positive_passages": [{"text": "p"}],
        "negative_passages": [{"text": "n"}],
        "new_negatives": [{"text": "instruction negative"}],
    }
    columns = {
        "query": "only_query",
        "instruction": "only_instruction",
        "negatives": ("new_negatives", "negative_passages"),
    }
    path = write_jsonl(tmp_path / "a.jsonl", [row, {**row, "query_id": "2", "only_instruction": ""}])
    first, second = read(path, columns)
    assert first == Example("1", "q", ("p",), ("instruction negative", "n"), "i")
    assert second.instruction is None


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        (
            [{"question": "q", "positives": ["p"]}],
            {},
            r"no column query \(found: question, positives\); set sources.mine.columns.query=<its name>$",
        ),
        (
            [ROW],
            {"positives": "answers"},
            r"no column answers \(found: query, positives\); set sources.mine.columns.positives=",
        ),
        (
            [ROW],
            {"positive": "answers"},
            r"columns.positive: unknown column of a training tuple: did you mean positives\?",
        ),
        (
            [ROW],
            {"query": ("query", "positives")},
            r"columns.query=\['query', 'positives'\]: is one text; give one column",
        ),
        ([ROW, {**ROW, "query": " "}], {}, r"a.jsonl: row 2: column query is empty; correct it or drop the row"),
        ([ROW, {**ROW, "positives": []}], {}, r"row 2: column positives has no passage"),
        ([ROW, {**ROW, "positives": [" "]}], {}, r"row 2: column positives must have passages, .* not ' '"),
        ([ROW, {**ROW, "positives": [{"body": "p"}]}], {}, r"row 2: column positives must .*, not {'body': 'p'}"),
        (
            [{**ROW, "positives": {"text": ["p", "o"]}}],
            {},
            r"row 1: column positives must be one text, or null, not \['p', 'o'\]",
        ),
        ([ROW, {**ROW, "query": ["q", "r"]}], {}, r"row 2: column query must be one text, or null, not \['q', 'r'\]"),
        ([{}, ROW], {}, r"row 1: column query is empty"),
        ([{**ROW, "negatives": ["n", "p"]}], {}, r"row 1: a negative is one of the positives: 'p'; drop it"),
        (
            [{**ROW, "negatives": ["n", "m"], "positive_scores": [1], "negative_scores": [2]}],
            {},
            r"row 1: negative_scores has 1 scores of 2 negatives; give one per passage",
        ),
        (
            [{**ROW, "negatives": ["n"], "negative_scores": [2]}],
            {},
            r"row 1: positive_scores has 0 scores of 1 positives",
        ),
        (
            [{**ROW, "negatives": ["n"], "positive_scores": ["high"], "negative_scores": [1]}],
            {},
            r"row 1: column positive_scores must have finite numbers as scores, not 'high'",
        ),
        ([{**ROW, "id": "1"}, {**ROW, "id": "1"}], {}, r"row 2: duplicate id 1; ids must be unique"),
        ([], {}, r"sources.mine.path=.*: has no rows"),
    ],
)
def test_rows_that_cannot_train_are_named(tmp_path, rows, columns, message):
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(InputError, match=message):
        read(path, columns)


def test_written_examples_read_back_equal(tmp_path):
    import pyarrow.parquet as pq

    made = [
        Example("1", "q", ("p",), ("n", "m"), "i", None, (1.0,), (0.5, -2.0), "s", "train"),
        Example("2", "r", ("p", "o")),
    ]
    pq.write_table(pa.Table.from_pylist([vars(e) for e in made], tuples.SCHEMA), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == made
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(vars(e)) + "\n" for e in made))
    assert read(tmp_path / "b.jsonl") == made


@pytest.mark.parametrize(
    ("name", "columns", "advice"),
    [
        ("records", {}, "rename the columns of the file (mine: set {}; train: in sources.NAME)"),
        ("records", {"id": "a"}, "set {}"),
        ("sources.a.path", {}, "set {}"),
    ],
)
def test_tuples_and_records_without_their_columns_get_the_same_advice(tmp_path, name, columns, advice):
    path = write_jsonl(tmp_path / "a.jsonl", [{f"column {n}": "x" for n in range(99)} | {"a": "b"}])
    prefix = "sources.a." if name != "records" else ""
    for read, first in (
        (tuples.stream, "query"),
        (lambda *of: tables.stream(of[0], Record, *of[1:]), "query_positive"),
    ):
        with pytest.raises(InputError) as error:
            list(read(path, name, columns))
        (fault,) = error.value.faults
        assert (fault.setting, fault.value) == (name, path)
        mapped = [part for part in fault.remedy.split(", ") if f"{prefix}columns.{first}=<its name>" in part]
        assert mapped
        assert fault.remedy.startswith(advice.partition("{}")[0])
        assert fault.remedy.endswith(advice.partition("{}")[2])
        assert f"no column {first}" in fault.fault
        assert "column 3" in fault.fault
        assert len(fault.fault) < 600
