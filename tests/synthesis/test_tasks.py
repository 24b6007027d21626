from collections import Counter

from infembed_ray.records.tables import Seed
from infembed_ray.synthesis.distributed import partition_of


def test_the_texts_of_a_seed_decide_its_partition_and_partitions_have_about_equal_sizes() -> None:
    sizes = Counter(partition_of(Seed(str(n), f"query {n}", f"passage {n}"), 8) for n in range(8000))
    assert sizes.keys() == {f"{number}of8" for number in range(1, 9)}
    assert 900 < min(sizes.values()) <= max(sizes.values()) < 1100
    assert partition_of(Seed("a", "query 1", "passage 1"), 8) == partition_of(Seed("b", "query 1", "passage 1"), 8)
