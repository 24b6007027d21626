"""Settings of `infembed index` and `infembed index compact`."""

from typing import Any, Literal

from pydantic import Field, model_validator

from infembed_ray.config.base import IndexPath, InputPath, ModelName, RowSettings, Settings, runtime_field

Precision = Literal["float16", "float32"]
FieldType = Literal["string", "integer", "number", "boolean", "date", "datetime", "strings"]
"""Type of a metadata column; dates and datetimes are ISO 8601, `strings` is a list of strings."""


class IndexSettings(RowSettings):
    """`infembed index`: checkpoint + corpus -> FAISS index."""

    corpus: InputPath = runtime_field(
        description="file, directory or glob of passages: columns id or _id, text or passage, and perhaps title, which is put before the text"
    )
    columns: dict[str, str] = Field(
        {}, description="column name of the index -> column name in the corpus; title='' leaves the titles out"
    )
    metadata: dict[str, FieldType] = Field({}, description="further columns, for filters and hits -> their type")
    model: ModelName = runtime_field(description="checkpoint directory or hub name of the encoder")
    output: str = runtime_field(
        description="directory for the published index, or milvus+http://HOST:PORT/ALIAS for an external engine"
    )
    shards: int = Field(2, ge=1, description="shards of the index; a hash of its id assigns a passage")
    dimensions: int | None = Field(None, ge=1, description="dimensions of the embeddings (Matryoshka); null: all")
    vectors: Precision = Field("float16", description="precision of the stored vectors; float16 takes half the space")
    chunk_tokens: int | None = Field(
        None,
        ge=32,
        description="maximum tokens of a chunk, into which longer passages are cut; null: not cut but truncated",
    )
    chunk_overlap: int = Field(0, ge=0, description="tokens that neighbouring chunks share, up to half of chunk_tokens")
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

    @model_validator(mode="after")
    def _chunks_differ(self) -> "IndexSettings":
        if self.chunk_overlap > (self.chunk_tokens or 0) // 2:
            raise ValueError(
                f"chunk_overlap={self.chunk_overlap}: above half of chunk_tokens={self.chunk_tokens}; lower it"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide the result. Without chunks, an index keeps the identity of earlier versions."""
        chunks = {"chunk_tokens", "chunk_overlap"} if self.chunk_tokens is None else set()
        return {name: value for name, value in super().identity().items() if name not in chunks}


class CompactSettings(Settings):
    """`infembed index compact`: an index + the changes since -> its next version."""

    index: IndexPath = runtime_field(description="output directory of `infembed index`, or one version in it")
    keep_versions: int | None = runtime_field(None, ge=2, description="newest versions to keep; null: all")
    cpus_per_shard: float = runtime_field(1.0, gt=0, description="CPUs and threads per task that builds a shard")
