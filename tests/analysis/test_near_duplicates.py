import itertools
import random

from infembed_ray.analysis.near_duplicates import THRESHOLD, near_duplicates

WORDS = [f"w{n}" for n in range(2000)]


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


def test_texts_of_other_words_are_not_alike_however_many():
    rng = random.Random(1)
    assert near_duplicates([" ".join(rng.choices(WORDS, k=30)) for _ in range(500)]) == []


def test_short_texts_are_alike_only_if_their_words_are():
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
