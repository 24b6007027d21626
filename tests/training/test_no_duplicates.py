"""Batch assignment without duplicate texts; test_sampler.py has its properties in an epoch."""

import random
from collections import Counter
from dataclasses import replace
from itertools import chain

from infembed_ray.training.no_duplicates import assign, shared_texts
from tests.training.test_collate import record


def test_shared_texts_are_found_between_records_and_by_kind():
    records = [record(0), record(1, instruction="good 0"), replace(record(2), query_negative="passage 0"), record(3)]
    shared = shared_texts(records)
    assert shared[0] == shared[1]
    assert [len(s) for s in shared] == [1, 1, 0, 0]  # a query is not a passage


def test_assignment_is_a_function_of_its_arguments():
    texts = [[n % 7, 7 + n % 10] for n in range(60)]
    one, other = (assign(range(60), texts, 12, random.Random(3)) for _ in range(2))
    assert one == other
    batches, repeated = one
    assert Counter(chain(*batches)) == Counter(range(60))
    assert {len(batch) for batch in batches} == {5}
    assert repeated == 0
    for batch in batches:
        assert max(Counter(text for row in batch for text in texts[row]).values()) == 1
