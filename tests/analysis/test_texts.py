import json

import pytest

from infembed_ray.analysis.texts import TextSet, of_records, read, samples
from infembed_ray.errors import InputError
from infembed_ray.records import columns_of
from tests.analysis.samples import publish, record


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_records_are_read_alike_from_memory_from_a_file_and_from_a_synthesis_output(tmp_path):
    rows = [record(name) for name in "abc"]
    wanted = of_records("s", rows)
    assert {kind: len(texts) for kind, texts in wanted.texts.items()} == {"instruction": 6, "query": 6, "passage": 9}
    for path in (write(tmp_path / "r.jsonl", map(columns_of, rows)), publish(tmp_path / "out")):
        found = read("s", path if path.is_file() else next(path.glob("*/records.parquet")).parent, "compare.s", {})
        assert {kind: sorted(texts) for kind, texts in found.texts.items()} == {
            kind: sorted(texts) for kind, texts in wanted.texts.items()
        }


def test_a_set_of_one_kind_is_read_from_the_column_that_is_named(tmp_path):
    path = write(tmp_path / "i.jsonl", [{"_id": "1", "text": "one"}, {"_id": "2", "text": " "}, {"text": "two"}])
    assert read("s", path, "compare.s", {"instruction": "text"}) == TextSet("s", {"instruction": ["one", "two"]})


def test_columns_called_after_their_kind_and_older_names_need_no_naming(tmp_path):
    path = write(tmp_path / "i.jsonl", [{"query": "q", "passage": "p"}, {"document": "d", "document_positive": "e"}])
    assert read("s", path, "compare.s", {}).texts == {"query": ["q"], "passage": ["p", "e"]}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, r"compare.s=.*no column with instructions, queries or passages \(found: _id, text\)"),
        ({"instruktion": "text"}, "compare_columns.instruktion: no kind of text: did you mean instruction"),
    ],
)
def test_what_holds_no_texts_is_refused(tmp_path, columns, message):
    path = write(tmp_path / "i.jsonl", [{"_id": "1", "text": "one"}])
    with pytest.raises(InputError, match=message):
        read("s", path, "compare.s", columns)


def test_samples_are_equally_large_drawn_once_each_and_the_same_again():
    sets = [
        TextSet("large", {"query": [f"l{n}" for n in range(50)], "passage": ["p"]}),
        TextSet("small", {"query": [f"s{n}" for n in range(7)]}),
    ]
    drawn = samples(sets, "query", 20, 0)
    assert {label: len(set(texts)) for label, texts in drawn.items()} == {"large": 7, "small": 7}
    assert set(drawn["large"]) <= set(sets[0].texts["query"])
    assert samples(sets, "query", 20, 0) == drawn != samples(sets, "query", 20, 1)
    assert samples(sets, "passage", 20, 0) == {"large": ["p"]}
    assert samples(sets, "instruction", 20, 0) == {}
    assert {len(texts) for texts in samples(sets, "query", 3, 0).values()} == {3}
