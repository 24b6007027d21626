"""Published indexes of a few passages, made in this process: what `infembed index` makes, without its cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infembed_ray.config import FieldType, IndexSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.retrieval.index import IndexFacts
from infembed_ray.retrieval.shards import Shard, shard_of
from infembed_ray.storage import Step


def publish_index(
    root: Path,
    model: str,
    passages: Mapping[str, str],
    shards: int = 2,
    metadata: Mapping[str, Mapping[str, Any]] | None = None,
    types: Mapping[str, FieldType] | None = None,
) -> Path:
    """An index of passages (id -> text) under `root`, with metadata (id -> column -> value); returns its version."""
    metadata, types = metadata or {}, types or {}
    corpus = root / "corpus.txt"
    root.mkdir(parents=True, exist_ok=True)
    corpus.write_text(repr(sorted(passages.items())))
    settings = IndexSettings(corpus=str(corpus), model=model, output=str(root / "index"), shards=shards)
    encoder = InstructionEncoder.from_pretrained(model)
    step = Step("index", settings, settings.output, {"corpus": corpus, "model": Path(model)})
    if done := step.finished():
        return done.path
    with step.publish() as staging:
        facts = []
        for shard in range(shards):
            ids = [id for id in passages if shard_of(id, shards) == shard]
            texts = [passages[id] for id in ids]
            columns = {name: [metadata.get(id, {}).get(name) for id in ids] for name in types}
            vectors = encoder.encode_passages(texts)
            facts.append(Shard.write(staging.path / f"shard-{shard:05d}", ids, texts, vectors, columns, types))
        staging.facts = {
            "index": asdict(
                IndexFacts(
                    encoder=encoder.fingerprint(),
                    model=model,
                    template=encoder.text.template,
                    dimension=encoder.dimension,
                    passages=len(passages),
                    metadata=types,
                    shards=facts,
                    lineage=step.identity,
                )
            )
        }
    return step.published().path
