"""Checks of a build before it starts Ray: settings, corpus, model, index type and output."""

from __future__ import annotations

import io
from itertools import islice

import pyarrow.parquet as pq

from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.errors import InputError, check_all
from infembed_ray.modeling.checkpoint import locate
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records import tables
from infembed_ray.retrieval import factory
from infembed_ray.retrieval.corpus import require_columns, require_passages, rows
from infembed_ray.retrieval.index import FORMAT
from infembed_ray.retrieval.stores.milvus import Milvus
from infembed_ray.retrieval.stores.store import Address
from infembed_ray.storage.object_store import scratch
from infembed_ray.storage.places import Place, errors_at, open_binary
from infembed_ray.storage.steps import Step, find_input

SAMPLE = 10_000
"""Most passages of a file that `count_passages` reads."""
_BLOCK = 1 << 20


def prepare(settings: IndexSettings) -> tuple[Place, str, Step]:
    """Locate corpus and model, and identify the build.

    Returns:
        Corpus; directory, URI or hub name of the model; and the step.

    Raises:
        InputError: one of them does not exist, a column cannot be, or the output cannot be written.
    """
    _, corpus, model = check_all(
        lambda: require_columns(settings.columns, settings.metadata),
        lambda: find_input(settings.corpus, "corpus"),
        lambda: locate(settings.model, "model"),
    )
    names = {**model.names, "format": str(FORMAT)}
    return corpus, model.path, Step("index", settings, settings.output, {"corpus": corpus, **model.inputs}, names)


def prepare_engine(settings: IndexSettings) -> tuple[Milvus, IndexSettings]:
    """Connect to the external engine that `output` names.

    Returns:
        The engine; and the settings of the steps before it, whose output is the place of the unfinished build.

    Raises:
        InputError: a setting is for FAISS only, or the engine cannot be used.
    """
    for name, given in (("memory_gib", settings.memory_gib), ("gpus_per_shard", settings.gpus_per_shard or None)):
        if given is not None:
            raise InputError(f"{name}={given:g}: an external engine manages its own memory and devices; leave it out")
    if settings.lexical:
        raise InputError(
            "lexical=true: an external engine holds no lexical index of ours; leave it out, or use FAISS shards"
        )
    engine = Milvus(Address.parse(settings.output, "output", settings.store_token_env))
    place = settings.work or str(scratch() / "stores" / engine.address.alias)
    return engine, settings.model_copy(update={"output": place, "work": place, "vectors": "float32"})


def check_model(settings: IndexSettings, model: str) -> InstructionEncoder:
    """Check model and index type before any work; return the encoder without its weights."""
    encoder = InstructionEncoder.from_pretrained(model, dimensions=settings.dimensions, device="meta")
    if settings.factory is not None:
        factory.new(settings.factory, encoder.dimension)
    return encoder


def count_passages(corpus: Place, settings: IndexSettings) -> tuple[int, bool]:
    """Count the passages of a corpus and check its first rows, without reading all of it.

    Returns:
        Number of passages; whether there may be more. Parquet files say their number and lines of JSONL files are counted; of
        other files, `SAMPLE` rows are read.

    Raises:
        InputError: a file cannot be read, a column is missing, or one of these rows is invalid.
    """
    total, more, unread = 0, False, False
    seen: set[str] = set()
    for file in tables.data_files(corpus, "corpus"):
        read = sum(1 for _ in islice(rows(file, settings.columns, settings.metadata, seen), SAMPLE))
        with errors_at(file, "corpus"), open_binary(file) as source:
            if file.suffix == ".parquet":
                read = pq.read_metadata(source).num_rows
            elif file.suffix == ".jsonl":
                unread = unread or read == SAMPLE  # only here, a later row can have other columns
                read = sum(1 for line in io.BufferedReader(source, _BLOCK) if line.strip())
            else:
                more = more or read == SAMPLE
        total += read
    require_passages(corpus, [total], settings.columns, {} if unread else settings.metadata, seen)
    return total, more
