"""Equal texts, near-duplicates and texts of evaluation sets against comparisons of all pairs."""

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.analysis import overlap
from infembed_ray.analysis.overlap import (
    EvaluationTexts,
    contamination,
    duplicates,
    hashes,
    jaccard,
    near_duplicates,
    normalised,
    read,
)
from infembed_ray.errors import InputError
from tests.analysis.samples import record


@given(*[st.lists(st.sampled_from("abcdef"), max_size=12)] * 2, st.integers(1, 5))
def test_hashes_are_equal_exactly_where_the_words_are(one, other, length):
    def runs(given_words):
        size = min(length, len(given_words))
        return [tuple(given_words[at : at + size]) for at in range(len(given_words) - size + 1)] if size else []

    run_of = dict(zip(hashes(one, length).tolist(), runs(one), strict=True))
    for number, run in zip(hashes(other, length).tolist(), runs(other), strict=True):
        assert run_of.get(number, run) == run
        assert (number in run_of) == (run in runs(one))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Caf\u00c9, cafe\u0301: snake_case", "caf\u00e9 caf\u00e9 snake case"),
        (
            "\u0939\u093f\u0928\u094d\u0926\u0940 \u0915\u0940",
            "\u0939\u093f\u0928\u094d\u0926\u0940 \u0915\u0940",
        ),  # vowel signs stay
        ("\u6211\u559c\u6b22\u3002GPT-4", "\u6211 \u559c \u6b22 gpt 4"),  # Chinese has no spaces
    ],
)
def test_words_of_other_scripts(text, expected):
    assert normalised(text) == expected


@given(st.text())
def test_normalising_twice_changes_nothing(text):
    plain = normalised(text)
    assert normalised(plain) == plain
    assert "  " not in plain


# ---------------------------------------------------------------------------------------------------- near-duplicates

WORDS = [f"w{n}" for n in range(2000)]
THRESHOLD = 0.7


def test_repeated_texts_are_counted_across_positive_and_negative_columns():
    rows = [
        record("a", query_positive="How tall is it?"),
        record("b", query_negative="how  tall\nis it?"),
        record("c", query_positive="HOW TALL IS IT?", document_positive="answer of a"),
    ]
    sections = duplicates(rows)
    assert [[each[name] for name in ("texts", "distinct", "repeated")] for each in sections] == [
        [6, 6, 0],
        [6, 4, 1],
        [9, 8, 1],
    ]
    assert [each["examples"] for each in sections[:2]] == [[], [("how tall is it?", 3)]]


def test_the_most_frequent_texts_are_examples_and_then_the_most_similar():
    rows = [record(f"{n}-{copy}", query_positive=f"query {n}") for n in range(9) for copy in range(n + 1)]
    queries = duplicates(rows)[1]
    assert queries["repeated"] == 8  # the first occurs once
    assert [times for _, times in queries["examples"]] == [9, 8, 7, 6, 5]
    alike = duplicates([record("a", query_positive="how tall"), record("b", query_positive="How tall?")])[1]
    assert (alike["near"], alike["examples"]) == (1, [("how tall?", 1.0)])


def trigrams(text):
    words = text.lower().split()
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}


def similarity(one, other):
    a, b = trigrams(one), trigrams(other)
    return len(a & b) / len(a | b)


def some_texts(seed):
    """Texts of 40 words; every third has up to 4 words of the one before it changed, and some are equal."""
    rng = random.Random(seed)
    texts = []
    for number in range(240):
        words = texts[-1].split() if number % 3 == 1 else rng.choices(WORDS, k=40)
        for place in rng.sample(range(40), rng.randrange(5)):
            words[place] = rng.choice(WORDS)
        texts.append(" ".join(words))
    return texts


def test_near_duplicates_are_what_a_comparison_of_all_pairs_finds():
    texts = some_texts(0)
    expected, standing = {}, []
    for row, text in enumerate(texts):
        best = max(standing, key=lambda other: similarity(text, texts[other]), default=None)
        if best is not None and similarity(text, texts[best]) >= THRESHOLD:
            expected[row] = (best, similarity(text, texts[best]))
        else:
            standing.append(row)
    assert {pair.row: (pair.like, pair.similarity) for pair in near_duplicates(texts, THRESHOLD)} == expected
    assert 20 < len(expected) < 80
    assert any(texts[row] == texts[like] for row, (like, _) in expected.items())


def test_short_texts_are_near_duplicates_only_with_equal_words():
    assert near_duplicates(["how tall", "how", "tall how", ""], THRESHOLD) == near_duplicates([], THRESHOLD) == []
    (pair,) = near_duplicates(["how tall", "how wide", "How tall?"], THRESHOLD)
    assert (pair.row, pair.like, pair.similarity) == (2, 0, 1.0)


def test_punctuation_and_case_do_not_hide_a_copy():
    one = "Give me, please, a plain listing of the senses of this word; no exercises."
    other = "give me please a plain listing of the senses of this word - no exercises"
    for first, second in itertools.permutations((one, other)):
        assert [(p.row, p.like) for p in near_duplicates([first, second], THRESHOLD)] == [(1, 0)]


def test_texts_that_share_a_band_but_are_not_near_duplicates_cost_linear_time(monkeypatch):
    """Texts that begin alike for a third of their words share bands, and none is a near-duplicate."""
    compared = []
    monkeypatch.setattr(overlap, "jaccard", lambda one, other: compared.append(1) or jaccard(one, other))
    monkeypatch.setattr(overlap, "MOST_COMPARED", 1)
    rng = random.Random(2)
    texts = [" ".join([*WORDS[:60], *rng.choices(WORDS, k=60)]) for _ in range(600)]
    counts = []
    for size in (300, 600):
        compared.clear()
        assert near_duplicates(texts[:size], THRESHOLD) == []
        counts.append(len(compared))
    assert 0 < counts[1] < 2.5 * counts[0]


# ------------------------------------------------------------------------------------------------------ contamination


def test_equal_texts_and_shared_ngrams_are_found_in_any_case_and_punctuation(monkeypatch):
    monkeypatch.setattr(overlap, "NGRAM", 5)
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


@given(*[st.lists(st.lists(st.sampled_from("abcd"), max_size=9).map(" ".join), max_size=6)] * 2, st.integers(2, 4))
def test_a_text_shares_what_a_comparison_with_all_texts_finds(ours, theirs, length):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "NGRAM", length)
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
