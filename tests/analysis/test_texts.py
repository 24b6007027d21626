import numpy as np
import pytest

from infembed_ray.analysis.texts import TextSet, compare, from_records, read, samples
from infembed_ray.errors import InputError
from tests.analysis.samples import publish, record
from tests.support.files import write_jsonl


def test_records_give_equal_sets_from_memory_file_and_synthesis_output(tmp_path):
    rows = [record(name) for name in "abc"]
    wanted = from_records("s", rows)
    assert {kind: len(texts) for kind, texts in wanted.texts.items()} == {"instruction": 6, "query": 6, "passage": 9}
    for path in (write_jsonl(tmp_path / "r.jsonl", map(vars, rows)), publish(tmp_path / "out")):
        found = read("s", path if path.is_file() else next(path.glob("*/records.parquet")).parent, "compare.s")
        assert {kind: sorted(texts) for kind, texts in found.texts.items()} == {
            kind: sorted(texts) for kind, texts in wanted.texts.items()
        }


def test_a_set_of_one_kind_is_read_without_its_empty_texts(tmp_path):
    rows = [{"_id": "1", "instruction": "one"}, {"_id": "2", "instruction": " "}, {"instruction": "two"}]
    path = write_jsonl(tmp_path / "i.jsonl", rows)
    assert read("s", path, "compare.s") == TextSet("s", {"instruction": ["one", "two"]})


def test_columns_named_after_their_kind_and_older_names_are_found(tmp_path):
    path = write_jsonl(
        tmp_path / "i.jsonl", [{"query": "q", "passage": "p"}, {"document": "d", "document_positive": "e"}]
    )
    assert read("s", path, "compare.s").texts == {"query": ["q"], "passage": ["p", "e"]}


def test_a_file_without_texts_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "i.jsonl", [{"_id": "1", "text": "one"}])
    with pytest.raises(
        InputError, match=r"compare.s=.*no column with instructions, queries or passages \(columns: _id, text\)"
    ):
        read("s", path, "compare.s")


def test_samples_have_equal_sizes_no_repetition_and_are_reproducible():
    sets = [
        TextSet("large", {"query": [f"l{n}" for n in range(50)], "passage": ["p"]}),
        TextSet("small", {"query": [f"s{n}" for n in range(7)]}),
    ]
    drawn = samples(sets, "query", 20)
    assert {label: len(set(texts)) for label, texts in drawn.items()} == {"large": 7, "small": 7}
    assert set(drawn["large"]) <= set(sets[0].texts["query"])
    assert samples(sets, "query", 20) == drawn
    assert samples(sets, "passage", 20) == {"large": ["p"]}
    assert samples(sets, "instruction", 20) == {}
    assert {len(texts) for texts in samples(sets, "query", 3).values()} == {3}


SETS = [
    TextSet("one", {"instruction": ["for nurses only", "for all but nurses", "for engineers"], "query": ["dose"]}),
    TextSet("two", {"instruction": ["for cooks", "for bakers and cooks"]}),
]


def embed(texts):
    vectors = np.array([[len(text), text.count("e"), 1.0] for text in texts])
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_every_kind_is_compared_among_the_sets_that_have_it():
    diversities, coverages = compare(SETS, 10, embed)
    assert [(d.kind, d.label, d.texts, d.sampled) for d in diversities] == [
        ("instruction", "one", 3, 2),
        ("instruction", "two", 2, 2),
        ("query", "one", 1, 1),
    ]
    assert [(c.kind, [s.label for s in c.sets]) for c in coverages] == [
        ("instruction", ["one", "two"]),
        ("query", ["one"]),
    ]
    a, b = embed(SETS[1].texts["instruction"])
    assert diversities[1].aps == pytest.approx(a @ b)


def test_without_an_encoder_there_are_only_measures_of_words():
    diversities, coverages = compare(SETS, 10, None)
    assert [d.aps for d in diversities] == [None, None, None]
    assert coverages == []
