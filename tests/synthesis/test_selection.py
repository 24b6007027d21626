import numpy as np
import pytest

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.synthesis import selection
from infembed_ray.synthesis.selection import select
from infembed_ray.synthesis.sources import Source
from tests.support.files import write_jsonl


def clustered(number, clusters, seed=0):
    """Unit vectors around some directions; the first cluster has half of them."""
    rng = np.random.default_rng(seed)
    directions = rng.normal(size=(clusters, 16))
    of = np.where(rng.random(number) < 0.5, 0, rng.integers(clusters, size=number))
    vectors = directions[of] + 0.3 * rng.normal(size=(number, 16))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def chosen(vectors, wanted, seed=0):
    return select(map(str, range(len(vectors))), wanted, lambda texts: vectors[[int(text) for text in texts]], seed)


def distance(vectors, places):
    """Mean cosine distance of all vectors to the nearest chosen one."""
    return np.mean(1 - (vectors @ vectors[places].T).max(axis=1))


@pytest.mark.parametrize("wanted", [5, 30, 100])
def test_the_chosen_cover_the_set_better_than_any_of_many_random_choices(wanted):
    vectors = clustered(1000, 30)
    found = distance(vectors, chosen(vectors, wanted))
    rng = np.random.default_rng(1)
    assert found < min(distance(vectors, rng.choice(1000, wanted, replace=False)) for _ in range(30))


def test_the_choice_depends_on_the_seed_and_not_on_the_blocks(monkeypatch):
    vectors = clustered(500, 20)
    first = chosen(vectors, 40, seed=3)
    assert (chosen(vectors, 40, seed=4) != first).any()
    monkeypatch.setattr(selection, "AT_ONCE", 7)
    assert (chosen(vectors, 40, seed=3) == first).all()


@pytest.mark.parametrize(
    ("number", "different", "wanted"), [(50, 50, 49), (50, 3, 10), (50, 1, 20), (8, 8, 8), (3, 3, 9)]
)
def test_as_many_as_wanted_are_chosen_in_order_also_of_equal_texts(number, different, wanted):
    vectors = clustered(different, 3)[np.arange(number) % different]
    found = chosen(vectors, wanted)
    assert found.tolist() == sorted(set(found.tolist()))
    assert len(found) == min(number, wanted)


def test_a_source_yields_the_chosen_seeds_in_their_order_up_to_the_limit(tmp_path):
    vectors = clustered(60, 10)
    file = write_jsonl(tmp_path / "seeds.jsonl", [{"id": f"s{n}", "query": f"{n}", "passage": "p"} for n in range(60)])
    given = {"seeds": str(file), "output": "o", "select": {"seeds": 12, "encoder": "m"}, "limit": 10}
    source = Source(SynthesizeSettings.from_mapping(given))
    source.choose(12, lambda texts: vectors[[int(text.split("\n")[0]) for text in texts]])
    expected = [f"s{place}" for place in chosen(vectors, 12)][:10]
    assert [seed.id for seed in source] == expected
    assert [seed.id for seed in source] == expected
    assert (source.survey().seeds, len(source.survey().pool)) == (10, 1)


def test_one_seed_is_the_nearest_to_all_together():
    vectors = clustered(200, 5)
    assert chosen(vectors, 1).tolist() == [int((vectors.astype(np.float64) @ vectors.T).sum(axis=1).argmax())]
