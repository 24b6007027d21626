"""Plan of `infembed serve`: settings -> checked indexes and models -> the release, as applications and as a config file.

Nothing is opened, loaded or started here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import yaml
from pydantic import BaseModel, ValidationError

from infembed_ray import ray_compat
from infembed_ray.config.serving import DEFAULT_COLLECTION, ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.checkpoint import find, is_weights, local
from infembed_ray.ray_cluster import on_a_cluster
from infembed_ray.records.tables import raw_rows
from infembed_ray.retrieval.factory import require_gpu_faiss
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.milvus import Milvus, MilvusAddress, is_address
from infembed_ray.retrieval.shard_files import local_directory
from infembed_ray.retrieval.versions import IndexFacts
from infembed_ray.serving import schema
from infembed_ray.serving.encoder.calibration import require_runnable
from infembed_ray.serving.encoder.known import describe
from infembed_ray.serving.http.auth import ApiKeys, is_loopback
from infembed_ray.serving.http.body import LIMIT_VARIABLE, READ_TIMEOUT_S
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
    RerankerArguments,
)
from infembed_ray.serving.reranking import arguments as reranking
from infembed_ray.storage.object_store import is_uri
from infembed_ray.storage.places import address, listing, place_of
from infembed_ray.storage.steps import MANIFEST, read_manifest, resolve_input
from infembed_ray.telemetry import json_logs

SLOW_BYTES_PER_S = 50e6
"""Lowest rate at which a node is expected to copy or read an index or a model; start-up time-outs grow with them at this rate."""
LOGGING = {"log_level": "WARNING", "enable_access_log": False} | ({"encoding": "JSON"} if json_logs() else {})
"""Logging of Serve's processes."""


Row = TypeVar("Row", bound=BaseModel)


