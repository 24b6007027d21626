"""The indexes and encoders of a plan, before anything is opened or loaded: their facts, checked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from infembed_ray.config.serving import DEFAULT_COLLECTION, ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.checkpoint import find, is_weights, local
from infembed_ray.retrieval.index import Index, IndexFacts
from infembed_ray.retrieval.shard_files import local_directory
from infembed_ray.retrieval.stores.address import is_address
from infembed_ray.retrieval.stores.milvus import Milvus
from infembed_ray.retrieval.stores.store import Address
from infembed_ray.serving.arguments import STORE, EncoderArguments, IndexArguments
from infembed_ray.serving.encoder.calibration import require_runnable
from infembed_ray.serving.encoder.known import describe
from infembed_ray.storage.object_store import is_uri
from infembed_ray.storage.places import address, listing, place_of
from infembed_ray.storage.steps import MANIFEST, read_manifest


class ServedIndex(NamedTuple):
    """An index that is not open: of files, or in an external engine."""

    arguments: IndexArguments
    facts: IndexFacts
    shards: tuple[str, ...]
    changes: str | None

    @property
    def changed_at(self) -> str:
        """Where changes of its documents are kept: equal for two names of one index."""
        if self.changes is None:
            return self.arguments.index
        return self.changes if is_uri(self.changes) else str(Path(self.changes).resolve())


class ServedEncoder(NamedTuple):
    """An encoder that is not loaded."""

    arguments: EncoderArguments
    name: str
    """Of the model, in the API."""
    vocabulary: int


@contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Let an InputError of the block name the setting of a collection in place of `index`."""
    try:
        yield
    except InputError as error:
        if name == DEFAULT_COLLECTION:
            raise
        setting, text = f"collections.{name}", str(error)
        raise InputError(f"{setting}{text[5:] if text.startswith('index=') else f': {text}'}") from error


def describe_index(settings: ServeSettings, place: str) -> ServedIndex:
    """Read the facts of an index, and check the files of its shards.

    Raises:
        InputError: there is no such index, it is damaged, or the external engine cannot be used.
    """
    if is_address(place):
        engine = Milvus(Address.parse(place, "index", settings.store_token_env))
        version = engine.current()
        if engine.one_writer and settings.shard_replicas > 1:
            raise InputError(
                f"shard_replicas={settings.shard_replicas}: {place} takes one writer at a time; set 1, or use a "
                "server of several nodes"
            )
        facts = IndexFacts.of_manifest(version.manifest, engine.address)
        arguments = IndexArguments(index=str(engine.address), version=version.id, settings=settings)
        return ServedIndex(arguments, facts, (STORE,), None)
    index = Index.describe(place)
    if isinstance(index.path, Path):  # replicas copy and check their own shards from an object store
        for shard in index.facts.shards:
            local_directory(index.path, shard)
    names = tuple(shard.name for shard in index.facts.shards)
    arguments = IndexArguments(index=address(index.path), version=index.version, settings=settings)
    return ServedIndex(arguments, index.facts, names, address(index.changes))


def require_apart(index: ServedIndex, indexes: Mapping[str, ServedIndex], name: str) -> None:
    """InputError if another collection has the same index: a document put in one would be found in both."""
    for other, known in indexes.items():
        if other != name and index.changed_at == known.changed_at:
            raise InputError(
                f"index={index.arguments.index}: is the index of the collection {other!r} too, and both would change "
                "the same documents; give each collection an index of its own"
            )


def describe_encoder(settings: ServeSettings, index: ServedIndex, others: Collection[ServedEncoder]) -> ServedEncoder:
    """Describe the encoder of an index; InputError unless it built the index, can run, and has a name of its own."""
    found = find(settings.model or index.facts.model, "model")
    path = local(found.path)
    known = describe(path, index.facts.dimensions)
    index.facts.require_encoder(known.fingerprint, index.arguments.index)
    _require_runnable(settings, path)
    name = model_name(settings.model or index.facts.model, path)
    if not others:
        name = settings.model_name or name
    elif taken := [other.arguments for other in others if other.name == name]:
        raise InputError(
            f"index={index.arguments.index}: its encoder {known.fingerprint} has the same name in the API, {name}, as "
            f"another one, {taken[0].fingerprint}; build both indexes with one encoder, or give one of the two directories "
            "another name"
        )
    arguments = EncoderArguments(
        model=found.path, fingerprint=known.fingerprint, dimensions=index.facts.dimensions, settings=settings
    )
    return ServedEncoder(arguments, name, known.vocabulary)


def model_name(given: str, path: str) -> str:
    """Return a name for a model: a hub name as it is, else the last part of its URI or directory that is not its digest.

    Args:
        given: directory, URI or hub name of the settings or of the index.
        path: where it is on this machine, or the hub name.
    """
    if not Path(path).is_absolute():
        return path
    place = PurePosixPath(given) if is_uri(given) else Path(path)
    published = (Path(path) / MANIFEST).is_file() and read_manifest(Path(path), "model").get("identity") == place.name
    return place.parent.name if published else place.name


def model_bytes(place: str) -> int:
    """Return the size of the weights in a directory or its URI; 0 for a hub name."""
    files = listing(place_of(place)) if is_uri(place) or Path(place).is_absolute() else {}
    return sum(size for name, size in files.items() if is_weights(name))


def _require_runnable(settings: ServeSettings, path: str) -> None:
    """InputError if the settings demand a runtime that cannot run the model; only then the model's configuration is loaded."""
    if settings.runtime in ("onnx", "vllm") or settings.dtype == "int8":
        from infembed_ray.modeling.encoder import InstructionEncoder

        require_runnable(InstructionEncoder.from_pretrained(path, device="meta"), settings, path)
