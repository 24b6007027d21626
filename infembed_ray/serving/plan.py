"""Plan of `infembed serve`: settings -> checked indexes and models -> the release, as applications and as a config file.

Nothing is opened, loaded or started here.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

import yaml
from pydantic import ValidationError

from infembed_ray import __version__, ray_compat
from infembed_ray.config.serving import DEFAULT_COLLECTION, ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.checkpoint import describe, files_digest, find, local, require_loadable
from infembed_ray.ray_cluster import on_a_cluster
from infembed_ray.records.files import raw_rows
from infembed_ray.retrieval.faiss_index import require_gpu_faiss
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.milvus import Milvus, MilvusAddress, is_address
from infembed_ray.retrieval.shard_files import local_directory
from infembed_ray.retrieval.versions import IndexFacts
from infembed_ray.serving import reranking, schema
from infembed_ray.serving.edge import READ_TIMEOUT_S
from infembed_ray.serving.http.auth import ApiKeys, is_loopback
from infembed_ray.serving.release import (
    LOGGING,
    STORE,
    ApiArguments,
    CollectionSpec,
    EncoderArguments,
    IndexArguments,
    Probe,
    ReleaseSpec,
    RerankerArguments,
)
from infembed_ray.storage import durable
from infembed_ray.storage.object_store import is_uri, scratch
from infembed_ray.storage.places import address
from infembed_ray.storage.steps import MANIFEST, open_place, read_manifest, resolve_input


@dataclass(frozen=True)
class Plan:
    """What `infembed serve` starts: the arguments of the API, and the release that it answers from."""

    settings: ServeSettings
    api: ApiArguments
    release: ReleaseSpec

    @classmethod
    def resolve(cls, settings: ServeSettings, locked: bool = False) -> Plan:
        """Check everything that can be checked before anything starts. No weights are loaded.

        Args:
            settings: of the API.
            locked: the API keys are known to the nodes only, which refuse to start without them.

        Raises:
            InputError: there is no such index or model, an index is damaged or another encoder built it, two collections
                have one index, or the API would be open to other machines.
        """
        locked = locked or bool(ApiKeys.load(settings.api_keys_env, settings.api_keys_file))
        if not locked and not is_loopback(settings.host):
            variable = settings.api_keys_env or "api_keys_env and its variable"
            remedy = f"set {variable} to key1,key2,... or host=127.0.0.1"
            raise InputError.of("host", settings.host, "open to other machines without API keys", remedy)
        if settings.gpus_per_shard and not on_a_cluster():  # there, GPU nodes have their own FAISS; replicas check it
            require_gpu_faiss()
        probes = _probes(settings.probes)
        collections: dict[str, CollectionSpec] = {}
        for name, place in settings.indexes.items():
            try:
                collections[name] = _collection(settings, place, collections)
            except InputError as error:
                own = f"collections.{name}"
                named = error if name == DEFAULT_COLLECTION else error.renamed("index", own)
                raise named if named is error or str(named).startswith(own) else named.within(f"{own}: ") from error
        reranker = reranking.resolve(settings, collections[DEFAULT_COLLECTION].encoder.model)
        if reranker is not None:
            name = model_name(reranker.model, local(reranker.model))
            for spec in collections.values():
                spec.card.reranker = name
        api = ApiArguments(locked=locked, settings=settings)
        release = ReleaseSpec(
            settings=_for_nodes(settings, collections[DEFAULT_COLLECTION].encoder.model, reranker),
            api=api.digest(),
            collections=collections,
            reranker=reranker,
            rerank=settings.rerank and settings.rerank.model_copy(update={"model": None}),
            probes=probes,
            command=uuid4().hex,
        )
        return cls(settings, api, release)

    @property
    def url(self) -> str:
        """URL of the API on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.settings.host, self.settings.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.settings.port}"

    @property
    def controller_environment(self) -> dict[str, str]:
        """Environment of Serve's controller, inherited by its proxies and replicas; fixed when Serve starts.

        RAY_SERVE_* variables of this process take precedence.
        """
        middleware = {ray_compat.PROXY_MIDDLEWARE_VARIABLE: "infembed_ray.serving.edge:middlewares"}
        environment = ray_compat.GRPC_CALLS | middleware
        if self.settings.ha_proxy:
            environment |= ray_compat.haproxy_environment(client_timeout_s=2 * READ_TIMEOUT_S)
        return environment | {name: value for name, value in os.environ.items() if name.startswith("RAY_SERVE_")}

    def write_config(self, file: Path) -> None:
        """Write the config file of `serve deploy`: the API, whose supervisor starts the parts of the release."""
        release = self.release.model_copy(update={"command": ""})
        config = {
            "proxy_location": "EveryNode",
            "http_options": {"host": self.settings.host, "port": self.settings.port},
            "controller_options": {"runtime_env": {"env_vars": self.controller_environment}},
            "logging_config": LOGGING,
            "applications": [self.api.application(release)],
        }
        file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")

    def startup_message(self) -> str:
        """Return where the API is and what it serves."""
        served = [
            f"serve: {'' if name == DEFAULT_COLLECTION else f'collection {name}: '}{spec.card.passages} passages, "
            f"model {spec.card.id}, at {self.url}{'' if name == DEFAULT_COLLECTION else f'/v1/collections/{name}'}"
            for name, spec in self.release.by_name.items()
        ]
        return "\n".join(served) + f"\n  playground: {self.url}/   reference: {self.url}/docs"


