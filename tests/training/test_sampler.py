from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.training.collate import collate
from infembed_ray.training.sampler import Sampler
from tests.training.test_collate import MULTI_P_I, record

samplers = st.builds(
    Sampler,
    records=st.integers(6, 60),
    workers=st.integers(1, 5),
    per_step=st.integers(1, 20),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 99),
)


@given(samplers)
def test_every_epoch_has_every_record_once_and_every_share_has_a_record(sampler):
    steps = list(sampler.rows())
    assert len(steps) == sampler.steps
    most = max(sampler.per_step, 2 * sampler.workers - 1)  # at least one per worker
    for epoch in range(sampler.epochs):
        of_epoch = steps[epoch * sampler.steps_per_epoch : (epoch + 1) * sampler.steps_per_epoch]
        seen = Counter(row for step in of_epoch for share in step for row in share)
        assert seen == Counter(range(sampler.records))
        sizes = [sum(map(len, step)) for step in of_epoch]
        assert max(sizes) - min(sizes) <= 1
        for step in of_epoch:
            lengths = [len(share) for share in step]
            assert len(lengths) == sampler.workers
            assert 1 <= min(lengths) <= max(lengths) <= min(lengths) + 1
            assert sum(lengths) <= most


@given(st.integers(12, 60), st.integers(0, 99))
def test_order_does_not_depend_on_the_number_of_workers(records, seed):
    def flat(workers):
        sampler = Sampler(records, workers, 12, 2, seed)
        return [[row for share in step for row in share] for step in sampler.rows()]

    assert flat(1) == flat(2) == flat(3) == flat(6)


@given(samplers, st.data())
def test_later_start_gives_the_rest_of_the_same_order(sampler, data):
    start = data.draw(st.integers(0, sampler.steps))
    assert list(sampler.rows(start)) == list(sampler.rows())[start:]


def flat(steps):
    """Return the records of each step, over all workers."""
    return [list(chain.from_iterable(step)) for step in steps]


# ------------------------------------------------------------------------------------------------------- mixture

mixed = st.builds(
    Sampler,
    records=st.just(30),
    workers=st.integers(1, 3),
    per_step=st.integers(3, 12),
    epochs=st.integers(1, 5),
    seed=st.integers(0, 99),
    mixture=st.fixed_dictionaries({"a": st.floats(0.1, 9), "b": st.floats(0.1, 9), "c": st.sampled_from([0.0, 1.0])}),
    sources=st.permutations([*"aaaaaaaaaaaaaaaaaaaa", *"bbbbbbb", *"ccc"]),
)


@given(mixed)
def test_mixture_keeps_proportions_and_repeats_only_exhausted_sources(sampler):
    steps = flat(sampler.rows())
    size = sampler.epoch_size
    assert size == (30 if sampler.mixture["c"] else 27)
    total = sum(sampler.mixture.values())
    drawn = {source: [] for source in sampler.mixture}
    for epoch in range(sampler.epochs):
        of_epoch = list(chain(*steps[epoch * sampler.steps_per_epoch : (epoch + 1) * sampler.steps_per_epoch]))
        assert len(of_epoch) == size
        for source, weight in sampler.mixture.items():
            own = [row for row in of_epoch if sampler.sources[row] == source]
            assert abs(len(own) - size * weight / total) < 1
            drawn[source] += own
    for source, rows in drawn.items():
        times = Counter(rows)
        members = sampler.sources.count(source)
        if rows:  # over the run, the draws of two records differ by at most one
            assert max(times.values()) == -(-len(rows) // members)
            assert max(times.values()) - min(times[r] for r in range(30) if sampler.sources[r] == source) <= 1


@given(mixed, st.data())
def test_mixture_resumes_exactly_and_does_not_depend_on_the_workers(sampler, data):
    start = data.draw(st.integers(0, sampler.steps))
    assert list(sampler.rows(start)) == list(sampler.rows())[start:]
    assert flat(replace(sampler, workers=1).rows()) == flat(sampler.rows())


# ------------------------------------------------------------------------------------------------------ settings


def settings(**changes):
    return TrainSettings(records="r", model="m", output="o", workers=2, records_per_step=4, **changes)


@pytest.fixture(scope="module")
def encoder(minilm):
    return InstructionEncoder.from_pretrained(minilm, device="meta")


def test_records_are_never_divided_among_workers(encoder):
    """A share has all three tuples of its records, so every row has its poisoned instruction among its candidates."""
    records = [record(n) for n in range(8)]
    for rows in Sampler.from_settings(settings(), records).rows():
        shares = [[records[row] for row in share] for share in rows]
        for rank, share in enumerate(shares):
            batch = collate(encoder, shares, rank, MULTI_P_I, instruction_negatives=1)
            texts = [encoder.tokenizer.decode(q.ids, skip_special_tokens=True) for q in batch.queries]
            own = [texts[n] for n in batch.own]
            assert own == [
                text
                for n in (r.id[1:] for r in share)
                for text in (f"good {n} query {n}", f"bad {n} query {n}", f"good {n} other query {n}")
            ]
            assert [texts[row[0]] for row in batch.instruction_candidates[:2]] == [own[1], own[0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 9}, "workers=9: more than the 8 records; set workers=8"),
        ({"mixture": {"amsmarco": 1}}, r"mixture.amsmarco: no record has this source: did you mean msmarco\?"),
        ({"mixture": {"msmarco": 1}}, "mixture: records of source unknown have no weight; set mixture.unknown .0 to"),
        ({"mixture": {"msmarco": 0, "unknown": 0}}, "mixture: all weights are 0"),
        ({"mixture": {"msmarco": 1, "unknown": 0}, "workers": 5}, "workers=5: more than the 4 records"),
    ],
)
def test_records_that_do_not_fit_the_settings_are_rejected(changes, message):
    records = [replace(record(n), source="msmarco" if n % 2 else "unknown") for n in range(8)]
    with pytest.raises(InputError, match=message):
        Sampler.from_settings(settings().model_copy(update=changes), records)
