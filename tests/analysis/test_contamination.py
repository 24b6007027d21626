import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.analysis import contamination as module
from infembed_ray.analysis.contamination import EvaluationTexts, contamination, read
from infembed_ray.errors import InputError
from tests.analysis.samples import record

words = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=9).map(" ".join)


def test_equal_texts_and_shared_ngrams_are_found_in_any_case_and_punctuation(monkeypatch):
    monkeypatch.setattr(module, "NGRAM", 5)
    theirs = ["HOW TALL -- is it", "Once the cat sat on the mat\nand slept", "the cat"]
    rows = [
        record("a", query_positive="How tall is it?"),
        record("b", hard_negative_document_2="He said: the cat sat on the mat, then left."),
        record("c", document_positive="the cat", query_negative="how tall is it"),
    ]
    sections, matching = contamination("bench", EvaluationTexts.of(theirs), rows)
    assert [(c["kind"], c["texts"], c["compared"], c["matching"]) for c in sections] == [
        ("instruction", 6, 3, 0),
        ("query", 6, 3, 2),
        ("passage", 9, 3, 2),
    ]
    assert sections[1]["examples"] == ["how tall is it"]
    assert matching == {0: "how tall is it", 1: "the cat sat on the", 2: "how tall is it"}


@given(st.lists(words, max_size=6), st.lists(words, max_size=6), st.integers(2, 4))
def test_it_finds_what_a_comparison_of_all_pairs_finds(ours, theirs, length):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "NGRAM", length)
        evaluation = EvaluationTexts.of(iter(theirs))
        assert evaluation.texts == len(theirs)
        for text in ours:
            every = text.split()
            grams = [" ".join(every[at : at + length]) for at in range(len(every) - length + 1)]
            expected = next((gram for gram in grams if any(f" {gram} " in f" {t} " for t in theirs)), None)
            if every and len(every) < length and text in theirs:
                expected = text
            assert evaluation.shared(text) == expected


def test_all_strings_of_an_evaluation_set_except_ids_are_read(tmp_path):
    (tmp_path / "b.jsonl").write_text(json.dumps({"_id": "1", "text": "t", "n": 3, "more": ["x", {"y": "z"}]}))
    (tmp_path / "a.tsv").write_text("query\tpassage\nq\tp\n")
    (tmp_path / "README.md").write_text("A dataset card")
    (tmp_path / ".gitattributes").write_text("*.jsonl text")
    assert list(read(tmp_path, "evaluations.e")) == ["q", "p", "t", "x", "z"]


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"evaluations.e=.*no files in this directory"):
        list(read(tmp_path, "evaluations.e"))
