"""Mined negatives against brute force over all passages, with the index's encoder and with teachers."""

from functools import cache

import numpy as np
import pytest

from infembed_ray.config.mining import MineSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.evaluation.tasks.task import Query
from infembed_ray.mining import miner
from infembed_ray.mining.miner import Miner, bound, known_positives, read
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records.tuples import Example
from infembed_ray.retrieval.index import Index
from tests.evaluation.retrievers import models
from tests.support.files import write_jsonl
from tests.training.test_collate import record

SUBJECTS = ["aspirin", "ibuprofen", "bread", "sourdough", "kettles", "espresso", "bicycles", "trains"]
FACETS = ["for nurses", "for children", "in the night", "at high altitude", "on a budget"]
PASSAGES = [f"How to deal with {subject} {facet}: a short guide." for subject in SUBJECTS for facet in FACETS]
ROWS = [
    Example("a", "aspirin for a nurse", (PASSAGES[0],), (PASSAGES[1],), "Only clinical sources."),
    Example("b", "baking bread", (PASSAGES[10], PASSAGES[12])),
    Example("c", "baking bread", (PASSAGES[15],)),
    Example("d", "trains on a budget", ("A passage outside of the index about cheap trains.",)),
]


@pytest.fixture(scope="module")
def encoder(minilm):
    return InstructionEncoder.from_pretrained(minilm)


@pytest.fixture(scope="module")
def index(encoder, tmp_path_factory):
    """An index in which one passage stands twice."""
    return str(
        Index.build(
            [*PASSAGES, PASSAGES[3]], encoder, tmp_path_factory.mktemp("index"), factory="Flat", vectors="float32"
        ).path
    )


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory):
    model = models.bert(tmp_path_factory.mktemp("bert"), 1)
    return {"kind": "classifier", "model": model, "instructed_query": "{query} {instruction}", "plain_query": "{query}"}


def settings(index, **changes):
    return MineSettings(**{"records": "-", "index": index, "output": "-", "negatives": 4, **changes})


def by_brute_force(chosen, encoder, judge):
    """Sort all passages by cosine, take `depth`, judge every pair alone, and keep what is below the bound."""
    mined, left_out = [], 0
    vectors = encoder.encode_passages(PASSAGES)
    for row in ROWS:
        query = encoder.encode_queries(row.query, row.instruction)
        nearest = sorted(range(len(PASSAGES)), key=lambda n: -float(vectors[n] @ query))
        # The copy of a passage takes one of the places, if it is among them.
        seen = [n for place in nearest for n in ([place] * 2 if place == 3 else [place])][: miner.DEPTH]
        positives = {
            p
            for other in ROWS
            if (other.query, other.instruction) == (row.query, row.instruction)
            for p in other.positives
        }
        lowest = min(judge(row, p) for p in row.positives)
        limit = lowest - (1 - chosen.max_share) * abs(lowest)
        kept = []
        for n in dict.fromkeys(seen):
            if PASSAGES[n] in positives or PASSAGES[n] in row.negatives:
                continue
            if judge(row, PASSAGES[n]) < limit:
                kept.append(PASSAGES[n])
            else:
                left_out += 1
        mined.append(row.negatives + tuple(kept[: chosen.negatives]))
    return mined, left_out


@pytest.mark.parametrize(
    ("positive", "max_share", "expected"),
    [(0.8, 0.95, 0.76), (0.8, 1.0, 0.8), (-0.2, 0.9, -0.22)],  # never above the positive
)
def test_the_bound_is_that_of_the_paper(positive, max_share, expected):
    assert bound(positive, max_share) == pytest.approx(expected)


@pytest.fixture(autouse=True)
def _depth(monkeypatch):
    monkeypatch.setattr(miner, "DEPTH", 20)


@pytest.mark.integration
@pytest.mark.parametrize("changes", [{}, {"max_share": 0.7}, {"max_share": 1.0}])
def test_the_encoder_of_the_index_mines_what_brute_force_does(encoder, index, changes):
    chosen = settings(index, **changes)
    made = Miner(chosen, index, None, "cpu").mine(ROWS, known_positives(lambda: ROWS))

    queries, passages = cache(encoder.encode_queries), cache(encoder.encode_passages)

    def cosine(row, passage):
        return float(queries(row.query, row.instruction) @ passages(passage))

    expected, left_out = by_brute_force(chosen, encoder, cosine)
    assert [row.negatives for row in made.rows] == expected
    assert made.too_similar == left_out
    assert made.mined == sum(len(negatives) for negatives in expected) - 1
    assert [(row.id, row.positives, row.positive_scores) for row in made.rows] == [
        (r.id, r.positives, ()) for r in ROWS
    ]


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["cross-encoder", "encoder"])
def test_a_teacher_judges_in_its_place_and_its_scores_are_written(encoder, index, minilm, cross_encoder, kind):
    chosen = settings(index, max_share=0.99)
    teacher = baselines.resolve("t", cross_encoder if kind == "cross-encoder" else minilm)
    alone = baselines.load(teacher, "cpu", 4096)
    made = Miner(chosen, index, teacher, "cpu").mine(ROWS, known_positives(lambda: ROWS))

    if kind == "encoder":
        queries = cache(lambda query: alone.encode_queries([query])[0])
        passages = cache(lambda passage: alone.encode_passages([passage])[0])

    def score(row, passage):
        query = Query("1", row.query, row.instruction)
        if kind == "cross-encoder":
            return float(alone.score([(query, passage)])[0])
        return float(queries(query) @ passages(passage))

    def judge(row, passage):
        return 1 / (1 + np.exp(-score(row, passage))) if kind == "cross-encoder" else score(row, passage)

    expected, left_out = by_brute_force(chosen, encoder, judge)
    assert [row.negatives for row in made.rows] == expected
    assert made.too_similar == left_out
    for row in made.rows:
        assert row.positive_scores == pytest.approx([score(row, p) for p in row.positives], abs=1e-5)
        assert row.negative_scores == pytest.approx([score(row, p) for p in row.negatives], abs=1e-5)


def test_rows_alone_give_what_they_give_together(index):
    alone = Miner(settings(index), index, None, "cpu")
    positives = known_positives(lambda: ROWS)
    assert [alone.mine([row], positives).rows[0] for row in ROWS] == alone.mine(ROWS, positives).rows


def test_another_encoder_than_that_of_the_index_is_refused(index, minilm, monkeypatch):
    monkeypatch.setattr(InstructionEncoder, "fingerprint", lambda self: "another")
    with pytest.raises(InputError, match="built by another encoder"):
        Miner(settings(index), index, None, "cpu")


def test_an_infir_record_is_three_tuples_with_the_others_as_negatives(tmp_path):
    path = write_jsonl(tmp_path / "records.jsonl", [vars(record(1))])
    good, bad, other = read(settings("-"), path)
    assert good == Example(
        "r1/1", "query 1", ("passage 1",), ("first negative 1", "second negative 1"), "good 1", "bad 1"
    )
    assert (bad.id, bad.instruction, bad.positives) == ("r1/2", "bad 1", ("first negative 1",))
    assert bad.negatives == ("passage 1", "second negative 1")
    assert (other.query, other.positives, other.negative_instruction) == (
        "other query 1", ("second negative 1",), "bad 1",
    )  # fmt: skip