def _for_nodes(settings: ServeSettings, model: str, reranker: RerankerArguments | None) -> ServeSettings:
    """Return the settings as the supervisor resolves them again: absolute places, without what was checked already."""
    indexes = dict(settings.indexes)
    for name in [name for name, place in indexes.items() if not is_address(place)]:
        indexes[name] = address(open_place(indexes[name], "index"))
    update: dict[str, Any] = {"index": indexes.pop(DEFAULT_COLLECTION), "collections": indexes}
    if settings.model:
        update["model"] = model
    if settings.rerank and settings.rerank.model and reranker:
        own = settings.rerank.model
        named = {**own, "model": reranker.model} if isinstance(own, dict) else reranker.model
        update["rerank"] = settings.rerank.model_copy(update={"model": named})
    checked = dict.fromkeys(("api_keys_env", "api_keys_file", "probes", "config_file"))
    return settings.model_copy(update={**update, **checked, "host": "127.0.0.1"})


def _probes(file: str | None) -> list[Probe]:
    """Read the probes, a file of rows with the fields of `Probe`; None: there are none.

    Raises:
        InputError: no such file, no rows, or a row that is no probe.
    """
    probes: list[Probe] = []
    if file is None:
        return probes
    for number, row in enumerate(raw_rows(resolve_input(file, "probes"), "probes"), start=1):
        try:
            probes.append(Probe.model_validate(row))
        except ValidationError as error:
            first = error.errors()[0]
            where = "".join(f"{part}: " for part in first["loc"])
            fault = f"row {number}: {where}{first['msg'].removeprefix('Value error, ')}"
            remedy = "give every row a query and the ids of its relevant passages (`relevant`)"
            raise InputError.of("probes", file, fault, remedy) from None
    if not probes:
        raise InputError.of("probes", file, "has no rows", "give at least one query with its relevant passages")
    return probes


# ------------------------------------------------------------------------------------------- indexes and models


