"""How a live shard takes up changes: polling, in pieces, up to a sequence, and when one is damaged or missing."""

from pathlib import Path

import pyarrow as pa
import pytest

from infembed_ray.retrieval.shards import Hit
from infembed_ray.retrieval.updates import live_shard
from infembed_ray.retrieval.updates.live_shard import LiveShard
from infembed_ray.retrieval.updates.write_ahead_log import LogFault
from tests.retrieval.oracle import document
from tests.retrieval.updates.test_live_shard import ids_of, log_of, one_shard


def test_repeated_puts_of_a_passage_do_not_accumulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_shard, "_DEAD_ROWS", 8)
    shard = one_shard(tmp_path, [document(id, n) for n, id in enumerate("abc")])
    for n in range(40):
        log_of(tmp_path).append([document("a", n), document("z", n)])
        shard.refresh()
        assert len(shard._snapshot.live) <= 10
        assert shard.changed == 2
    assert set(ids_of(shard)) == set("abcz")
    assert shard.get("a") == Hit("a", 0.0, "a of 39", {"year": None, "day": "2024-02-11"})


def test_a_damaged_change_stops_refreshing_but_not_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = one_shard(tmp_path, [document("a", 1)])
    log = log_of(tmp_path)
    for id in "bcd":
        log.append([document(id, 2)])
    second = log.directory / f"{2:012d}.arrow"
    whole = second.read_bytes()
    second.write_bytes(whole[:-1])
    monkeypatch.setattr(live_shard, "_REFRESHES_PER_LOOK", 2)
    for _ in range(2):
        with pytest.raises(LogFault, match=r"000000000002\.arrow is corrupted"):
            shard.refresh()
        assert (set(ids_of(shard)), shard.sequence) == (set("ab"), 1)
    assert shard.head == 3
    with pytest.raises(LogFault, match=r"000000000002\.arrow is corrupted"):
        LiveShard(shard.base, log, 0, 0)  # a new replica must not serve fewer changes
    second.write_bytes(whole)
    assert shard.refresh()
    assert (set(ids_of(shard)), shard.sequence) == (set("abcd"), 3)


def test_a_log_shorter_than_the_folded_changes_is_refused(tmp_path: Path) -> None:
    shard = one_shard(tmp_path, [document("a", 1)])
    with pytest.raises(LogFault, match=r"000000000005\.arrow is missing"):
        LiveShard(shard.base, log_of(tmp_path), 0, folded=5)


def test_a_log_of_any_size_is_applied_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = one_shard(tmp_path, [document("a", 1)])
    for n in range(30):
        log_of(tmp_path).append([document(f"d{n % 20}", n)])
    most = 4 * max(table.nbytes for _, table in log_of(tmp_path).read(0))
    monkeypatch.setattr(live_shard, "_PIECE_BYTES", most)
    pieces: list[int] = []
    apply = LiveShard._apply

    def measured(self: LiveShard, sequence: int, tables: list[pa.Table]) -> None:
        pieces.append(sum(table.nbytes for table in tables))
        apply(self, sequence, tables)

    monkeypatch.setattr(LiveShard, "_apply", measured)
    assert shard.refresh()
    assert len(pieces) > 5
    assert max(pieces) <= 2 * most
    assert (len(shard), shard.sequence) == (21, 30)
    assert shard.get("d9") == Hit("d9", 0.0, "d9 of 29", {"year": None, "day": None})


def test_a_change_that_goes_missing_while_serving_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_shard, "_REFRESHES_PER_LOOK", 3)
    shard = one_shard(tmp_path, [document("a", 1)])
    log = log_of(tmp_path)
    for id in "bc":
        log.append([document(id, 2)])
    (log.directory / f"{1:012d}.arrow").unlink()
    with pytest.raises(LogFault, match=r"000000000001\.arrow is missing"):
        for _ in range(3):
            shard.refresh()
    with pytest.raises(LogFault, match=r"000000000001\.arrow is missing"):
        shard.refresh()  # until it is there again
    assert (ids_of(shard), shard.sequence, shard.head) == (["a"], 0, 2)
