import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.analysis.diversity import (
    average_pairwise_similarity,
    diversity,
    inter_sample_ngram_frequency,
    ngram_frequencies,
)

texts = st.lists(st.lists(st.sampled_from("abcd"), max_size=8).map(" ".join), max_size=8)


@given(st.integers(2, 30), st.integers(1, 8), st.integers(0, 2**32))
def test_similarity_is_the_mean_cosine_of_all_pairs(n, d, seed):
    vectors = np.random.default_rng(seed).normal(size=(n, d))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    pairs = [math.fsum(float(a) * float(b) for a, b in zip(x, y)) for x, y in itertools.combinations(vectors, 2)]  # noqa: B905
    assert average_pairwise_similarity(vectors) == pytest.approx(math.fsum(pairs) / len(pairs), abs=1e-6)


def test_one_text_has_no_pairs():
    assert average_pairwise_similarity(np.ones((1, 3))) is None


def test_equal_texts_have_similarity_one():
    assert average_pairwise_similarity(np.tile([0.6, 0.8], (5, 1))) == pytest.approx(1.0)


@given(texts, st.integers(1, 3))
def test_ngram_frequencies_count_texts_not_occurrences(of_set, order):
    frequencies, total = ngram_frequencies(of_set, order)
    lists = [[tuple(t.split()[i : i + order]) for i in range(len(t.split()) - order + 1)] for t in of_set]
    assert total == sum(map(len, lists))
    expected = {gram: sum(gram in grams for grams in lists) for grams in lists for gram in grams}
    assert dict(frequencies) == expected


@given(texts)
def test_ingf_equals_its_formula(of_set):
    frequencies = [ngram_frequencies(of_set, order)[0] for order in (1, 2, 3)]
    ratios = [len(f) / (1 + statistics.pstdev(f.values())) if f else 0.0 for f in frequencies]
    assert inter_sample_ngram_frequency(frequencies) == pytest.approx(statistics.fmean(ratios))


@given(texts)
def test_repeating_a_set_does_not_raise_its_ingf(of_set):
    once, twice = ([ngram_frequencies(each, k)[0] for k in (1, 2, 3)] for each in (of_set, of_set * 2))
    assert inter_sample_ngram_frequency(twice) <= inter_sample_ngram_frequency(once)


def test_ngrams_ignore_case_and_punctuation():
    assert ngram_frequencies(["A b, c", "a B c."], 3) == ({("a", "b", "c"): 2}, 2)


def test_texts_of_one_template_are_less_diverse():
    rng = np.random.default_rng(0)
    words = [f"w{n}" for n in range(500)]
    template = ["this is what a user wants to see about " + " ".join(rng.choice(words, 6)) for _ in range(200)]
    free = [" ".join(rng.choice(words, 15)) for _ in range(200)]
    measured = [diversity("s", "query", each, each, None) for each in (template, free)]
    assert measured[0].ingf < measured[1].ingf
    assert all(one < other for one, other in zip(*(m.distinct_share for m in measured), strict=True))


def test_counts_cover_the_whole_set_and_measures_the_sample():
    every = ["One two", "one  TWO", "three four five", "six"]
    found = diversity("mine", "query", every, every[:2], np.eye(2, dtype=np.float32))
    assert (found.texts, found.distinct, found.mean_words, found.sampled) == (4, 3, 2.0, 2)
    assert found.aps == 0.0
    assert found.distinct_share == [0.5, 0.5, 1.0]
