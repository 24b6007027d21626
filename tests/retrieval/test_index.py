from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infembed_ray.errors import InputError
from infembed_ray.retrieval.index import Index, IndexFacts
from infembed_ray.retrieval.shards import Shard
from infembed_ray.storage import LATEST, MANIFEST
from tests.retrieval.vectors import unit_vectors


def write_index(
    root: Path, vectors: np.ndarray, shards: int, encoder: str = "aaaa", lineage: str = "v1", folded: int = 0
) -> Path:
    """An index over passages p0, p1, ...; row i goes to shard i mod shards."""
    root.mkdir(parents=True)
    facts = []
    for shard in range(shards):
        rows = range(shard, len(vectors), shards)
        ids, texts = [f"p{r}" for r in rows], [f"text {r}" for r in rows]
        facts.append(Shard.write(root / f"shard-{shard:05d}", ids, texts, vectors[list(rows)]))
    index = IndexFacts(
        encoder=encoder,
        model="some/model",
        template="instruction_first",
        dimension=vectors.shape[1],
        passages=len(vectors),
        shards=facts,
        lineage=lineage,
        folded=folded,
    )
    manifest = {"stage": "index", "identity": root.name, "created": f"2026-01-01T00:00:{folded:02d}+00:00"}
    (root / MANIFEST).write_text(json.dumps({**manifest, "index": index.as_json()}))
    return root


@settings(deadline=None, max_examples=12)
@given(n=st.integers(1, 60), d=st.integers(2, 16), shards=st.integers(1, 5), k=st.integers(1, 70), seed=st.integers(0))
def test_search_over_any_number_of_shards_is_exact(
    tmp_path_factory: pytest.TempPathFactory, n: int, d: int, shards: int, k: int, seed: int
) -> None:
    vectors, queries = unit_vectors(n, d, seed % 2**32), unit_vectors(3, d, (seed + 1) % 2**32)
    index = Index.open(write_index(tmp_path_factory.mktemp("index") / "v1", vectors, shards))
    exact = queries.astype(np.float64) @ vectors.astype(np.float64).T
    for row, hits in enumerate(index.search(queries, k)):
        assert len(hits) == min(k, n)
        scores = [hit.score for hit in hits]
        np.testing.assert_allclose(scores, np.sort(exact[row])[::-1][:k], atol=1e-5)
        assert [(h.score, h.id) for h in hits] == sorted(((h.score, h.id) for h in hits), reverse=True)
        for hit in hits:
            assert hit.text == f"text {hit.id[1:]}"
            np.testing.assert_allclose(hit.score, exact[row, int(hit.id[1:])], atol=1e-5)


def test_an_open_index_has_its_facts(tmp_path: Path) -> None:
    index = Index.open(write_index(tmp_path / "v1", unit_vectors(10, 4), 3))
    assert index.version == "v1"
    assert (index.facts.encoder, index.facts.dimension, index.facts.passages) == ("aaaa", 4, 10)
    assert [len(shard) for shard in index.shards] == [4, 3, 3] == [shard.passages for shard in index.facts.shards]


def test_facts_round_trip_through_the_manifest(tmp_path: Path) -> None:
    root = write_index(tmp_path / "v1", unit_vectors(10, 4), 3)
    manifest = json.loads((root / MANIFEST).read_text())["index"]
    facts = IndexFacts.from_json(manifest)
    assert facts.as_json() == manifest
    assert manifest["recall_at_10"] == 1.0
    assert manifest["bytes"] == sum(file.stat().st_size for file in root.glob("shard-*/*"))
    assert [shard["factory"] for shard in manifest["shards"]] == ["Flat"] * 3


def test_an_index_of_another_format_is_refused_with_the_remedy(tmp_path: Path) -> None:
    root = write_index(tmp_path / "v1", unit_vectors(10, 4), 1)
    manifest = json.loads((root / MANIFEST).read_text())
    for written, said in ((None, "format 1"), (3, "format 3")):
        changed = {**manifest["index"], "format": written}
        changed = {name: value for name, value in changed.items() if value is not None}
        (root / MANIFEST).write_text(json.dumps({**manifest, "index": changed}))
        with pytest.raises(InputError, match=f"an index of {said}, this version .* reads 2; build it again") as refusal:
            Index.open(root)
        assert "\n" not in str(refusal.value)


def test_versions_of_a_lineage_share_a_log_beside_them(tmp_path: Path) -> None:
    first = Index.open(write_index(tmp_path / "v1", unit_vectors(10, 4), 1))
    later = Index.open(write_index(tmp_path / "v2", unit_vectors(10, 4), 1, lineage="v1", folded=7))
    assert first.changes == later.changes == tmp_path / "changes" / "v1"


def test_an_output_directory_opens_its_latest_version(tmp_path: Path) -> None:
    write_index(tmp_path / "v1", unit_vectors(10, 4), 1)
    (tmp_path / LATEST).write_text("v1\n")
    assert Index.open(tmp_path).version == "v1"


def test_an_index_built_by_another_encoder_is_refused_naming_both(tmp_path: Path) -> None:
    path = write_index(tmp_path / "v1", unit_vectors(10, 4), 1, encoder="aaaa")
    Index.open(path, "aaaa")
    with pytest.raises(InputError, match=r"built by another encoder \(aaaa, some/model\) than the one given \(bbbb\)"):
        Index.open(path, "bbbb")


def test_a_directory_without_an_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"index=.*nowhere: no such file or directory"):
        Index.open(tmp_path / "nowhere")
    with pytest.raises(InputError, match="not a published output"):
        Index.open(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps({"stage": "train", "identity": "x"}))
    with pytest.raises(InputError, match="the output of `train`"):
        Index.open(tmp_path)


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    path = write_index(tmp_path / "v1", unit_vectors(10, 4), 2)
    (path / "shard-00001").rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"shard-00001/index\.faiss is missing"):
        Index.open(path)
