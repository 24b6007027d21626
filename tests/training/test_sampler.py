from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.training.collate import collate, token_counts
from infembed_ray.training.dataset import Dataset
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


def test_order_differs_between_epochs_and_seeds():
    one = list(Sampler(20, 1, 20, 2, seed=1).rows())
    assert one[0] != one[1]
    assert one[0] != next(iter(Sampler(20, 1, 20, 1, seed=2).rows()))


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


# --------------------------------------------------------------------------------------------------- unique texts

texts = st.lists(st.lists(st.integers(0, 12), max_size=3, unique=True), min_size=6, max_size=40)
apart = st.builds(
    lambda texts, workers, per_step, seed: Sampler(len(texts), workers, per_step, 2, seed, texts=texts),
    texts,
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(0, 99),
)


def repeats(step, texts):
    """Count the records of a step that share a text with an earlier one."""
    seen, count = set(), 0
    for row in step:
        count += not seen.isdisjoint(texts[row])
        seen |= set(texts[row])
    return count


@given(apart)
def test_unique_texts_keep_every_record_once_in_equal_steps_and_count_repeats(sampler):
    steps = flat(sampler.rows())
    assert len(steps) == sampler.steps
    for epoch in range(2):
        of_epoch = steps[epoch * sampler.steps_per_epoch : (epoch + 1) * sampler.steps_per_epoch]
        assert Counter(chain(*of_epoch)) == Counter(range(sampler.records))
        assert max(map(len, of_epoch)) - min(map(len, of_epoch)) <= 1
    first = steps[: sampler.steps_per_epoch]
    assert sampler.repeated >= sum(repeats(step, sampler.texts) for step in first) >= bool(sampler.repeated)
    assert flat(sampler.rows(1)) == steps[1:]
    if sampler.per_step >= 2 * sampler.workers:  # otherwise more workers make fewer steps
        assert flat(replace(sampler, workers=1).rows()) == steps


@given(st.integers(2, 8), st.integers(2, 6), st.integers(0, 99))
def test_texts_with_enough_steps_are_never_repeated_in_a_step(count, per_step, seed):
    shared = [[n % per_step] for n in range(count * per_step)]  # each text once in every step, without slack
    sampler = Sampler(len(shared), 1, per_step, 1, seed, texts=shared)
    assert sampler.repeated == 0
    assert all(repeats(step, shared) == 0 for step in flat(sampler.rows()))


def test_text_with_too_few_steps_is_spread_over_all_and_repeats_counted():
    shared = [[0] if n < 15 else [] for n in range(40)]
    sampler = Sampler(40, 2, 4, 1, 0, texts=shared)
    assert sampler.steps == 10
    assert sampler.repeated == 5
    assert all(any(row < 15 for row in step) for step in flat(sampler.rows()))


def test_record_drawn_twice_by_a_mixture_is_never_twice_in_a_step():
    sampler = Sampler(40, 1, 4, 1, 0, {"a": 1, "b": 1}, ["a"] * 5 + ["b"] * 35, texts=[[] for _ in range(40)])
    steps = flat(sampler.rows())
    assert max(Counter(chain(*steps)).values()) == 4
    assert all(len(set(step)) == len(step) for step in steps)
    assert sampler.repeated == 0


# ------------------------------------------------------------------------------------------------------ token budget

budgeted = st.builds(
    lambda tokens, workers, per_step, seed: Sampler(
        len(tokens), workers, 1, 3, seed, tokens=tokens, tokens_per_step=per_step
    ),
    st.lists(st.integers(1, 40), min_size=20, max_size=60),
    st.integers(1, 3),
    st.integers(150, 500),
    st.integers(0, 99),
)


@given(budgeted)
def test_steps_stay_within_the_token_budget_and_shares_are_balanced(sampler):
    steps = list(sampler.rows())
    longest = max(sampler.tokens)
    assert len(steps) == sampler.steps
    for epoch in range(3):
        of_epoch = steps[epoch * sampler.steps_per_epoch : (epoch + 1) * sampler.steps_per_epoch]
        assert Counter(chain(*flat(of_epoch))) == Counter(range(sampler.records))
        loads = [sum(sampler.tokens[row] for row in step) for step in flat(of_epoch)]
        assert max(loads) <= sampler.tokens_per_step
        assert max(loads) - min(loads) <= 2 * longest
    for step in steps:
        assert all(step)
        loads = [sum(sampler.tokens[row] for row in share) for share in step]
        assert max(loads) - min(loads) <= 2 * longest
    assert flat(replace(sampler, workers=1).rows()) == flat(steps)
    assert list(sampler.rows(2)) == steps[2:]


@given(budgeted)
def test_token_budget_needs_few_extra_steps(sampler):
    assume(sampler.tokens_per_step >= 6 * max(sampler.tokens))
    assert sampler.steps_per_epoch <= -(-sum(sampler.tokens) // (sampler.tokens_per_step - max(sampler.tokens))) + 1


def test_token_counts_are_those_of_the_records_own_tuples(minilm):
    encoder = InstructionEncoder.from_pretrained(minilm, device="meta")
    records = [record(n) for n in range(3)]
    own = [collate(encoder, [[r]], 0, MULTI_P_I, instruction_negatives=0) for r in records]
    assert token_counts(encoder, records) == [batch.tokens for batch in own]


# ------------------------------------------------------------------------------------------------------ settings


def settings(**changes):
    return TrainSettings(records="r", model="m", output="o", workers=2, records_per_step=4, **changes)


@pytest.fixture(scope="module")
def encoder(minilm):
    return InstructionEncoder.from_pretrained(minilm, device="meta")


def test_records_of_a_file_and_of_a_list_are_sampled_alike(encoder, tmp_path):
    records = [replace(record(n), source="ab"[n % 2], instruction_positive=f"good {n // 2}") for n in range(12)]
    for changes in ({"mixture": {"a": 2, "b": 1}, "unique_texts": True}, {"tokens_per_step": 600}):
        asked = settings(**changes)
        dataset = Dataset.write(tmp_path / "a.arrow", records, lambda some: token_counts(encoder, some))
        assert list(Sampler.from_settings(asked, dataset, encoder).rows()) == list(
            Sampler.from_settings(asked, records, encoder).rows()
        )


def test_records_are_never_divided_among_workers(encoder):
    """A share has all three tuples of its records, so every row has its poisoned instruction among its candidates."""
    records = [record(n) for n in range(8)]
    for rows in Sampler.from_settings(settings(), records, encoder).rows():
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
        ({"tokens_per_step": 64}, r"tokens_per_step=64: too small for one record per worker.*set at least \d+"),
        (
            {"tokens_per_step": 900, "unique_texts": True},
            "unique_texts=true: does not apply to steps by tokens_per_step",
        ),
    ],
)
def test_records_that_do_not_fit_the_settings_are_rejected(encoder, changes, message):
    records = [replace(record(n), source="msmarco" if n % 2 else "unknown") for n in range(8)]
    with pytest.raises(InputError, match=message):
        Sampler.from_settings(
            settings(**changes) if "workers" not in changes else settings().model_copy(update=changes), records, encoder
        )
