import random

from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records import Record
from infembed_ray.training.tuples import collate, flatten, instruction_negatives


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


def test_a_record_becomes_the_three_official_tuples():
    got = [(t.instruction, t.query, t.passage) for t in flatten(record(1))]
    assert got == [
        ("good 1", "query 1", "passage 1"),
        ("bad 1", "query 1", "first negative 1"),
        ("good 1", "other query 1", "second negative 1"),
    ]


@given(st.integers(1, 5), st.integers(0, 8), st.integers(0, 99))
def test_instruction_negatives_never_repeat_and_never_hold_the_rows_own_instruction(records, count, seed):
    # Two records share one instruction: identity is by text, not by row.
    tuples = [t for n in range(records) for t in flatten(record(n, instruction="shared" if n < 2 else None))]
    drawn = instruction_negatives(tuples, count, random.Random(seed))
    available = {t.instruction for t in tuples}
    for t, row in zip(tuples, drawn, strict=True):
        assert len(row) == len(set(row)) == min(count, len(available - {t.instruction}))
        assert t.instruction not in row
        if count:
            assert row[0] == t.poisoned


def test_equal_texts_have_equal_identities_and_queries_carry_their_negatives(minilm):
    encoder = InstructionEncoder.from_pretrained(minilm)
    records = [record(1), record(2, instruction="good 1")]
    batch = collate(encoder, records, negatives=2, rng=random.Random(0))
    assert len(batch.passages) == 6
    assert len(batch.queries) == 6 + sum(batch.negative_counts)
    assert batch.negative_counts == [2] * 6
    assert len(set(batch.passage_ids)) == 6
    decoded = encoder.tokenizer.decode(batch.queries[6], skip_special_tokens=True)
    assert decoded == "bad 1 query 1"
    twice = collate(encoder, records, negatives=2, rng=random.Random(0))
    assert twice == batch
