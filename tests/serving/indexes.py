"""Small published indexes, made by `Index.build`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infembed_ray.config.retrieval import FieldType
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.retrieval.index import Index

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
    columns = dict.fromkeys(types or {})
    rows = [{"id": id, "text": text, **columns, **(metadata or {}).get(id, {})} for id, text in passages.items()]
    encoder = InstructionEncoder.from_pretrained(model)
    path = Index.build(rows, encoder, root / "index", shards=shards, metadata=types).path
    assert isinstance(path, Path)
    return path
