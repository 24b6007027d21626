from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.llm.partitions import Partition, route_of


@given(st.text(), st.text(), st.integers(1, 64))
def test_a_row_is_in_exactly_one_partition(query: str, passage: str, of: int) -> None:
    route = route_of(query, passage)
    assert [number for number in range(1, of + 1) if Partition(number, of).owns(route)] == [
        Partition.route(route, of).number
    ]


def test_partitions_have_about_equal_sizes() -> None:
    sizes = Counter(Partition.route(route_of(f"query {n}", f"passage {n}"), 8) for n in range(8000))
    assert len(sizes) == 8
    assert 900 < min(sizes.values()) <= max(sizes.values()) < 1100


def test_an_entry_without_a_route_belongs_to_every_partition() -> None:
    assert all(Partition(number, 3).owns("") for number in (1, 2, 3))


def test_the_name_of_a_file_tells_the_partition() -> None:
    third = Partition(3, 8)
    name = f"node-1-17-0123abcd-{third}.jsonl"
    assert Partition.in_name(name) == Partition.in_name(name.replace(".jsonl", ".000000000000512.jsonl")) == third
    assert Partition.in_name("node-1of2-17-0123abcd.jsonl") is None
    assert Partition.in_name("answers-3of8.jsonl") is None  # named by a user
    assert Partition.in_name(f"gpu-1of4.cluster-17-0123abcd-{third}.jsonl") == third
    assert third.reads(name)
    assert not Partition(4, 8).reads(name)
    assert Partition(4, 9).reads(name)
    assert third.reads("node-1-17-0123abcd.jsonl")
