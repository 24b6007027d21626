import numpy as np
import pytest

from infembed_ray.analysis.comparison import compare
from infembed_ray.analysis.texts import TextSet

SETS = [
    TextSet("one", {"instruction": ["for nurses only", "for all but nurses", "for engineers"], "query": ["dose"]}),
    TextSet("two", {"instruction": ["for cooks", "for bakers and cooks"]}),
]


def embed(texts):
    vectors = np.array([[len(text), text.count("e"), 1.0] for text in texts])
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_every_kind_is_compared_among_the_sets_that_have_it():
    diversities, coverages = compare(SETS, 10, 0, embed)
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


def test_without_an_encoder_only_words_are_counted():
    diversities, coverages = compare(SETS, 10, 0, None)
    assert [d.aps for d in diversities] == [None, None, None]
    assert coverages == []
