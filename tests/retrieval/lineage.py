"""A lineage without Ray and without an encoder: its first version, changes, compactions, and what they must answer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.retrieval import versions
from infembed_ray.retrieval.build import Tasks
from infembed_ray.retrieval.compaction import Compaction
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.updates.write_ahead_log import Change, ChangeLog, Delete, Put
from infembed_ray.retrieval.versions import IndexFacts, change_log
from infembed_ray.storage.steps import Step, find_input
from tests.retrieval.oracle import DIMENSION, METADATA, Oracle, document, write_shards
from tests.retrieval.vectors import unit_vectors

QUERIES = unit_vectors(3, DIMENSION, seed=5)
BASE = [document(f"d{n}", n, 2018 + n % 5) for n in range(40)]


def first_step(output: str, documents: Sequence[Put] = BASE, **settings: Any) -> Step:
    """The step that builds the first version of an index."""
    asked = IndexSettings(corpus="corpus", model="model", output=output, metadata=METADATA, **settings)
    return Step("index", asked, output, {}, {"corpus": str(len(documents))})


def publish(output: Path, documents: Sequence[Put] = BASE, precision: str = "float32", **settings: Any) -> Path:
    """The first version of an index."""
    step = first_step(str(output), documents, **settings)
    with step.publish() as staging:
        facts = IndexFacts(
            encoder="aaaa",
            model="model",
            template="instruction_first",
            dimension=DIMENSION,
            passages=len(documents),
            metadata=METADATA,
            shards=write_shards(
                staging.path, documents, settings.get("shards", 2), None, precision, settings.get("lexical", False)
            ),
            lineage=step.identity,
        )
        staging.facts = {"index": facts.as_json()}
    return step.path


def log_of(output: str | Path) -> ChangeLog:
    index = Index.describe(output)
    return change_log(index.path, index.facts)


def fold(work: Compaction) -> Path:
    """Run a compaction without Ray."""
    step = work.step()
    work.run(step, Tasks())
    return step.path


def check(index: Index, oracle: Oracle, sequence: int) -> None:
    assert [live.sequence for live in index._live] == [sequence] * len(index.shards)
    for query, hits in zip(QUERIES, index.search(QUERIES, 100), strict=True):
        oracle.check(hits, query, 100, sequence)
    for query, hits in zip(QUERIES, index.search(QUERIES, 7, {"year": {"gte": 2020}}), strict=True):
        oracle.check(hits, query, 7, sequence, 2020)


def changes(seed: int, count: int = 10) -> list[Change]:
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 60, count).tolist()
    return [Delete(f"d{n}") if rng.random() < 0.4 else document(f"d{n}", 100 * seed + n, 2018 + n % 5) for n in numbers]


def fold_all(output: Path, keep: int | None = None) -> str:
    """Compact and prune, as `infembed index compact` does; the new version's name."""
    base = find_input(str(output), "index")
    made = fold(Compaction.open(str(output)))
    versions.prune(base, keep)
    return made.name


def segments(output: Path) -> list[int]:
    return sorted(int(file.stem) for file in log_of(output).directory.iterdir())