def _collection(settings: ServeSettings, place: str, others: Mapping[str, CollectionSpec]) -> CollectionSpec:
    """Check an index and its encoder; return the collection.

    Raises:
        InputError: there is no such index, it is damaged, or it is the index of another collection; its encoder is not the
            one that built it, or cannot be told apart from another one; or an external engine cannot be used.
    """
    changes: str | None = None
    shards: tuple[str, ...] = (STORE,)
    if is_address(place):
        engine = Milvus(MilvusAddress.parse(place, "index"))
        current = engine.current()
        if engine.one_writer and settings.shard_replicas > 1:
            fault = f"{place} takes one writer at a time"
            remedy = "set 1, or use a server of several nodes"
            raise InputError.of("shard_replicas", settings.shard_replicas, fault, remedy)
        facts = IndexFacts.of_manifest(current.manifest, engine.address)
        arguments = IndexArguments(index=str(engine.address), version=current.id, settings=settings)
    else:
        index = Index.describe(place)
        facts, shards = index.facts, tuple(shard.name for shard in index.facts.shards)
        if isinstance(index.path, Path):  # replicas copy and check their own shards from an object store
            for shard in facts.shards:
                local_directory(index.path, shard)
        arguments = IndexArguments(index=address(index.path), version=index.version, settings=settings)
        changes = address(index.changes)
    if settings.ranking.hybrid and not facts.lexical:
        raise InputError.of("ranking.hybrid", settings.ranking.hybrid, f"index={place}: {schema.NO_WORDS}")
    for other, spec in others.items():
        if _changed_at(arguments, changes) == _changed_at(spec.index, spec.changes):
            fault = f"is the index of the collection {other!r} too, and both would change the same documents"
            raise InputError.of("index", arguments.index, fault, "give each collection an index of its own")
    encoder, name, exclusion_weight = _encoder(settings, arguments.index, facts, others)
    card = schema.Model(
        id=name,
        created=int(time.time()),
        dimension=facts.dimension,
        encoder=facts.encoder,
        exclusion_weight=exclusion_weight,
        index_version=arguments.version,
        passages=facts.passages,
        metadata=dict(facts.metadata),
        chunk_tokens=facts.chunk_tokens,
        chunk_overlap=facts.chunk_overlap,
        writable=settings.writable,
        lexical=facts.lexical,
    )
    return CollectionSpec(encoder=encoder, index=arguments, shards=shards, changes=changes, card=card)


def _changed_at(index: IndexArguments, changes: str | None) -> str:
    """Return where changes of an index's documents are kept: equal for two names of one index."""
    if changes is None:
        return index.index
    return changes if is_uri(changes) else str(Path(changes).resolve())


def _encoder(
    settings: ServeSettings, index: str, facts: IndexFacts, others: Mapping[str, CollectionSpec]
) -> tuple[EncoderArguments, str, float]:
    """Return the encoder of an index, without its weights, its name in the API, and its weight of exclusions."""
    for spec in others.values():
        if spec.encoder.fingerprint == facts.encoder:
            return spec.encoder, spec.card.id, spec.card.exclusion_weight
    model = find(settings.model or facts.model, "model").path
    path = local(model)
    fingerprint = _fingerprint(path, facts.dimensions)
    facts.require_encoder(fingerprint, index)
    name = model_name(settings.model or facts.model, path)
    for spec in others.values():
        if spec.card.id == name:
            fault = f"its encoder {fingerprint} has the same name in the API, {name}, as {spec.encoder.fingerprint}"
            remedy = "build both indexes with one encoder, or give one of the two directories another name"
            raise InputError.of("index", index, fault, remedy)
    arguments = EncoderArguments(model=model, fingerprint=fingerprint, dimensions=facts.dimensions, settings=settings)
    return arguments, name, describe(path, with_pooling=False).exclusion_weight


def _fingerprint(model: str, dimensions: int | None) -> str:
    """Return `InstructionEncoder.fingerprint` of a model.

    It is kept on this machine under the bytes of the model's files, so that a later start need not import torch.
    """
    digest = files_digest(model)  # None for a hub name, whose files may change at any time
    versions = f"{__version__} {version('torch')} {version('transformers')}"
    key = hashlib.sha256(f"{digest} {dimensions} {versions}".encode()).hexdigest()[:32]
    file = scratch() / "fingerprints" / key
    if digest is not None and file.is_file():
        return file.read_text(encoding="utf-8")
    from infembed_ray.modeling.encoder import InstructionEncoder

    require_loadable(model, f"model={model}")
    fingerprint = InstructionEncoder.from_pretrained(model, dimensions=dimensions, device="meta").fingerprint()
    if digest is not None:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with durable.replacing(file, shared=True) as stream:
                stream.write(fingerprint.encode())
    return fingerprint


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
