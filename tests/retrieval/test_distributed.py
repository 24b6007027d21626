from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infembed_ray.config import IndexSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.retrieval import distributed
from infembed_ray.retrieval.distributed import run, shard_of
from infembed_ray.retrieval.index import Index

TOPICS = ("espresso machines", "mountain glaciers", "tax returns", "sourdough bread", "satellite orbits")
ASPECTS = ("a beginner's guide", "common mistakes", "what it costs", "its history", "how experts do it", "the tools")
PASSAGES = {f"{t[:3]}-{n}": f"{t.capitalize()}: {a}. " + t * n for t in TOPICS for n, a in enumerate(ASPECTS)}


def write_corpus(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "corpus.jsonl", ({"id": i, "text": t} for i, t in PASSAGES.items()))


@pytest.mark.ray
def test_an_index_holds_every_passage_and_searches_as_the_encoder_does(
    tmp_path: Path, corpus: str, minilm: str, ray_cluster: None
) -> None:
    settings = IndexSettings(corpus=corpus, model=minilm, output=str(tmp_path / "index"), shards=3)
    made = run(settings)
    assert made.fresh
    assert made.manifest["counts"] == {"passages": len(PASSAGES), "shards": 3}
    encoder = InstructionEncoder.from_pretrained(minilm)
    index = Index.open(made.path, encoder.fingerprint())
    assert [s.passages for s in index.facts.shards] == [
        sum(shard_of(i, 3) == shard for i in PASSAGES) for shard in range(3)
    ]
    query = encoder.encode_queries(["how expensive is brewing coffee at home?"], ["For people new to it."])
    ids, vectors = list(PASSAGES), encoder.encode_passages(list(PASSAGES.values())).astype(np.float64)
    exact = dict(zip(ids, vectors @ query[0], strict=True))
    hits = index.search(query, len(PASSAGES))[0]
    assert {hit.id: hit.text for hit in hits} == PASSAGES
    np.testing.assert_allclose([hit.score for hit in hits], [exact[hit.id] for hit in hits], atol=1e-5)
    assert hits[0].id.startswith("esp")
    assert sorted(p.name for p in made.path.iterdir()) == ["manifest.json"] + [f"shard-0000{n}" for n in range(3)]

    again = run(settings)
    assert not again.fresh
    assert again.path == made.path


@pytest.mark.ray
def test_an_interrupted_build_encodes_only_what_is_missing(
    tmp_path: Path, corpus: str, minilm: str, ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = IndexSettings(corpus=corpus, model=minilm, output=str(tmp_path / "index"), shards=2)
    monkeypatch.setattr(distributed, "CHUNK_PASSAGES", 4)

    def lose_power(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(distributed, "_write_shards", lose_power)
        with pytest.raises(KeyboardInterrupt):
            run(settings)
    lost, *kept = sorted((tmp_path / "index").glob(f".*.partial/{distributed.ENCODED}/*.arrow"))
    lost.unlink()
    assert len(kept) >= 7

    sent: list[dict[str, Any]] = []
    from_items = distributed.ray.data.from_items

    def spied(items: list[dict[str, Any]], **options: Any) -> Any:
        sent.extend(items)
        return from_items(items, **options)

    monkeypatch.setattr(distributed.ray.data, "from_items", spied)
    made = run(settings)
    assert [Path(item["file"]).name for item in sent] == [lost.name]
    query = InstructionEncoder.from_pretrained(minilm).encode_queries(["bread"])
    assert {hit.id for hit in Index.open(made.path).search(query, 100)[0]} == set(PASSAGES)


@pytest.mark.ray
def test_embeddings_that_are_not_finite_are_refused_naming_a_passage(
    tmp_path: Path, corpus: str, minilm: str, ray_cluster: None
) -> None:
    encoder = InstructionEncoder.from_pretrained(minilm)
    next(encoder.backbone.parameters()).data.fill_(float("nan"))
    encoder.save_pretrained(tmp_path / "broken")
    settings = IndexSettings(corpus=corpus, model=str(tmp_path / "broken"), output=str(tmp_path / "index"))
    with pytest.raises(InputError, match=r"model=.*broken: its embedding of passage \S+ is not finite"):
        run(settings)
    assert not (tmp_path / "index" / "latest").exists()


def test_bad_input_is_refused_before_any_work(tmp_path: Path, corpus: str, minilm: str) -> None:
    def refuse(message: str, **changes: str) -> None:
        values = {"corpus": corpus, "model": minilm, "output": str(tmp_path / "index"), **changes}
        with pytest.raises(InputError, match=message) as refusal:
            run(IndexSettings.of(values))
        assert "\n" not in str(refusal.value)

    refuse("corpus=nowhere.jsonl: no such file", corpus="nowhere.jsonl")
    refuse("model=./nowhere: no such model directory", model="./nowhere")
    rows: list[dict[str, Any]] = [{"id": "a", "text": "x"}, {"id": "a", "text": "y"}]
    refuse("id a stands twice", corpus=write_corpus(tmp_path / "twice.jsonl", rows))
    refuse("column text is missing", corpus=write_corpus(tmp_path / "no_text.jsonl", [{"id": "a", "body": "x"}]))
    refuse("column text is empty", corpus=write_corpus(tmp_path / "blank.jsonl", [{"id": "a", "text": " "}]))
    refuse("empty, it has no rows", corpus=write_corpus(tmp_path / "empty.jsonl", []))


def test_a_passage_belongs_to_the_same_shard_in_every_process() -> None:
    ids = [f"passage-{i}" for i in range(1000)]
    here = [shard_of(i, 7) for i in ids]
    code = "from infembed_ray.retrieval.distributed import shard_of; print([shard_of(f'passage-{i}', 7) for i in range(1000)])"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    assert json.loads(there) == here
    assert np.bincount(here, minlength=7).min() > 1000 / 7 * 0.7  # dealt evenly
