"""What a live index must answer: a dictionary of documents and float64 arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from infembed_ray.config.retrieval import FieldType
from infembed_ray.retrieval.shard_files import ShardFacts
from infembed_ray.retrieval.shards import Build, Hit, Shard, shard_of
from infembed_ray.retrieval.updates.live_shard import LiveShard
from infembed_ray.retrieval.updates.write_ahead_log import Change, ChangeLog, Put
from tests.support.shards import write_shard

DIMENSION = 6
METADATA: dict[str, FieldType] = {"year": "integer", "day": "date"}


class Oracle:
    """Documents by id, in every state that they have had."""

    def __init__(self, documents: Sequence[Put]) -> None:
        self.states: list[dict[str, Put]] = [{document.id: document for document in documents}]

    def apply(self, changes: Sequence[Change]) -> None:
        """The changes of one segment."""
        state = dict(self.states[-1])
        for change in changes:
            if isinstance(change, Put):
                state[change.id] = change
            else:
                state.pop(change.id, None)
        self.states.append(state)

    def check(self, hits: Sequence[Hit], query: np.ndarray, k: int, sequence: int, since: int | None = None) -> None:
        """Are these the best of the state at a sequence; with the filter {"year": {"gte": since}}, if that is given?"""
        state = {
            id: document
            for id, document in self.states[sequence].items()
            if since is None or ((year := document.metadata.get("year")) is not None and year >= since)
        }
        exact = {id: score(document, query) for id, document in state.items()}
        assert len(hits) == min(k, len(state))
        assert len({hit.id for hit in hits}) == len(hits)
        for hit in hits:
            assert hit.id in state, f"{hit.id} is not there at {sequence}"
            document = state[hit.id]
            assert hit.text == document.text
            assert hit.metadata == {name: document.metadata.get(name) for name in METADATA}
            np.testing.assert_allclose(hit.score, exact[hit.id], atol=1e-6)
            assert (hit.chunk is None) == (document.chunks is None)
            if hit.chunk and document.chunks:
                assert hit.chunk.text == document.text[hit.chunk.start : hit.chunk.end]
                number = document.chunks[::2].index(hit.chunk.start)
                np.testing.assert_allclose(hit.score, np.float64(document.vector[number]) @ query, atol=1e-6)
        np.testing.assert_allclose([h.score for h in hits], sorted(exact.values(), reverse=True)[:k], atol=1e-6)
        assert [(h.score, h.id) for h in hits] == sorted(((h.score, h.id) for h in hits), reverse=True)


def score(document: Put, query: np.ndarray) -> float:
    """The inner product of a query with a document, or with its best chunk."""
    return float((np.float64(document.vector) @ np.float64(query)).max())


def write_shards(
    root: Path,
    documents: Sequence[Put],
    shards: int,
    factory: str | None = None,
    precision: str = "float32",
    lexical: bool = False,
    chunked: bool = False,
) -> list[ShardFacts]:
    """The documents as the shards of an index."""
    facts = []
    for number in range(shards):
        mine = [document for document in documents if shard_of(document.id, shards) == number]
        facts.append(
            write_shard(
                root / f"shard-{number:05d}",
                [document.id for document in mine],
                [document.text for document in mine],
                np.vstack([np.empty((0, DIMENSION)), *(document.vector for document in mine)]).astype(precision),
                {name: [_typed(name, document.metadata) for document in mine] for name in METADATA},
                METADATA,
                Build(factory, lexical=lexical),
                [document.chunks or [] for document in mine] if chunked else None,
            )
        )
    return facts


def _typed(name: str, metadata: Mapping[str, Any]) -> Any:
    value = metadata.get(name)
    return np.datetime64(value).astype(object) if METADATA[name] == "date" and value is not None else value


def open_live(
    root: Path, facts: Sequence[ShardFacts], directory: Path, folded: int = 0, chunked: bool = False
) -> list[LiveShard]:
    """All shards, live over the log in a directory."""
    log = ChangeLog(directory, METADATA, DIMENSION, len(facts), chunked)
    return [LiveShard(Shard.open(root, fact), log, number, folded) for number, fact in enumerate(facts)]


def document(id: str, seed: int, year: int | None = None, text: str | None = None) -> Put:
    """A document whose vector is a seed's."""
    vector = np.random.default_rng(seed).standard_normal(DIMENSION).astype(np.float32)
    day = None if seed % 3 else f"2024-02-{seed % 29 + 1:02d}"
    return Put(id, text or f"{id} of {seed}", vector / np.linalg.norm(vector), {"year": year, "day": day})


def cut_document(id: str, seed: int, year: int | None = None) -> Put:
    """A document with up to four chunks, which overlap; some have the same vector."""
    whole, count = document(id, seed, year), seed % 4 + 1
    vectors = np.stack([document("", seed + number // (1 + seed % 2)).vector for number in range(count)])
    bounds = [place for start in range(count) for place in (start, len(whole.text) - count + 1 + start)]
    return replace(whole, vector=vectors, chunks=bounds)
