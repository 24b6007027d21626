import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.errors import InputError
from infembed_ray.records.tables import Seed
from infembed_ray.synthesis import preflight
from infembed_ray.synthesis.preflight import SeedReader
from tests.support.files import write_jsonl


def reader(path: Path, **values: Any) -> SeedReader:
    return SeedReader(SynthesizeSettings.from_mapping({"seeds": str(path), "output": "", **values}))


def table(count: int) -> list[dict[str, Any]]:
    return [{"id": f"s{n}", "query": f"query {n}", "passage": f"passage {n}"} for n in range(count)]


def test_the_limit_takes_the_first_seeds_but_the_pool_has_all_passages(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", table(9))
    few = reader(path, limit=4)
    assert [seed.id for seed in few] == [seed.id for seed in few] == ["s0", "s1", "s2", "s3"]
    assert few.survey()[0] == 4
    assert few.survey()[1] == reader(path).survey()[1] == tuple(f"passage {n}" for n in range(9))
    assert reader(path, limit=40).survey()[0] == 9


def test_columns_and_split_choose_what_is_read(tmp_path: Path) -> None:
    rows = [{"key": n, "query": "q", "passage": "p", "split": split} for n, split in enumerate(("train", "dev"))]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert list(reader(path, columns={"id": "key"}, split="dev")) == [Seed("1", "q", "p", split="dev")]


def test_bad_seeds_are_refused_by_the_survey(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*table(2), {"id": "x", "query": "q", "passage": " "}])
    with pytest.raises(InputError, match="row 3: column passage is empty"):
        reader(path, limit=1).survey()
    left = reader(path, on_bad_row="reject")
    assert (left.survey()[0], [row["where"] for row in left.bad.rows]) == (2, ["row 3"])


def test_lone_surrogates_in_seeds_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"id": "1\\ud83d", "query": "q \\ud83d!", "passage": "\\ud83d\\ude00 \\ude00", "topic": "\\ud83d"}\n'
    )
    assert list(reader(path)) == [Seed("1\ufffd", "q \ufffd!", "\U0001f600 \ufffd", topic="\ufffd")]
    assert reader(path).survey()[0] == 1


@settings(deadline=None)
@given(st.lists(st.text(max_size=3), max_size=40), st.integers(1, 12), st.randoms(use_true_random=False))
def test_the_pool_does_not_depend_on_the_order_of_the_passages(
    passages: list[str], size: int, rng: random.Random
) -> None:
    def pool(texts: Iterable[str]) -> tuple[str, ...]:
        return preflight.sampled((Seed("", "", text) for text in texts), size)[1]

    shuffled = passages[:]
    rng.shuffle(shuffled)
    assert set(pool(passages)) == set(pool(shuffled))
    assert len(pool(passages)) == min(size, len(set(passages)))
    places = [passages.index(passage) for passage in pool(passages)]
    assert places == sorted(places)
    if len(set(passages)) <= size:
        assert pool(passages) == tuple(dict.fromkeys(passages))


def test_the_development_msmarco_seeds_are_read(shared_data: Path) -> None:
    assert reader(shared_data / "msmarco_seeds" / "seeds.jsonl").survey()[0] == 1743
