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
def test_every_epoch_holds_every_record_once_and_no_worker_is_ever_without(sampler):
    steps = list(sampler.rows())
    assert len(steps) == sampler.steps
    most = 2 if sampler.per_worker == 1 else sampler.per_worker
    for epoch in range(sampler.epochs):
        of_epoch = steps[epoch * sampler.steps_per_epoch : (epoch + 1) * sampler.steps_per_epoch]
        seen = Counter(row for step in of_epoch for share in step for row in share)
        assert seen == Counter(range(sampler.records))
        sizes = [sum(map(len, step)) for step in of_epoch]
        assert max(sizes) - min(sizes) <= 1
        for step in of_epoch:
            lengths = [len(share) for share in step]
            assert len(lengths) == sampler.workers
            assert 1 <= min(lengths) <= max(lengths) <= min(most, min(lengths) + 1)


@given(st.integers(12, 60), st.integers(0, 99))
def test_the_order_depends_on_the_global_batch_not_on_the_workers(records, seed):
    def flat(workers):
        sampler = Sampler(records, workers, 12 // workers, 2, seed)
        return [[row for share in step for row in share] for step in sampler.rows()]

    assert flat(1) == flat(2) == flat(3) == flat(6)


@given(samplers, st.data())
def test_starting_later_gives_the_rest_of_the_same_order(sampler, data):
    start = data.draw(st.integers(0, sampler.steps))
    assert list(sampler.rows(start)) == list(sampler.rows())[start:]


def test_epochs_differ_and_seeds_differ():
    one = list(Sampler(20, 1, 20, 2, seed=1).rows())
    assert one[0] != one[1]
    assert one[0] != next(iter(Sampler(20, 1, 20, 1, seed=2).rows()))
