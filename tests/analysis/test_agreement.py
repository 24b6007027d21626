import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import cohen_kappa_score

from infembed_ray.analysis.agreement import mean_cohen_kappa, read, sheet, study
from infembed_ray.errors import InputError
from tests.analysis.samples import record
from tests.support.files import write_jsonl

answers = st.lists(st.tuples(st.sampled_from("0123"), st.sampled_from("0123")), min_size=2, max_size=60)


def agreements(answers):
    return study(answers, {}, {})["pairs"]


def raters(pairs, names=("a", "b")):
    return {name: {str(n): pair[i] for n, pair in enumerate(pairs)} for i, name in enumerate(names)}


@given(answers)
def test_kappa_equals_sklearns(pairs):
    (pair,) = agreements(raters(pairs))
    one, other = zip(*pairs, strict=True)
    kappa = pair["kappa"]
    if len({*one, *other}) == 1:
        assert kappa == {"value": None, "low": None, "high": None}
    else:
        assert kappa["value"] == pytest.approx(cohen_kappa_score(one, other))
        assert kappa["low"] <= kappa["high"]
    assert pair["equal"] == pytest.approx(np.mean([a == b for a, b in pairs]))


@pytest.mark.integration
def test_the_interval_equals_that_of_resampled_items():
    rng = random.Random(5)
    pairs = [(a, a if rng.random() < 0.7 else rng.choice("0123")) for a in rng.choices("0123", k=120)]
    kappa = agreements(raters(pairs))[0]["kappa"]
    drawn = [cohen_kappa_score(*zip(*rng.choices(pairs, k=len(pairs)), strict=True)) for _ in range(1500)]
    assert [kappa["low"], kappa["high"]] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.02)
    assert kappa["low"] < kappa["value"] < kappa["high"]


def test_raters_are_compared_two_by_two_on_the_items_that_both_answered():
    given_answers = {"a": {"1": "x", "2": "y", "3": "x"}, "b": {"2": "y", "3": "y"}, "c": {"1": "x", "4": "y"}, "d": {}}
    common = {(pair["one"], pair["other"]): pair["items"] for pair in agreements(given_answers)}
    assert common == {("a", "b"): 2, ("a", "c"): 1}


def test_answers_of_several_files_are_joined_by_item(tmp_path):
    one = write_jsonl(
        tmp_path / "one.jsonl", [{"item_id": "i1", "query": "q", "ann": 2.0}, {"item_id": "i2", "ann": None}]
    )
    two = write_jsonl(tmp_path / "two.jsonl", [{"item_id": "i2", "ben": "0"}, {"item_id": "i1", "ben": "2"}])
    assert read([one, two], "agreement") == {"ann": {"i1": "2"}, "ben": {"i2": "0", "i1": "2"}}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"ann": 1, "ben": 2}], "row 1: item_id is missing"),
        ([{"item_id": "i", "ann": 1, "ben": 1}, {"item_id": "i", "ann": 1, "ben": 1}], "item_id i is repeated"),
        ([{"item_id": "i", "ann": 1, "query": "q"}], "1 raters; agreement needs at least 2"),
    ],
)
def test_answers_that_cannot_be_compared_are_refused(tmp_path, rows, message):
    with pytest.raises(InputError, match=message):
        read([write_jsonl(tmp_path / "one.jsonl", rows)], "agreement")


def test_one_rater_in_two_files_is_refused(tmp_path):
    rows = [{"item_id": "i", "ann": 1, "ben": 1}]
    with pytest.raises(InputError, match="rater ann is also in another file"):
        read([write_jsonl(tmp_path / name, rows) for name in ("one.jsonl", "two.jsonl")], "agreement")


def test_a_sheet_has_random_items_and_its_key_the_right_passages(tmp_path):
    rows = [record(f"r{n}") for n in range(30)]
    items, key = sheet(rows, 20)
    assert len({item["instruction"] + item["query"] for item in items}) == 20
    by_query = {text: r for r in rows for text in (r.query_positive, r.query_negative)}
    for item, right in zip(items, key, strict=True):
        row = by_query[item["query"]]
        wanted = row.document_positive
        if item["query"] == row.query_negative:
            wanted = row.hard_negative_document_2
        elif item["instruction"] == row.instruction_negative:
            wanted = row.hard_negative_document_1
        assert item["passages"][str(right["pipeline"])] == wanted
        assert len(set(item["passages"].values())) == 5
    assert len({right["pipeline"] for right in key}) > 2
    assert sheet(rows, 20) == (items, key)
    files = [
        write_jsonl(tmp_path / "ann.jsonl", [{**i, "ann": k["pipeline"]} for i, k in zip(items, key, strict=True)])
    ]
    files.append(write_jsonl(tmp_path / "key.jsonl", key))
    assert math.isclose(agreements(read(files, "agreement"))[0]["kappa"]["value"], 1.0)


def test_a_mean_of_kappas_takes_each_pair_on_its_common_items():
    rng = random.Random(3)
    given_answers = {
        name: {str(n): rng.choice("012") for n in rng.sample(range(60), 50)} | {"same": "0"} for name in "abc"
    }
    kappas = []
    for other in "bc":
        both = sorted(given_answers["a"].keys() & given_answers[other].keys())
        kappas.append(cohen_kappa_score(*([given_answers[name][item] for item in both] for name in ("a", other))))
    mean = mean_cohen_kappa([("a", "b"), ("a", "c")], given_answers)
    assert mean["value"] == pytest.approx(np.mean(kappas))
    assert mean["low"] < mean["value"] < mean["high"]
