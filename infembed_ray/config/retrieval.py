"""Settings of `infembed index` and `infembed index compact`."""

from typing import Literal

from pydantic import Field

from infembed_ray.config.base import IndexPath, InputPath, ModelName, Settings, runtime_field

Precision = Literal["float16", "float32"]
FieldType = Literal["string", "integer", "number", "boolean", "date"]
"""Type of a metadata column; dates are ISO 8601."""


class IndexSettings(Settings):
    """`infembed index`: checkpoint + corpus -> FAISS index."""

    corpus: InputPath = runtime_field(description="passages (JSONL, Parquet, CSV) with columns id and text or passage")
    columns: dict[str, str] = Field({}, description="column name of the index -> column name in the corpus")
    metadata: dict[str, FieldType] = Field({}, description="further columns, for filters and hits -> their type")
    model: ModelName = runtime_field(description="checkpoint directory or hub name of the encoder")
    output: str = runtime_field(
        description="directory for the published index, or milvus+http://HOST:PORT/ALIAS for an external engine"
    )
    shards: int = Field(2, ge=1, description="shards of the index; a hash of its id assigns a passage")
    dimensions: int | None = Field(None, ge=1, description="dimensions of the embeddings (Matryoshka); null: all")
    vectors: Precision = Field("float16", description="precision of the stored vectors; float16 takes half the space")
    factory: str | None = Field(
        None,
        description="index type of all shards, as faiss.index_factory spells it, or the engine's own name; null: chosen by count, dimension and memory",
    )
    memory_gib: float | None = Field(None, gt=0, description="maximum GiB of a shard's index in memory; null: no limit")
    recall_floor: float = Field(0.95, ge=0, le=1, description="minimum recall@10 against exact search, to be published")
    lexical: bool = Field(False, description="also build a BM25 index of every shard (English stemming), for `hybrid`")
    batch_tokens: int | None = runtime_field(None, ge=64, description="padded tokens per batch; null: by the device")
    actors: int = runtime_field(1, ge=1, description="encoding actors")
    gpus_per_actor: float = runtime_field(0.0, ge=0, description="GPUs per encoding actor")
    cpus_per_shard: float = runtime_field(
        1.0,
        gt=0,
        description="CPUs and threads per task that builds a shard; with several, HNSW graphs are not reproducible",
    )


class CompactSettings(Settings):
    """`infembed index compact`: an index + the changes since -> its next version."""

    index: IndexPath = runtime_field(description="output directory of `infembed index`, or one version in it")
    keep_versions: int | None = runtime_field(None, ge=2, description="newest versions to keep; null: all")
    cpus_per_shard: float = runtime_field(1.0, gt=0, description="CPUs and threads per task that builds a shard")
