from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.training.sampler import Sampler

samplers = st.builds(
    Sampler,
    records=st.integers(6, 60),
    workers=st.integers(1, 5),
    per_worker=st.integers(1, 7),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 99),
)


@given(samplers)
def test_workers_take_equal_disjoint_shares_and_miss_fewer_records_than_workers(sampler):
    steps = list(zip(*(sampler.rows(rank) for rank in range(sampler.workers)), strict=True))
    assert len(steps) == sampler.steps
    for epoch in range(sampler.epochs):
        shares = steps[epoch * sampler.steps_per_epoch : (epoch + 1) * sampler.steps_per_epoch]
        for share in shares:
            assert len({len(rows) for rows in share}) == 1
            assert 1 <= len(share[0]) <= sampler.per_worker
        seen = Counter(row for share in shares for rows in share for row in rows)
        assert set(seen.values()) <= {1}
        assert sampler.records - len(seen) < sampler.workers


@given(samplers, st.data())
def test_starting_later_gives_the_rest_of_the_same_order(sampler, data):
    start = data.draw(st.integers(0, sampler.steps))
    assert list(sampler.rows(0, start)) == list(sampler.rows(0))[start:]


def test_epochs_differ_and_seeds_differ():
    one = list(Sampler(20, 1, 20, 2, seed=1).rows(0))
    assert one[0] != one[1]
    assert one[0] != next(iter(Sampler(20, 1, 20, 1, seed=2).rows(0)))
