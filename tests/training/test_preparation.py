"""Preparation of steps in a thread: the same as without, in order, and ended with its consumer."""

import threading
import time
from contextlib import closing

import pytest
import torch

from infembed_ray.config.training import TrainSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.pipeline import AHEAD, ahead
from infembed_ray.training.collate import collate
from infembed_ray.training.losses import Objective
from infembed_ray.training.preparation import Preparer
from tests.support.waiting import wait_until
from tests.training.test_collate import record

RECORDS = [record(n) for n in range(8)]
ROWS = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[1, 6], [0]]]


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prepare")]


def test_results_come_in_order_and_ahead_of_their_use():
    started = []

    def slow(n):
        started.append(n)
        time.sleep(0.01)
        return n * n

    results = ahead(map(slow, range(6)))
    assert next(results) == 0
    wait_until(lambda: len(started) == 1 + AHEAD)  # prepared while nothing was asked for
    time.sleep(0.1)
    assert started == list(range(1 + AHEAD))
    assert list(results) == [1, 4, 9, 16, 25]
    assert not threads()


def test_an_error_reaches_the_consumer_at_its_place():
    results = ahead(1 // (2 - n) for n in range(9))
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert not threads()


def test_a_consumer_that_stops_ends_the_thread():
    with closing(ahead(range(1000))) as results:
        assert next(results) == 0
    assert not threads()


def test_batches_are_those_of_collate_while_the_same_tokenizer_is_in_use(minilm):
    """A validation tokenizes and encodes in the meantime, with other limits and without dropout."""
    encoder = InstructionEncoder.from_pretrained(minilm).train()
    settings = TrainSettings(records="-", model="-", output="-", instruction_negatives=2, passage_length=64, workers=2)
    preparer = Preparer(settings, RECORDS, 1, encoder)
    batches = ahead(map(preparer.prepare, enumerate(ROWS * 20)))
    encoder.eval()
    for number, got in enumerate(batches):
        for length in (8, 16):
            encoder.tokenizer(["a passage of some length"] * 20, truncation=True, max_length=length)
        shares = [[RECORDS[row] for row in share] for share in ROWS[number % 3]]
        objective = Objective.from_settings(settings)
        expected = collate(encoder, shares, 1, objective, instruction_negatives=2, seed=f"42/{number}")
        ids = [record.id for share in shares for record in share]
        assert (got.seed, got.ids, got.batch) == (f"42/{number}", ids, expected)
        [(texts, passes)] = got.groups
        assert texts == expected.queries + expected.passages
        assert [layout.side for _, layout in passes] == ["query", "passage"]
        for rows, layout in passes:
            assert [len(texts[row]) for row in rows] == layout.lengths.tolist()
            assert layout.input_ids.device == torch.device("cpu")
    assert not encoder.training
