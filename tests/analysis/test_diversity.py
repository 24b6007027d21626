"""Diversity and coverage against their definitions and scikit-learn, and the sets of texts that they compare."""

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from infembed_ray.analysis.diversity import (
    GRID,
    TextSet,
    average_pairwise_similarity,
    compare,
    coverage,
    diversity,
    from_records,
    inter_sample_ngram_frequency,
    ngram_frequencies,
    principal_plane,
    read,
)
from infembed_ray.errors import InputError
from tests.analysis.samples import publish, record
from tests.support.files import write_jsonl

texts = st.lists(st.lists(st.sampled_from("abcd"), max_size=8).map(" ".join), max_size=8)


@given(st.integers(2, 30), st.integers(1, 8), st.integers(0, 2**32))
def test_similarity_is_the_mean_cosine_of_all_pairs(n, d, seed):
    vectors = np.random.default_rng(seed).normal(size=(n, d))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    pairs = [math.fsum(float(a) * float(b) for a, b in zip(x, y)) for x, y in itertools.combinations(vectors, 2)]  # noqa: B905
    assert average_pairwise_similarity(vectors) == pytest.approx(math.fsum(pairs) / len(pairs), abs=1e-6)
    assert average_pairwise_similarity(vectors[:1]) is None


@given(texts, st.integers(1, 3))
def test_ngram_frequencies_count_texts_not_occurrences(of_set, order):
    frequencies, total = ngram_frequencies(of_set, order)
    lists = [[tuple(t.split()[i : i + order]) for i in range(len(t.split()) - order + 1)] for t in of_set]
    assert total == sum(map(len, lists))
    assert dict(frequencies) == {gram: sum(gram in grams for grams in lists) for grams in lists for gram in grams}
    assert ngram_frequencies(["A b, c", "a B c."], 3) == ({("a", "b", "c"): 2}, 2)


@given(texts)
def test_ingf_equals_its_formula(of_set):
    frequencies = [ngram_frequencies(of_set, order)[0] for order in (1, 2, 3)]
    ratios = [len(f) / (1 + statistics.pstdev(f.values())) if f else 0.0 for f in frequencies]
    assert inter_sample_ngram_frequency(frequencies) == pytest.approx(statistics.fmean(ratios))


def test_counts_cover_the_whole_set_and_measures_the_sample():
    every = ["One two", "one  TWO", "three four five", "six"]
    measured = diversity("mine", "query", every, every[:2], np.eye(2, dtype=np.float32))
    assert [measured[name] for name in ("texts", "distinct", "mean_words", "sampled", "aps")] == [4, 3, 2.0, 2, 0.0]
    assert measured["distinct_share"] == [0.5, 0.5, 1.0]


# ----------------------------------------------------------------------------------------------------------- coverage


def cloud(seed, n=40, d=5):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) * np.arange(d, 0, -1) + rng.normal(size=d)


@given(st.integers(0, 2**32))
def test_the_plane_is_that_of_the_principal_components(seed):
    vectors = cloud(seed)
    points, explained = principal_plane(vectors)
    oracle = PCA(2, svd_solver="full").fit(vectors)
    assert np.abs(points) == pytest.approx(np.abs(oracle.transform(vectors)), abs=1e-8)
    assert explained == pytest.approx(oracle.explained_variance_ratio_)
    assert principal_plane(vectors[::-1])[0] == pytest.approx(points[::-1])


def test_sets_share_one_square_and_their_cells_are_counted():
    covered = coverage("query", {"wide": cloud(3), "narrow": cloud(3) * 0.05})
    points = {each["label"]: np.array(each["points"]) for each in covered["sets"]}
    both = np.concatenate(list(points.values()))
    assert (both.min(), both.max()) == (0.0, 1.0)
    cells = {
        label: set(map(tuple, np.minimum(of_set * GRID, GRID - 1).astype(int))) for label, of_set in points.items()
    }
    assert {each["label"]: each["cells"] for each in covered["sets"]} == {name: len(c) for name, c in cells.items()}
    assert covered["cells"] == len(cells["wide"] | cells["narrow"])
    assert len(cells["wide"]) > len(cells["narrow"])
    assert coverage("query", {"one": np.ones((4, 3))})["cells"] == 1


# --------------------------------------------------------------------------------------------------------------- sets


def test_records_give_equal_sets_from_memory_file_and_synthesis_output(tmp_path):
    rows = [record(name) for name in "abc"]
    expected = from_records("s", rows).texts
    assert {kind: len(of_kind) for kind, of_kind in expected.items()} == {"instruction": 6, "query": 6, "passage": 9}
    for path in (write_jsonl(tmp_path / "r.jsonl", map(vars, rows)), publish(tmp_path / "out")):
        made = read("s", path if path.is_file() else next(path.glob("*/records.parquet")).parent, "compare.s")
        assert {kind: sorted(of_kind) for kind, of_kind in made.texts.items()} == {
            kind: sorted(of_kind) for kind, of_kind in expected.items()
        }


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"instruction": "one"}, {"instruction": " "}, {"instruction": "two"}], {"instruction": ["one", "two"]}),
        (
            [{"query": "q", "passage": "p"}, {"document": "d", "document_positive": "e"}],
            {"query": ["q"], "passage": ["p", "e"]},
        ),
    ],
    ids=["one kind, empty texts", "older names"],
)
def test_columns_named_after_their_kind_are_read(tmp_path, rows, expected):
    assert read("s", write_jsonl(tmp_path / "i.jsonl", rows), "compare.s") == TextSet("s", expected)


def test_a_file_without_texts_is_rejected(tmp_path):
    with pytest.raises(InputError) as error:
        read("s", write_jsonl(tmp_path / "i.jsonl", [{"_id": "1", "text": "one"}]), "compare.s")
    assert error.value.faults[0].setting == "compare.s"


SETS = [
    TextSet("one", {"instruction": ["for nurses only", "for all but nurses", "for engineers"], "query": ["dose"]}),
    TextSet("two", {"instruction": ["for cooks", "for bakers and cooks"]}),
]


def embed(sample):
    vectors = np.array([[len(text), text.count("e"), 1.0] for text in sample])
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_every_kind_is_compared_on_equal_samples_of_the_sets_that_have_it():
    diversities, coverages = compare(SETS, embed)
    assert [(d["kind"], d["label"], d["texts"], d["sampled"]) for d in diversities] == [
        ("instruction", "one", 3, 2),
        ("instruction", "two", 2, 2),
        ("query", "one", 1, 1),
    ]
    assert [(c["kind"], [s["label"] for s in c["sets"]]) for c in coverages] == [
        ("instruction", ["one", "two"]),
        ("query", ["one"]),
    ]
    a, b = embed(SETS[1].texts["instruction"])
    assert diversities[1]["aps"] == pytest.approx(a @ b)
    assert compare(SETS, embed) == (diversities, coverages)
    without, none = compare(SETS, None)
    assert ([d["aps"] for d in without], none) == ([None, None, None], [])
