import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records.tables import Record
from infembed_ray.records.tuples import Example
from infembed_ray.training.collate import collate, drawn, flatten, other_instructions, sample_instructions
from infembed_ray.training.losses import NCE, Objective
from tests.modeling import backbones

MULTI_P_I = Objective.parse("multi{P,I}")


def record(n, instruction=None):
    return Record(
        id=f"r{n}",
        query_positive=f"query {n}",
        instruction_positive=instruction or f"good {n}",
        instruction_negative=f"bad {n}",
        query_negative=f"other query {n}",
        document_positive=f"passage {n}",
        hard_negative_document_1=f"first negative {n}",
        hard_negative_document_2=f"second negative {n}",
    )


@pytest.fixture(scope="module")
def encoder(minilm):
    return InstructionEncoder.from_pretrained(minilm)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return InstructionEncoder.from_pretrained(backbones.write("qwen2", tmp_path_factory.mktemp("decoder")))


def candidate_texts(encoder, batch):
    """Return the texts of every row's I-candidates."""
    texts = [encoder.tokenizer.decode(q.ids, skip_special_tokens=True) for q in batch.queries]
    return [[texts[n] for n in row] for row in batch.instruction_candidates]


def test_a_record_becomes_the_three_official_tuples():
    got = [(t.instruction, t.query, t.passage) for t in flatten(record(1))]
    assert got == [
        ("good 1", "query 1", "passage 1"),
        ("bad 1", "query 1", "first negative 1"),
        ("good 1", "other query 1", "second negative 1"),
    ]


@given(st.integers(1, 5), st.none() | st.integers(0, 8), st.integers(0, 99))
def test_instruction_negatives_are_distinct_and_exclude_the_own_instruction(records, count, seed):
    # Two records share an instruction: texts are identified by their tokens, not by row.
    tuples = [t for n in range(records) for t in flatten(record(n, instruction="shared" if n < 2 else None))]
    available = sorted({t.instruction for t in tuples})
    for t in tuples:
        others = set(available) - {t.instruction}
        drawn = other_instructions(t, sample_instructions(available, count, random.Random(seed)), count)
        assert len(drawn) == len(set(drawn)) == (len(others) if count is None else min(count, len(others)))
        assert set(drawn) <= others
        if drawn:
            assert drawn[0] == t.poisoned


def test_equal_texts_have_equal_ids_and_candidates_point_to_queries(encoder):
    records = [record(1), record(2, instruction="good 1")]
    batch = collate(encoder, [records], 0, MULTI_P_I, instruction_negatives=2, seed="0")
    assert len(batch.passages) == 6
    assert len(set(batch.passage_ids)) == 6
    tuples = [t for r in records for t in flatten(r)]
    texts = [encoder.tokenizer.decode(q.ids, skip_special_tokens=True) for q in batch.queries]
    assert [texts[n] for n in batch.own] == [f"{t.instruction} {t.query}" for t in tuples]
    for t, row in zip(tuples, candidate_texts(encoder, batch), strict=True):
        assert len(row) == 2
        assert all(text.endswith(f" {t.query}") for text in row)
        assert row[0] == f"{t.poisoned} {t.query}"
    assert len(set(texts)) == len(texts)  # (bad 1, query 1) is a row's own and another's negative: embedded once
    assert collate(encoder, [records], 0, MULTI_P_I, instruction_negatives=2, seed="0") == batch


def test_sampled_negatives_do_not_depend_on_the_number_of_workers(encoder):
    records = [record(n) for n in range(5)]
    whole = collate(encoder, [records], 0, MULTI_P_I, instruction_negatives=4, seed="7/3")
    shares = [records[:3], records[3:]]
    parts = [collate(encoder, shares, rank, MULTI_P_I, instruction_negatives=4, seed="7/3") for rank in (0, 1)]
    drawn = [row for part in parts for row in candidate_texts(encoder, part)]
    assert drawn == candidate_texts(encoder, whole)
    assert any(text.startswith("good 4") for row in candidate_texts(encoder, parts[0]) for text in row)
    assert [part.share for part in parts] == [1.2, 0.8]
    assert whole.share == 1.0
    assert collate(encoder, [records], 0, MULTI_P_I, instruction_negatives=4, seed="7/4") != whole


def test_causal_backbones_share_one_set_of_instructions_per_step_for_any_number_of_workers(decoder):
    records = [record(n) for n in range(12)]
    rows = [t for r in records for t in flatten(r)]
    options = {"instruction_negatives": 4, "seed": "7/3"}
    whole = candidate_texts(decoder, collate(decoder, [records], 0, MULTI_P_I, **options))
    shares = [records[:5], records[5:6], records[6:]]
    parts = [collate(decoder, shares, rank, MULTI_P_I, **options) for rank in range(3)]
    assert [row for part in parts for row in candidate_texts(decoder, part)] == whole
    drawn = sample_instructions(sorted({t.instruction for t in rows}), 4, random.Random("7/3"))
    assert len(drawn) == 5
    for t, row in zip(rows, whole, strict=True):
        rest = [i for i in drawn if i not in (t.instruction, t.poisoned)][:3]
        assert row == [f"{i} {t.query}" for i in (t.poisoned, *rest)]
    other = candidate_texts(decoder, collate(decoder, [records], 0, MULTI_P_I, **options | {"seed": "7/4"}))
    assert other != whole


