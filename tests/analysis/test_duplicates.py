import itertools
import random

from infembed_ray.analysis.duplicates import THRESHOLD, Repeated, duplicates, near_duplicates
from tests.analysis.samples import record

WORDS = [f"w{n}" for n in range(2000)]


def test_repeated_texts_are_found_across_positive_and_negative_columns():
    rows = [
        record("a", query_positive="How tall is it?"),
        record("b", query_negative="how  tall\nis it?"),
        record("c", query_positive="HOW TALL IS IT?", document_positive="answer of a"),
    ]
    instructions, queries, passages = duplicates(rows)
    assert (instructions.texts, instructions.distinct, instructions.repeated, instructions.examples) == (6, 6, 0, [])
    assert (queries.texts, queries.distinct, queries.repeated) == (6, 4, 1)
    assert queries.examples == [Repeated("how tall is it?", 3)]
    assert (passages.texts, passages.distinct, passages.repeated) == (9, 8, 1)


def test_only_the_most_frequent_are_shown():
    rows = [record(f"{n}-{copy}", query_positive=f"query {n}") for n in range(9) for copy in range(n + 1)]
    queries = duplicates(rows)[1]
    assert queries.repeated == 8  # the first stands once
    assert [e.times for e in queries.examples] == [9, 8, 7, 6, 5]


def trigrams(text):
    words = text.lower().split()
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}


def jaccard(one, other):
    a, b = trigrams(one), trigrams(other)
    return len(a & b) / len(a | b)


def some_texts(seed):
    """Texts of 40 words; every third has up to 4 words of the one before it changed."""
    rng = random.Random(seed)
    texts = []
    for number in range(240):
        words = texts[-1].split() if number % 3 == 1 else rng.choices(WORDS, k=40)
        for place in rng.sample(range(40), rng.randrange(5)):
            words[place] = rng.choice(WORDS)
        texts.append(" ".join(words))
    return list(dict.fromkeys(texts))


def test_it_finds_what_a_comparison_of_all_pairs_finds():
    texts = some_texts(0)
    expected, standing = {}, []
    for text in texts:
        best = max(standing, key=lambda other: jaccard(text, other), default=None)
        if best is not None and jaccard(text, best) >= THRESHOLD:
            expected[text] = best
        else:
            standing.append(text)
    found = near_duplicates(texts)
    assert {pair.text: pair.like for pair in found} == expected
    assert all(pair.similarity == jaccard(pair.text, pair.like) for pair in found)
    assert 20 < len(found) < 80


def test_texts_of_different_words_are_no_near_duplicates():
    rng = random.Random(1)
    assert near_duplicates([" ".join(rng.choices(WORDS, k=30)) for _ in range(500)]) == []


def test_short_texts_are_near_duplicates_only_with_equal_words():
    assert near_duplicates(["how tall", "how", "tall how", ""]) == []
    (pair,) = near_duplicates(["how tall", "how wide", "How tall?"])
    assert (pair.text, pair.like, pair.similarity) == ("How tall?", "how tall", 1.0)


def test_no_texts_have_no_duplicates():
    assert near_duplicates([]) == []


def test_punctuation_and_case_do_not_hide_a_copy():
    one = "Give me, please, a plain listing of the senses of this word; no exercises."
    other = "give me please a plain listing of the senses of this word - no exercises"
    for first, second in itertools.permutations((one, other)):
        assert [(p.text, p.like) for p in near_duplicates([first, second])] == [(second, first)]
