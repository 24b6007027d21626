"""Small published indexes, built in this process instead of on a cluster as `infembed index` does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infembed_ray.config.retrieval import FieldType, IndexSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.retrieval.index import IndexFacts
from infembed_ray.retrieval.shards import Shard, shard_of
from infembed_ray.storage import Step

PASSAGES = {
    f"{topic}-{audience}": f"{topic.capitalize()} {text}"
    for topic in ("diabetes", "asthma", "back pain")
    for audience, text in {
        "children": "in children: what parents and schools should know, with games that teach it.",
        "doctors": "treatment guideline for clinicians: dosage tables, contraindications, evidence grades.",
        "history": "in the nineteenth century: how physicians of the time explained and treated it.",
        "costs": "and what it costs health insurers a year, by country.",
    }.items()
}
AGAIN = {f"{id}-again": f"{text} (second edition)" for id, text in PASSAGES.items()}
YEARS = {id: {"year": 1850 if id.endswith("history") else 2020 + len(id) % 4} for id in PASSAGES}


def publish_index(
    root: Path,
    model: str,
    passages: Mapping[str, str],
    shards: int = 2,
    metadata: Mapping[str, Mapping[str, Any]] | None = None,
    types: Mapping[str, FieldType] | None = None,
) -> Path:
    """Publish an index of passages (id -> text) under `root`, with metadata (id -> column -> value); return its directory."""
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