def test_all_instructions_means_those_of_the_own_share(encoder):
    shares = [[record(0), record(1)], [record(2)]]
    batch = collate(encoder, shares, 0, MULTI_P_I, instruction_negatives=None)
    for t, row in zip([t for r in shares[0] for t in flatten(r)], candidate_texts(encoder, batch), strict=True):
        others = {"good 0", "bad 0", "good 1", "bad 1"} - {t.instruction}
        assert sorted(row) == sorted(f"{i} {t.query}" for i in others)


def test_only_texts_that_the_objective_needs_are_tokenized(encoder):
    def texts(objective, **options):
        return len(collate(encoder, [[record(0), record(1)]], 0, Objective.parse(objective), **options).queries)

    assert texts("uni{P}") == texts("multi{P,IQ}") == 6  # only the rows' own texts
    assert texts("uni{I}") == 4 * 4  # 4 instructions, 4 queries: every pair
    assert texts("multi{P,IQ}", iq_negatives="ik") == 4 * 4
    assert texts(str(NCE)) == 4 * 4


def example(n, positives=3, negatives=5, **fields):
    return Example(
        id=f"x{n}",
        query=f"question {n}",
        positives=tuple(f"answer {n} {p}" for p in range(positives)),
        negatives=tuple(f"wrong {n} {p}" for p in range(negatives)),
        positive_scores=tuple(float(p) for p in range(positives)),
        negative_scores=tuple(-float(p) for p in range(negatives)),
        **fields,
    )


def test_an_example_draws_a_positive_and_negatives_with_their_scores():
    whole = example(1)
    seen = set()
    for step in range(40):
        got = drawn(whole, 2, f"7/{step}")
        assert got == drawn(whole, 2, f"7/{step}")
        assert sorted(got.positives) == sorted(whole.positives)
        assert [float(text[-1]) for text in got.positives] == list(got.positive_scores)
        assert [-float(text[-1]) for text in got.negatives] == list(got.negative_scores)
        assert len(set(got.negatives)) == 2
        seen |= {got.positives[0], *got.negatives}
        (row,) = flatten(got)
        assert (row.passage, row.other_positives) == (got.positives[0], got.positives[1:])
        assert row.scores == (got.positive_scores[0], *got.negative_scores)
    assert seen == {*whole.positives, *whole.negatives}  # every text has its turn
    assert set(drawn(whole, None, "0").negatives) == set(drawn(whole, 9, "0").negatives) == set(whole.negatives)
    assert drawn(whole, 0, "0").negatives == ()
    assert drawn(record(1), 2, "0") == record(1)


def test_hard_negatives_follow_the_passages_of_the_rows(encoder):
    shares = [[record(0), example(1, negatives=2)], [example(2, positives=1, negatives=0), example(3, positives=2)]]
    parts = [collate(encoder, shares, rank, MULTI_P_I, instruction_negatives=3, seed="0") for rank in (0, 1)]
    texts = [[encoder.tokenizer.decode(p.ids, skip_special_tokens=True) for p in part.passages] for part in parts]
    assert texts[0] == [*(t.passage for t in flatten(record(0))), "answer 1 0", "wrong 1 0", "wrong 1 1"]
    assert texts[1] == ["answer 2 0", "answer 3 0", *(f"wrong 3 {n}" for n in range(5))]
    assert [part.hard_counts for part in parts] == [[0, 0, 0, 2, 0, 5]] * 2
    assert [part.hard_sizes for part in parts] == [[2, 5]] * 2
    assert [part.other_sizes for part in parts] == [[2, 1]] * 2
    assert [row for row, _ in parts[0].other_positives] == [3, 3]
    assert parts[1].instruction_candidates == [[], []]  # no instructions, so no negatives among them


def test_a_row_without_an_instruction_has_only_its_poisoned_one():
    pool = ["good 0", "good 1"]
    plain, poisoned, instructed = (
        flatten(example(0, **fields))[0]
        for fields in ({}, {"negative_instruction": "bad"}, {"instruction": "good 0", "negative_instruction": "bad"})
    )
    assert other_instructions(plain, pool, 5) == []
    assert other_instructions(poisoned, pool, 5) == ["bad"]
    assert other_instructions(instructed, pool, 5) == ["bad", "good 1"]
