"""Plan of `infembed serve`: settings -> checked indexes and models -> the release, as applications and as a config file.

Nothing is opened, loaded or started here.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
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
    APPLICATION,
    INGRESS,
    INGRESS_CPUS,
    STORE,
    ApiArguments,
    Arguments,
    CollectionSpec,
    EncoderArguments,
    IndexArguments,
    Probe,
    ProbeSet,
    ReleaseSpec,
)
from infembed_ray.storage import durable
from infembed_ray.storage.object_store import is_uri, scratch
from infembed_ray.storage.places import address
from infembed_ray.storage.steps import MANIFEST, read_manifest, resolve_input
from infembed_ray.telemetry import json_logs

LOGGING = {"log_level": "WARNING", "enable_access_log": False} | ({"encoding": "JSON"} if json_logs() else {})
"""Logging of Serve's processes."""


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
            remedy = (
                f"set {settings.api_keys_env or 'api_keys_env and its variable'} to key1,key2,... or host=127.0.0.1"
            )
            raise InputError.of("host", settings.host, "open to other machines without API keys", remedy)
        if settings.gpus_per_shard and not on_a_cluster():  # there, GPU nodes have their own FAISS; replicas check it
            require_gpu_faiss()
        probes = _probe_set(settings)
        collections: dict[str, CollectionSpec] = {}
        for name, place in settings.indexes.items():
            try:
                collections[name] = _collection(settings, place, collections)
            except InputError as error:
                raise error if name == DEFAULT_COLLECTION else error.renamed("index", f"collections.{name}") from error
        reranker = reranking.resolve(settings, collections[DEFAULT_COLLECTION].encoder.model)
        if reranker is not None:
            name = model_name(reranker.model, local(reranker.model))
            for key, spec in collections.items():
                card = spec.card.model_copy(update={"reranker": name})
                collections[key] = spec.model_copy(update={"card": card})
        api = ApiArguments(locked=locked, settings=settings)
        release = ReleaseSpec(
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

    def reservations(self) -> Iterator[tuple[str, str, int, float]]:
        """Yield (Ray resource, setting, replicas, amount per replica) of everything that the replicas reserve."""
        settings = self.settings
        shards = sum(len(one.shards) for one in self.release.collections.values()) * settings.shard_replicas
        encoders = len(self.release.encoders) * settings.encoder_replicas
        encoders += settings.rerank.replicas if settings.rerank else 0
        yield "CPU", "cpus_per_encoder", encoders, settings.cpus_per_encoder
        yield "CPU", "cpus_per_shard", shards, settings.cpus_per_shard
        yield "CPU", "ingress_replicas", settings.ingress_replicas, INGRESS_CPUS
        yield "GPU", "gpus_per_encoder", encoders, settings.gpus_per_encoder
        yield "GPU", "gpus_per_shard", shards, settings.gpus_per_shard

    @property
    def controller_environment(self) -> dict[str, str]:
        """Environment of Serve's controller, inherited by its proxies and replicas; fixed when Serve starts.

        RAY_SERVE_* variables of this process take precedence.
        """
        environment = ray_compat.GRPC_CALLS | {
            ray_compat.PROXY_MIDDLEWARE_VARIABLE: "infembed_ray.serving.edge:middlewares"
        }
        if self.settings.ha_proxy:
            environment |= ray_compat.haproxy_environment(client_timeout_s=2 * READ_TIMEOUT_S)
        return environment | {name: value for name, value in os.environ.items() if name.startswith("RAY_SERVE_")}

    def config(self) -> dict[str, Any]:
        """Return the config of `serve deploy`."""
        parts: dict[str, Arguments] = {**self.release.parts, APPLICATION: self.api}
        applications: list[dict[str, Any]] = [
            {
                "name": name,
                "route_prefix": "/" if name == APPLICATION else None,
                "import_path": arguments.builder,
                "args": arguments.model_dump(mode="json", exclude_defaults=True),
            }
            for name, arguments in parts.items()
        ]
        release = self.release.model_copy(update={"command": ""})
        applications[-1]["deployments"] = [{"name": INGRESS, "user_config": release.model_dump(mode="json")}]
        return {
            "proxy_location": "EveryNode",
            "http_options": {"host": self.settings.host, "port": self.settings.port},
            "controller_options": {"runtime_env": {"env_vars": self.controller_environment}},
            "logging_config": LOGGING,
            "applications": applications,
        }

    def write_config(self, file: Path) -> None:
        """Write the config file of `serve deploy`; an existing file describes what is served until then.

        `serve deploy` at once deletes applications that the file no longer names. So the new file still names the parts of
        the previous release; writing it once more removes them.

        Raises:
            InputError: the file exists and is not a config file of `infembed serve`.
        """
        config = self.config()
        if file.is_file():
            previous = yaml.safe_load(file.read_text(encoding="utf-8"))
            try:
                (api,) = (app for app in previous["applications"] if app["name"] == APPLICATION)
                release = ReleaseSpec.model_validate(api["deployments"][0]["user_config"])
            except (ValueError, KeyError, TypeError) as error:
                fault = "exists and is not a config file of `infembed serve`"
                raise InputError.of("config_file", file, fault, "choose another name") from error
            kept = set(release.parts) - {app["name"] for app in config["applications"]}
            config["applications"] += [app for app in previous["applications"] if app["name"] in kept]
        file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")

    def startup_message(self) -> str:
        """Return where the API is and what it serves."""
        served = [
            f"serve: {'' if name == DEFAULT_COLLECTION else f'collection {name}: '}{spec.card.passages} passages, "
            f"model {spec.card.id}, at {self.url}{'' if name == DEFAULT_COLLECTION else f'/v1/collections/{name}'}"
            for name, spec in self.release.by_name.items()
        ]
        return "\n".join(served) + f"\n  playground: {self.url}/   reference: {self.url}/docs"


def _probe_set(settings: ServeSettings) -> ProbeSet | None:
    """Read the probe set, a file of rows with the fields of `Probe`.

    Raises:
        InputError: no such file, no rows, or a row that is no probe.
    """
    if (file := settings.probes) is None:
        return None
    probes = []
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
    return ProbeSet(probes=probes, max_ndcg_drop=settings.max_ndcg_drop, max_p_mrr_drop=settings.max_p_mrr_drop)


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
