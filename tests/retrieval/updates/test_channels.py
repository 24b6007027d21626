"""Candidates of several channels in live shards, against brute force over all documents."""

from pathlib import Path

import numpy as np
import pytest

from infembed_ray.retrieval.answers import ShardAnswer, ShardQuery
from infembed_ray.retrieval.lexical import DeltaTerms, terms_of
from infembed_ray.retrieval.passages import row_of
from infembed_ray.retrieval.updates import live_shard
from infembed_ray.retrieval.updates.live_shard import LiveShard
from infembed_ray.retrieval.updates.write_ahead_log import ChangeLog, Delete, Put
from tests.retrieval.oracle import DIMENSION, METADATA, Oracle, document, open_live, write_shards
from tests.retrieval.vectors import unit_vectors

WORDS = ["apple", "river", "stone", "cloud", "tiger", "violin", "copper", "meadow"]
QUERY = "tiger near the river"
DEPTH = 4


def text_of(seed: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, 6))


def lexical_scores(shard: LiveShard, documents: dict[str, Put], base: dict[str, Put]) -> dict[str, float]:
    """BM25 of documents: those of the base by its postings, the others by the formula for texts put since."""
    index = shard.base.lexical
    assert index is not None
    of_base = index.scores(terms_of(QUERY))
    scores = {}
    for id, current in documents.items():
        if base.get(id) is current:
            row = row_of(shard.base.passages, id)
            assert row is not None
            scores[id] = float(of_base[row])
        else:
            delta = DeltaTerms()
            delta.add(0, [current.text])
            scores[id] = float(delta.scores(index, terms_of(QUERY), 1)[0])
    return scores


def best(scores: dict[str, float]) -> tuple[set[str], set[str]]:
    """The ids that must be and may be among the best `DEPTH`; scores of 0 are none."""
    ordered = sorted((score for score in scores.values() if score), reverse=True)[:DEPTH]
    least = ordered[-1] if ordered else np.inf
    return {i for i, s in scores.items() if s > least + 1e-6}, {i for i, s in scores.items() if s >= least - 1e-6}


@pytest.mark.parametrize("since", [None, 2020])
def test_candidates_are_the_best_of_each_channel_with_exact_scores(
    tmp_path: Path, since: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_shard, "_DEAD_ROWS", 6)
    rng = np.random.default_rng(5)
    base = [document(f"d{n}", n, 2018 + n % 4, text_of(n)) for n in range(40)]
    facts = write_shards(tmp_path / "v1", base, 2, lexical=True)
    log = ChangeLog(tmp_path / "changes", METADATA, DIMENSION, 2)
    oracle = Oracle(base)
    shards = open_live(tmp_path / "v1", facts, tmp_path / "changes")
    for step in range(12):
        changes = [
            Delete(id) if rng.random() < 0.3 else document(id, 1000 * step + n, 2018 + n % 4, text_of(1000 * step + n))
            for n, id in enumerate(f"d{i}" for i in rng.choice(60, 5, replace=False))
        ]
        oracle.apply(changes)
        log.append(changes)
        wanted = unit_vectors(2, DIMENSION, step)
        filter = None if since is None else {"year": {"gte": since}}
        query = ShardQuery(wanted, 2, filter, texts=["nothing known", QUERY], depth=DEPTH)
        seen: set[str] = set()
        for shard in shards:
            shard.refresh()
            (answer,) = shard.search_many([query])
            assert isinstance(answer, ShardAnswer)
            assert answer.lexical is not None
            mine = {
                id: d
                for id, d in oracle.states[-1].items()
                if (row_of(shard.base.passages, id) is not None or id in shard._snapshot.rows)
                and (since is None or d.metadata["year"] >= since)
            }
            words = lexical_scores(shard, mine, oracle.states[0])
            for vector, has_words in ((0, False), (1, True)):
                hits = answer.hits[vector]
                ids = [hit.id for hit in hits]
                dense = {id: float(np.float64(d.vector) @ np.float64(wanted[vector])) for id, d in mine.items()}
                np.testing.assert_allclose([hit.score for hit in hits], [dense[id] for id in ids], atol=1e-6)
                of_words = [words[id] if has_words else 0.0 for id in ids]
                np.testing.assert_allclose(answer.lexical[vector], of_words, rtol=1e-5)
                must, may = map(set, best({id: score + 10 for id, score in dense.items()}))
                if has_words:
                    more = best(words)
                    must, may = must | more[0], may | more[1]
                assert must <= set(ids) <= may
                assert len(set(ids)) == len(ids)
                assert [hit.text for hit in hits] == [mine[id].text for id in ids]
                seen |= set(ids)
        assert seen <= oracle.states[-1].keys()


def test_words_need_a_lexical_index(tmp_path: Path) -> None:
    facts = write_shards(tmp_path / "v1", [document("a", 1)], 1)
    (shard,) = open_live(tmp_path / "v1", facts, tmp_path / "changes")
    (answer,) = shard.search_many([ShardQuery(unit_vectors(1, DIMENSION), 1, texts=["a"], depth=5)])
    assert "lexical=true" in str(answer)


@pytest.mark.parametrize("count", [0, 3])
def test_a_small_or_empty_shard_gives_what_it_has(tmp_path: Path, count: int) -> None:
    base = [document(f"d{n}", n, text=text_of(n)) for n in range(count)]
    facts = write_shards(tmp_path / "v1", base, 1, lexical=True)
    (shard,) = open_live(tmp_path / "v1", facts, tmp_path / "changes")
    (answer,) = shard.search_many([ShardQuery(unit_vectors(1, DIMENSION), 2, texts=[QUERY], depth=9)])
    assert isinstance(answer, ShardAnswer)
    assert sorted(hit.id for hit in answer.hits[0]) == sorted(d.id for d in base)
