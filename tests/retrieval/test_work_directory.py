from __future__ import annotations

from pathlib import Path

import pytest

from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.retrieval.shard_files import VECTORS_FILE
from infembed_ray.retrieval.work_directory import WorkDirectory, work_directory
from infembed_ray.storage import Step


def test_chunks_cover_a_shard_and_grow_with_the_corpus(tmp_path: Path) -> None:
    work = WorkDirectory(tmp_path)
    chunks = work.chunks(1, 1300, 1300)
    assert [(chunk.start, chunk.count) for chunk in chunks] == [(0, 512), (512, 512), (1024, 276)]
    assert len({chunk.file for chunk in chunks}) == 3
    assert {chunk.count for chunk in work.chunks(0, 16_384, 10**9)} == {8192}
    assert work.chunks(0, 0, 10) == []


def test_encoded_chunks_and_joined_shards_are_not_missing(tmp_path: Path) -> None:
    work = WorkDirectory(tmp_path)
    first, second = work.chunks(0, 1000, 2000), work.chunks(1, 1000, 2000)
    assert work.missing([*first, *second]) == [*first, *second]
    first[0].file.parent.mkdir(parents=True)
    first[0].file.touch()
    work.shard(1).mkdir()
    (work.shard(1) / VECTORS_FILE).touch()
    assert work.missing([*first, *second]) == first[1:]


def test_builds_of_the_same_vectors_share_it_one_at_a_time(tmp_path: Path) -> None:
    def opened(**changes: object) -> tuple[Step, IndexSettings]:
        values = {"corpus": "c", "model": "m", "output": str(tmp_path / "index"), **changes}
        settings = IndexSettings.from_mapping(values)
        return Step("index", settings, settings.output, {}, {"corpus": "c"}), settings

    with work_directory(*opened()) as work:
        with pytest.raises(InputError, match="another run encodes the same corpus; wait for it to end"):
            work_directory(*opened(factory="HNSW32")).__enter__()
        with work_directory(*opened(shards=5)) as other:
            assert other.root != work.root
    with work_directory(*opened(factory="HNSW32")) as again:
        assert again.root == work.root