@dataclass(frozen=True)
class Plan:
    """What `infembed serve` starts."""

    settings: ServeSettings
    api: ApiArguments
    release: ReleaseSpec
    index_bytes: int
    model_bytes: int
    """Of the weights, the reranker's included; 0 for a model on the hub."""

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
        _require_safe(settings, locked)
        probes = _probe_set(settings)
        suggestions = [] if settings.suggestions is None else read_suggestions(settings.suggestions)
        indexes: dict[str, DescribedIndex] = {}
        encoders: dict[str, DescribedEncoder] = {}
        for name, place in settings.indexes.items():
            with _errors_of(name):
                indexes[name] = index = describe_index(settings, place)
                if settings.ranking.hybrid and not index.facts.lexical:
                    raise InputError(f"ranking.hybrid={settings.ranking.hybrid:g}: index={place}: {schema.NO_WORDS}")
                _require_apart(index, indexes, name)
                if index.facts.encoder not in encoders:
                    encoders[index.facts.encoder] = describe_encoder(settings, index, encoders.values())
        default = encoders[indexes[DEFAULT_COLLECTION].facts.encoder]
        reranker = reranking.resolve(settings, default.arguments.model)
        collections = {}
        for name, index in indexes.items():
            of_playground = suggestions if name == DEFAULT_COLLECTION else []
            encoder = encoders[index.facts.encoder]
            collections[name] = CollectionSpec(
                encoder=encoder.arguments,
                index=index.arguments,
                shards=index.shards,
                changes=index.changes,
                card=_card(settings, index, encoder, reranker, of_playground),
            )
        models = [encoder.arguments.model for encoder in encoders.values()] + ([reranker.model] if reranker else [])
        rerank = settings.rerank and settings.rerank.model_copy(update={"model": None})
        api = ApiArguments(locked=locked, settings=settings)
        return cls(
            settings,
            api,
            ReleaseSpec(
                api=api.digest(),
                collections=collections,
                reranker=reranker,
                rerank=rerank,
                probes=probes,
                command=uuid4().hex,
            ),
            sum(index.facts.bytes for index in indexes.values()),
            sum(map(model_bytes, models)),
        )

    @property
    def reading_s(self) -> float:
        """Seconds to add to time-outs of the start, in which a node copies or reads up to the whole index and the model."""
        return (self.index_bytes + self.model_bytes) / SLOW_BYTES_PER_S

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
        yield "CPU", f"cpus_per_encoder={settings.cpus_per_encoder:g}", encoders, settings.cpus_per_encoder
        yield "CPU", f"cpus_per_shard={settings.cpus_per_shard:g}", shards, settings.cpus_per_shard
        yield "CPU", f"ingress_replicas={settings.ingress_replicas}", settings.ingress_replicas, INGRESS_CPUS
        yield "GPU", f"gpus_per_encoder={settings.gpus_per_encoder:g}", encoders, settings.gpus_per_encoder
        yield "GPU", f"gpus_per_shard={settings.gpus_per_shard:g}", shards, settings.gpus_per_shard
        if rerank := settings.rerank:
            yield "CPU", f"rerank.cpus={rerank.cpus:g}", rerank.replicas, rerank.cpus
            yield "GPU", f"rerank.gpus={rerank.gpus:g}", rerank.replicas, rerank.gpus

    @property
    def controller_environment(self) -> dict[str, str]:
        """Environment of Serve's controller, inherited by its proxies and replicas; fixed when Serve starts.

        RAY_SERVE_* variables of this process take precedence.
        """
        environment = ray_compat.GRPC_CALLS | {
            ray_compat.PROXY_MIDDLEWARE_VARIABLE: "infembed_ray.serving.routing.proxy:middlewares",
            LIMIT_VARIABLE: str(self.settings.max_body_mib),
        }
        if self.settings.ha_proxy:
            environment |= ray_compat.haproxy_environment(client_timeout_s=2 * READ_TIMEOUT_S)
        return environment | {name: value for name, value in os.environ.items() if name.startswith("RAY_SERVE_")}

    def config(self) -> dict[str, Any]:
        """Return the config of `serve deploy`."""
        builders = {
            EncoderArguments: "deployments:encoder_application",
            IndexArguments: "deployments:index_application",
            RerankerArguments: "deployments:reranker_application",
            ApiArguments: "supervisor:api_application",
        }
        parts: dict[str, Arguments] = {**self.release.parts, APPLICATION: self.api}
        applications: list[dict[str, Any]] = [
            {
                "name": name,
                "route_prefix": "/" if name == APPLICATION else None,
                "import_path": f"infembed_ray.serving.{builders[type(arguments)]}",
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
        """Return where the API is, what it serves, and an example request."""
        card = self.release.default.card
        key = ' -H "Authorization: Bearer $KEY"' if self.api.locked else ""
        others = [
            f"  collection {name}: {spec.card.passages} passages, model {spec.card.id}, at {self.url}/v1/collections/{name}\n"
            for name, spec in self.release.collections.items()
            if name != DEFAULT_COLLECTION
        ]
        return (
            f"serve: {card.passages} passages, model {card.id}, at {self.url}\n"
            f"{''.join(others)}"
            f"  playground: {self.url}/   reference: {self.url}/docs\n"
            f"  curl -s {self.url}/v1/search -H 'Content-Type: application/json' \\\n"
            """       -d '{"query": "...", "instruction": "...", "top_k": 3}'"""
            f"{key}"
        )


def read_suggestions(value: str) -> list[schema.Suggestion]:
    """Read the example searches of the playground.

    Args:
        value: of the setting `suggestions`: a file of rows with `query` and `instruction`.

    Raises:
        InputError: no such file, no rows or too many, or a row that is not a query and an instruction.
    """
    most = schema.MAX_SUGGESTIONS
    rows = list(islice(raw_rows(resolve_input(value, "suggestions"), "suggestions"), most + 1))
    if not 1 <= len(rows) <= most:
        raise InputError(f"suggestions={value}: has {f'more than {most}' if rows else 'no'} rows; give 1 to {most}")
    advice = "give every row a query and an instruction"
    return [
        _row(schema.Suggestion, row, f"suggestions={value}: row {n}", advice) for n, row in enumerate(rows, start=1)
    ]


def _probe_set(settings: ServeSettings) -> ProbeSet | None:
    """Read the probe set, a file of rows with the fields of `Probe`.

    Raises:
        InputError: no such file, no rows, or a row that is no probe.
    """
    if (file := settings.probes) is None:
        return None
    advice = "give every row a query and the ids of its relevant passages (`relevant`)"
    rows = raw_rows(resolve_input(file, "probes"), "probes")
    probes = [_row(Probe, row, f"probes={file}: row {number}", advice) for number, row in enumerate(rows, start=1)]
    if not probes:
        raise InputError.of("probes", file, "has no rows", "give at least one query with its relevant passages")
    return ProbeSet(probes=probes, max_ndcg_drop=settings.max_ndcg_drop, max_p_mrr_drop=settings.max_p_mrr_drop)


def _row(kind: type[Row], row: Any, where: str, advice: str) -> Row:
    """Return a row of a file as an object; InputError if it is not valid."""
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(map(str, fault["loc"]))
        text = fault["msg"].removeprefix("Value error, ")
        raise InputError(f"{where}: {field}{': ' if field else ''}{text}; {advice}") from None


def _card(
    settings: ServeSettings,
    index: DescribedIndex,
    encoder: DescribedEncoder,
    reranker: RerankerArguments | None,
    suggestions: list[schema.Suggestion],
) -> schema.Model:
    """Return what the API says about a collection."""
    return schema.Model(
        id=encoder.name,
        created=int(time.time()),
        dimension=index.facts.dimension,
        encoder=index.facts.encoder,
        index_version=index.arguments.version,
        passages=index.facts.passages,
        vocabulary=encoder.vocabulary,
        metadata=dict(index.facts.metadata),
        writable=settings.writable,
        lexical=index.facts.lexical,
        reranker=reranker and model_name(reranker.model, local(reranker.model)),
        suggestions=suggestions,
    )


def _require_safe(settings: ServeSettings, locked: bool) -> None:
    """InputError if the API would be open to other machines, or the settings contradict each other."""
    if not locked and not is_loopback(settings.host):
        raise InputError.of(
            "host",
            settings.host,
            "open to other machines without API keys",
            f"set {settings.api_keys_env or 'api_keys_env and its variable'} to key1,key2,... or host=127.0.0.1",
        )
    if (
        settings.gpus_per_shard and not on_a_cluster()
    ):  # on a cluster, GPU nodes have their own FAISS; replicas check it
        require_gpu_faiss()


# ------------------------------------------------------------------------------------------- indexes and models


class DescribedIndex(NamedTuple):
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


class DescribedEncoder(NamedTuple):
    """An encoder that is not loaded."""

    arguments: EncoderArguments
    name: str
    """Of the model, in the API."""
    vocabulary: int


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Let an InputError of the block name the setting of a collection in place of `index`."""
    try:
        yield
    except InputError as error:
        raise error if name == DEFAULT_COLLECTION else error.renamed("index", f"collections.{name}") from error


def describe_index(settings: ServeSettings, place: str) -> DescribedIndex:
    """Read the facts of an index, and check the files of its shards.

    Raises:
        InputError: there is no such index, it is damaged, or the external engine cannot be used.
    """
    if is_address(place):
        engine = Milvus(MilvusAddress.parse(place, "index", settings.store_token_env))
        version = engine.current()
        if engine.one_writer and settings.shard_replicas > 1:
            fault = f"{place} takes one writer at a time"
            raise InputError.of(
                "shard_replicas", settings.shard_replicas, fault, "set 1, or use a server of several nodes"
            )
        facts = IndexFacts.of_manifest(version.manifest, engine.address)
        arguments = IndexArguments(index=str(engine.address), version=version.id, settings=settings)
        return DescribedIndex(arguments, facts, (STORE,), None)
    index = Index.describe(place)
    if isinstance(index.path, Path):  # replicas copy and check their own shards from an object store
        for shard in index.facts.shards:
            local_directory(index.path, shard)
    names = tuple(shard.name for shard in index.facts.shards)
    arguments = IndexArguments(index=address(index.path), version=index.version, settings=settings)
    return DescribedIndex(arguments, index.facts, names, address(index.changes))


def _require_apart(index: DescribedIndex, indexes: Mapping[str, DescribedIndex], name: str) -> None:
    """InputError if another collection has the same index: a document put in one would be found in both."""
    for other, described in indexes.items():
        if other != name and index.changed_at == described.changed_at:
            raise InputError.of(
                "index",
                index.arguments.index,
                f"is the index of the collection {other!r} too, and both would change the same documents",
                "give each collection an index of its own",
            )


def describe_encoder(
    settings: ServeSettings, index: DescribedIndex, others: Collection[DescribedEncoder]
) -> DescribedEncoder:
    """Describe the encoder of an index; InputError unless it built the index, can run, and has a name of its own."""
    model = find(settings.model or index.facts.model, "model").path
    path = local(model)
    encoder = describe(path, index.facts.dimensions)
    index.facts.require_encoder(encoder.fingerprint, index.arguments.index)
    _require_runnable(settings, path)
    name = model_name(settings.model or index.facts.model, path)
    if not others:
        name = settings.model_name or name
    elif taken := [other.arguments for other in others if other.name == name]:
        raise InputError.of(
            "index",
            index.arguments.index,
            f"its encoder {encoder.fingerprint} has the same name in the API, {name}, as another one, {taken[0].fingerprint}",
            "build both indexes with one encoder, or give one of the two directories another name",
        )
    arguments = EncoderArguments(
        model=model, fingerprint=encoder.fingerprint, dimensions=index.facts.dimensions, settings=settings
    )
    return DescribedEncoder(arguments, name, encoder.vocabulary)


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
