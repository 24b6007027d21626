import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.analysis.contamination import Match, contamination, ngrams, read
from infembed_ray.errors import InputError

words = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=9).map(" ".join)


def test_equal_texts_and_shared_ngrams_are_found_in_any_case_and_punctuation():
    ours = {
        "query": ["How tall is it?", "how wide is it"],
        "passage": ["He said: the cat sat on the mat, then left.", "nothing of the kind stands anywhere here"],
    }
    theirs = ["HOW TALL -- is it", "Once the cat sat on the mat\nand slept", "the cat"]
    query, passage = contamination("bench", theirs, ours, 5)
    assert (query.texts, query.compared, query.equal, query.overlapping) == (2, 3, 1, 0)
    assert query.examples == [Match("How tall is it?", "how tall is it")]
    assert (passage.equal, passage.overlapping) == (0, 1)
    assert passage.examples == [Match(ours["passage"][0], "the cat sat on the")]


@given(st.lists(words, max_size=6), st.lists(words, max_size=6), st.integers(2, 4))
def test_it_finds_what_a_comparison_of_all_pairs_finds(ours, theirs, length):
    (found,) = contamination("bench", theirs, {"query": ours}, length)
    equal = [o for o in ours if o and o in theirs]
    overlapping = [
        o for o in ours if o not in equal and any(f" {gram} " in f" {t} " for gram in ngrams(o, length) for t in theirs)
    ]
    assert (found.equal, found.overlapping, found.compared) == (len(equal), len(overlapping), len(theirs))


def test_all_strings_of_an_evaluation_set_except_ids_are_read(tmp_path):
    (tmp_path / "b.jsonl").write_text(json.dumps({"_id": "1", "text": "t", "n": 3, "more": ["x", {"y": "z"}]}))
    (tmp_path / "a.tsv").write_text("query\tpassage\nq\tp\n")
    (tmp_path / "README.md").write_text("A dataset card")
    (tmp_path / ".gitattributes").write_text("*.jsonl text")
    assert list(read(tmp_path, "evaluations.e")) == ["q", "p", "t", "x", "z"]


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "e.bin").write_text("x")
    with pytest.raises(InputError, match=r"evaluations.e=.*unknown format .bin"):
        list(read(tmp_path / "e.bin", "evaluations.e"))


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"evaluations.e=.*no files in this directory"):
        list(read(tmp_path, "evaluations.e"))
