"""`infembed index`: a corpus encoded by Ray Data actors, written as shards by Ray tasks.

Passages are dealt to shards by a hash of their ids and travel in chunks of one shard. An actor writes every chunk it
encoded to the shared output directory at once, so vectors never pass the driver, and an interrupted build goes on with
the chunks that are missing.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy

from infembed_ray import records
from infembed_ray.config import IndexSettings
from infembed_ray.distributed import connect
from infembed_ray.errors import InputError
from infembed_ray.modeling.checkpoint import locate
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.progress import say, track
from infembed_ray.records import Passage
from infembed_ray.retrieval.index import IndexFacts
from infembed_ray.retrieval.shards import Shard, ShardFacts
from infembed_ray.storage import Published, Step, existing

CHUNK_PASSAGES = 512
"""Passages encoded together: enough to batch by length, and what an interruption loses per actor."""
ENCODED = "encoded"


def run(settings: IndexSettings) -> Published:
    """Encode the corpus and publish its index; nothing to do if the same corpus was indexed by the same model.

    Raises:
        InputError: corpus, model or output cannot be used; or the model's embedding of a passage is not finite.
    """
    corpus = existing(settings.corpus, "corpus")
    found = locate(settings.model, "model")
    step = Step("index", settings, settings.output, {"corpus": corpus, **found.inputs}, found.names)
    if done := step.finished():
        return done
    passages = records.read(corpus, Passage, "corpus", settings.columns)
    model = found.path
    encoder = InstructionEncoder.from_pretrained(model)  # before any work: does it load, and what is it?
    connect()
    with step.publish() as staging:
        say(f"index: {len(passages)} passages, {settings.shards} shards, {model}")
        root = staging.path.resolve()  # actors and tasks may work in other directories
        chunks = _deal(passages, settings.shards, root / ENCODED)
        _encode(chunks, model, settings)
        shards = _write_shards(chunks, settings.shards, encoder.dimension, root)
        shutil.rmtree(root / ENCODED)
        facts = IndexFacts(
            encoder=encoder.fingerprint(),
            model=model,
            template=encoder.text.template,
            dimension=encoder.dimension,
            passages=sum(shard.passages for shard in shards),
            shards=shards,
        )
        if facts.passages != len(passages):
            raise RuntimeError(f"{facts.passages} of {len(passages)} passages reached a shard")
        staging.counts = {"passages": facts.passages, "shards": len(shards)}
        staging.facts = {"index": asdict(facts)}
    return step.published()


def shard_of(passage_id: str, shards: int) -> int:
    """The shard a passage belongs to: the same in every run and process, whatever else the corpus holds."""
    digest = hashlib.blake2b(passage_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % shards


@dataclass(frozen=True)
class Chunk:
    """Passages of one shard that are encoded together; `file` will hold them and their vectors."""

    shard: int
    passages: Sequence[Passage]
    file: Path

    def as_item(self) -> dict[str, Any]:
        """As a row of a Ray dataset."""
        return {
            "file": str(self.file),
            "ids": [p.id for p in self.passages],
            "texts": [p.text for p in self.passages],
        }


def _deal(passages: Sequence[Passage], shards: int, directory: Path) -> list[Chunk]:
    """All chunks, each named after its passages: what a chunk's file holds never changes."""
    hands: list[list[Passage]] = [[] for _ in range(shards)]
    for passage in sorted(passages, key=lambda p: p.id):  # the order of the lines in the corpus leaves no trace
        hands[shard_of(passage.id, shards)].append(passage)
    chunks = []
    for shard, hand in enumerate(hands):
        for start in range(0, len(hand), CHUNK_PASSAGES):
            part = hand[start : start + CHUNK_PASSAGES]
            name = hashlib.sha256("\0".join(p.id for p in part).encode()).hexdigest()[:16]
            chunks.append(Chunk(shard, part, directory / f"{name}.arrow"))
    return chunks


class EncodeChunk:
    """A Ray Data actor: loads the model once, then encodes chunk after chunk to its file."""

    def __init__(self, model: str, batch_tokens: int, device: str) -> None:
        self.encoder = InstructionEncoder.from_pretrained(model, device=device)
        self.batch_tokens = batch_tokens

    def __call__(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Columns `file, ids, texts` -> `passages`, and `broken`: a passage whose vector is not finite, if any."""
        ids, texts = list(chunk["ids"]), list(chunk["texts"])
        vectors = self.encoder.encode_passages(texts, self.batch_tokens)
        broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if broken.size:
            return {"passages": 0, "broken": ids[broken[0]]}
        flat = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
        table = pa.table({"id": ids, "text": texts, "vector": flat})
        file = Path(chunk["file"])
        partial = file.with_suffix(".partial")
        with pa.ipc.new_file(partial, table.schema) as writer:
            writer.write_table(table)
        partial.replace(file)
        return {"passages": len(ids), "broken": None}


def _encode(chunks: Sequence[Chunk], model: str, settings: IndexSettings) -> None:
    missing = [chunk for chunk in chunks if not chunk.file.is_file()]
    with track("encode", sum(len(chunk.passages) for chunk in chunks)) as advance:
        if len(missing) < len(chunks):
            resumed = sum(len(chunk.passages) for chunk in chunks if chunk.file.is_file())
            advance(resumed, note=f"{resumed} from an interrupted run")
        if not missing:
            return
        missing[0].file.parent.mkdir(exist_ok=True)
        encoded = ray.data.from_items([chunk.as_item() for chunk in missing], override_num_blocks=len(missing)).map(
            EncodeChunk,
            fn_constructor_args=(model, settings.batch_tokens, "cuda" if settings.gpus_per_actor else "cpu"),
            compute=ActorPoolStrategy(size=settings.actors),
            num_gpus=settings.gpus_per_actor,
        )
        for row in encoded.iter_rows():
            if row["broken"] is not None:
                raise InputError(
                    f"model={model}: its embedding of passage {row['broken']} is not finite; "
                    "the weights are damaged or training diverged: give another checkpoint"
                )
            advance(row["passages"])


def _write_shards(chunks: Sequence[Chunk], shards: int, dimension: int, root: Path) -> list[ShardFacts]:
    """Write all shards, each by its own task; in their order."""
    tasks = {
        _write_shard.remote(
            root / f"shard-{shard:05d}", [chunk.file for chunk in chunks if chunk.shard == shard], dimension
        ): shard
        for shard in range(shards)
    }
    written: dict[int, ShardFacts] = {}
    pending = list(tasks)
    with track("shards", shards) as advance:
        while pending:
            (done,), pending = ray.wait(pending)
            written[tasks[done]] = ray.get(done)
            advance(note=written[tasks[done]].factory)
    return [written[shard] for shard in range(shards)]


@ray.remote(num_cpus=1)
def _write_shard(directory: Path, files: Sequence[Path], dimension: int) -> ShardFacts:
    tables = [pa.ipc.open_file(pa.memory_map(str(file))).read_all() for file in files]
    ids = [id for table in tables for id in table.column("id").to_pylist()]
    texts = [text for table in tables for text in table.column("text").to_pylist()]
    vectors = [
        part.values.to_numpy().reshape(-1, dimension) for table in tables for part in table.column("vector").chunks
    ]
    return Shard.write(directory, ids, texts, np.concatenate([np.empty((0, dimension), np.float32), *vectors]))
