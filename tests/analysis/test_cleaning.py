"""The steps of `infembed clean` without Ray: any division of the rows gives the result of a comparison of all pairs."""

import random
from itertools import combinations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.analysis import cleaning
from infembed_ray.analysis.contamination import contamination

WORDS = [f"w{n}" for n in range(2000)]
THRESHOLD = 0.7


def texts_of(rows):
    """A table of TEXTS with these positive passages; the other columns are empty."""
    empty = dict.fromkeys(cleaning.TEXTS.names[1:], "")
    return pa.Table.from_pylist(
        [{**empty, "row": row, "document_positive": text} for row, text in rows], cleaning.TEXTS
    )


def groups(table, key, number):
    """The table divided as a shuffle by a key divides it."""
    places = table[key].to_numpy() % number
    return [table.filter(pa.array(places == place)) for place in range(number)]


def duplicates(texts, tables, partitions, order, left_out=()):
    """Duplicate -> original, with the rows in `tables` tables and the shuffles in `partitions` partitions."""
    rows = list(enumerate(texts))
    order.shuffle(rows)
    blocks = [texts_of(rows[start::tables]) for start in range(tables)]
    ignored = np.array(sorted(left_out), dtype=np.int64)
    bands = pa.concat_tables([cleaning.bands(block, ignored) for block in blocks])
    found = [pair for part in groups(bands, "band", partitions) for pair in cleaning.candidates(part).to_pylist()]
    equal = {(pair["one"], pair["other"]) for pair in found if pair["equal"]}
    pairs = np.array(sorted({(p["one"], p["other"]) for p in found} - equal), dtype=np.int64).reshape(-1, 2)
    sides, numbers = pairs.T.ravel(), np.tile(np.arange(len(pairs)), 2)
    by_row = np.argsort(sides, kind="stable")
    both = pa.concat_tables([cleaning.sides(block, sides[by_row], numbers[by_row]) for block in blocks])
    similar = [
        tuple(pairs[row["pair"]].tolist())
        for part in groups(both, "pair", partitions)
        for row in cleaning.similar(part, THRESHOLD).to_pylist()
    ]
    return cleaning.originals([*equal, *similar])


def trigrams(text):
    words = text.split()
    return {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))}


def by_brute_force(texts):
    """Duplicate -> original, from the exact similarities of all pairs and a search through each component."""
    shingles = [trigrams(text) for text in texts]
    near = {row: [] for row in range(len(texts))}
    for a, b in combinations(range(len(texts)), 2):
        if len(shingles[a] & shingles[b]) / len(shingles[a] | shingles[b]) >= THRESHOLD:
            near[a].append(b)
            near[b].append(a)
    found, seen = {}, set()
    for first in near:
        component = [first] if first not in seen else []
        for row in component:
            component += [other for other in near[row] if other not in component]
        seen |= set(component)
        found.update(dict.fromkeys(component[1:], first))
    return found


def some_texts(seed, number=300):
    """Texts of 40 words, of which two in three are a changed copy of the one before; some are equal."""
    rng = random.Random(seed)
    texts = []
    for place in range(number):
        words = texts[-1].split() if place % 3 else rng.choices(WORDS, k=40)
        for at in rng.sample(range(40), rng.randrange(5)):
            words[at] = rng.choice(WORDS)
        texts.append(" ".join(words))
    return texts


def test_it_finds_what_an_exact_comparison_of_all_pairs_finds():
    texts = some_texts(0)
    expected = by_brute_force(texts)
    assert duplicates(texts, 4, 3, random.Random(0)) == expected
    assert 50 < len(expected) < 250
    assert any(texts[row] == texts[first] for row, first in expected.items())
    assert any(texts[row] != texts[first] for row, first in expected.items())


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.randoms(use_true_random=False))
def test_any_division_of_the_rows_gives_the_same_result(tables, partitions, order):
    texts = some_texts(1, 60)
    assert duplicates(texts, tables, partitions, order) == duplicates(texts, 1, 1, random.Random(0))


def test_rows_that_are_left_out_neither_go_nor_stay_for_others():
    texts = ["one two three four five"] * 3 + ["one two three four five six"]
    assert duplicates(texts, 2, 2, random.Random(0), left_out=[0]) == {2: 1, 3: 1}


def test_a_large_bucket_costs_linear_time():
    texts = [f"{' '.join(WORDS[:60])} end{n}" for n in range(400)]
    pairs = []
    for size in (200, 400):
        bands = cleaning.bands(texts_of(enumerate(texts[:size])), np.empty(0, dtype=np.int64))
        pairs.append(cleaning.candidates(bands).num_rows)
    assert pairs[1] < 2.5 * pairs[0]
    assert duplicates(texts, 1, 1, random.Random(0)) == dict.fromkeys(range(1, 400), 0)


def test_no_rows_have_no_duplicates():
    assert duplicates([], 1, 1, random.Random(0)) == {}


words = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=9).map(" ".join)


@given(st.lists(words, min_size=1, max_size=6), st.lists(words, max_size=6), st.integers(2, 4))
def test_contaminated_rows_are_those_that_the_report_counts(ours, theirs, length):
    every = [cleaning.ngram_hashes(text, length) for text in theirs]
    known = np.unique(np.concatenate([np.empty(0, dtype=np.uint64), *every]))
    found = cleaning.contaminated(texts_of(enumerate(ours)), known, length).to_pylist()
    (report,) = contamination("bench", theirs, {"passage": ours}, length)
    assert len(found) == report.equal + report.overlapping
    for row in found:
        assert f" {row['shared']} " in f" {ours[row['row']]} "
        assert any(f" {row['shared']} " in f" {text} " for text in theirs)


@pytest.mark.parametrize("column", cleaning.TEXTS.names[1:])
def test_every_text_of_a_record_is_searched(column):
    table = texts_of([(7, "nothing")])
    place = table.schema.get_field_index(column)
    table = table.set_column(place, column, pa.array(["Well: THE cat (sat) on it"]))
    known = cleaning.ngram_hashes("the cat sat", 3)
    assert cleaning.contaminated(table, known, 3).to_pylist() == [{"row": 7, "shared": "the cat sat"}]
