import itertools
import random

from infembed_ray.analysis.near_duplicates import duplicates, jaccard, near_duplicates
from tests.analysis.samples import record

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


def test_it_finds_what_a_comparison_of_all_pairs_finds():
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
    monkeypatch.setattr(
        "infembed_ray.analysis.near_duplicates.jaccard", lambda one, other: compared.append(1) or jaccard(one, other)
    )
    monkeypatch.setattr("infembed_ray.analysis.near_duplicates.MOST_COMPARED", 1)
    rng = random.Random(2)
    texts = [" ".join([*WORDS[:60], *rng.choices(WORDS, k=60)]) for _ in range(600)]
    counts = []
    for size in (300, 600):
        compared.clear()
        assert near_duplicates(texts[:size], THRESHOLD) == []
        counts.append(len(compared))
    assert 0 < counts[1] < 2.5 * counts[0]
