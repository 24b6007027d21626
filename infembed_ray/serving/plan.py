"""Plan of `infembed serve`: the checked settings, as arguments of the Serve applications and as a config file."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from infembed_ray import __version__, ray_compat
from infembed_ray.config.serving import DEFAULT_COLLECTION, ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.checkpoint import local
from infembed_ray.ray_cluster import on_a_cluster
from infembed_ray.records.tables import raw_rows
from infembed_ray.retrieval.factory import require_gpu_faiss
from infembed_ray.serving import schema, tracing
from infembed_ray.serving.arguments import (
    APPLICATION,
    INGRESS,
    INGRESS_CPUS,
    ApiArguments,
    Arguments,
    EncoderArguments,
    IndexArguments,
)
from infembed_ray.serving.described import (
    ServedEncoder,
    ServedIndex,
    describe_encoder,
    describe_index,
    errors_of,
    model_bytes,
    model_name,
    require_apart,
)
from infembed_ray.serving.http.auth import ApiKeys, is_loopback
from infembed_ray.serving.http.body import LIMIT_VARIABLE, READ_TIMEOUT_S
from infembed_ray.serving.probes import Probe, read_probes
from infembed_ray.serving.reranking import arguments as reranking
from infembed_ray.serving.reranking.arguments import RerankerArguments
from infembed_ray.serving.routing.blue_green import CollectionSpec, ReleaseSpec
from infembed_ray.storage.steps import resolve_input
from infembed_ray.telemetry import json_logs

SLOW_BYTES_PER_S = 50e6
"""Least rate at which a node is expected to copy or read an index or a model; start-up time-outs grow with them at this rate."""
LOGGING = {"log_level": "WARNING", "enable_access_log": False} | ({"encoding": "JSON"} if json_logs() else {})
"""Logging of Serve's processes."""


@dataclass(frozen=True)
class Plan:
    """What `infembed serve` starts."""

    settings: ServeSettings
    encoders: Mapping[str, EncoderArguments]
    """Application -> its arguments: an encoder for each distinct fingerprint of the indexes."""
    indexes: Mapping[str, IndexArguments]
    """Application -> its arguments: the index of each collection."""
    reranker: RerankerArguments | None
    api: ApiArguments
    release: ReleaseSpec
    index_bytes: int
    model_bytes: int
    """Of the weights, the reranker's included; 0 for a model on the hub."""
    probes: Sequence[Probe]
    """Of the canary; empty: it has no probe set."""

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
        probes = [] if settings.canary.probes is None else read_probes(settings.canary.probes)
        suggestions = [] if settings.suggestions is None else read_suggestions(settings.suggestions)
        indexes: dict[str, ServedIndex] = {}
        encoders: dict[str, ServedEncoder] = {}
        for name, place in settings.indexes.items():
            with errors_of(name):
                indexes[name] = index = describe_index(settings, place)
                if settings.ranking.hybrid and not index.facts.lexical:
                    raise InputError(f"ranking.hybrid={settings.ranking.hybrid:g}: index={place}: {schema.NO_WORDS}")
                require_apart(index, indexes, name)
                if index.facts.encoder not in encoders:
                    encoders[index.facts.encoder] = describe_encoder(settings, index, encoders.values())
        parts = {name: (index, encoders[index.facts.encoder]) for name, index in indexes.items()}
        reranker = reranking.resolve(settings, parts[DEFAULT_COLLECTION][1].arguments.model)
        collections = {name: _spec(settings, locked, *parts[name], reranker, [], name) for name in settings.collections}
        others = [spec.fingerprint for spec in collections.values()]
        default = _spec(settings, locked, *parts[DEFAULT_COLLECTION], reranker, suggestions, *others)
        models = [encoder.arguments.model for encoder in encoders.values()] + ([reranker.model] if reranker else [])
        return cls(
            settings,
            {encoder.arguments.application: encoder.arguments for encoder in encoders.values()},
            {index.arguments.application: index.arguments for index in indexes.values()},
            reranker,
            ApiArguments(locked=locked, settings=settings),
            ReleaseSpec(**dict(default), collections=collections),
            sum(index.facts.bytes for index in indexes.values()),
            sum(map(model_bytes, models)),
            probes,
        )

    @property
    def index(self) -> IndexArguments:
        """Arguments of the default collection's index."""
        return self.indexes[self.release.index]

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
        shards = sum(len(spec.shards) for spec in self.release.by_name.values()) * settings.shard_replicas
        encoders = len(self.encoders) * settings.encoder_replicas
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
        if traces := tracing.variables():
            environment |= traces | ray_compat.tracing_environment("infembed_ray.serving.tracing:processors")
        if self.settings.ha_proxy:
            environment |= ray_compat.haproxy_environment(client_timeout_s=2 * READ_TIMEOUT_S)
        return environment | {name: value for name, value in os.environ.items() if name.startswith("RAY_SERVE_")}

    def config(self) -> dict[str, Any]:
        """Return the config of `serve deploy`."""
        builders: list[tuple[str, str, Arguments]] = [
            *((name, "encoder_application", arguments) for name, arguments in self.encoders.items()),
            *((name, "index_application", arguments) for name, arguments in self.indexes.items()),
        ]
        if self.reranker:
            builders.append((self.reranker.application, "reranker_application", self.reranker))
        builders.append((APPLICATION, "api_application", self.api))
        applications: list[dict[str, Any]] = [
            {
                "name": name,
                "route_prefix": "/" if name == APPLICATION else None,
                "import_path": f"infembed_ray.serving.deployments:{builder}",
                "args": arguments.model_dump(mode="json", exclude_defaults=True),
            }
            for name, builder, arguments in builders
        ]
        applications[-1]["deployments"] = [{"name": INGRESS, "user_config": self.release.as_json()}]
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
                raise InputError(
                    f"config_file={file}: exists and is not a config file of `infembed serve`; choose another name"
                ) from error
            kept = release.applications - {app["name"] for app in config["applications"]}
            config["applications"] += [app for app in previous["applications"] if app["name"] in kept]
        file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")

    def startup_message(self) -> str:
        """Return where the API is, what it serves, and an example request."""
        card = self.release.card
        key = ' -H "Authorization: Bearer $KEY"' if self.api.locked else ""
        others = [
            f"  collection {name}: {spec.card.passages} passages, model {spec.card.id}, at {self.url}/v1/collections/{name}\n"
            for name, spec in self.release.collections.items()
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
    read = []
    for number, row in enumerate(rows, start=1):
        try:
            read.append(schema.Suggestion.model_validate(row))
        except ValidationError as error:
            fault = error.errors()[0]
            raise InputError(
                f"suggestions={value}: row {number}: {fault['loc'][0]}: {fault['msg'].removeprefix('Value error, ')}; "
                "give every row a query and an instruction"
            ) from None
    return read


def _spec(
    settings: ServeSettings,
    locked: bool,
    index: ServedIndex,
    encoder: ServedEncoder,
    reranker: RerankerArguments | None,
    suggestions: list[schema.Suggestion],
    *more: str,
) -> CollectionSpec:
    """Return the parts of a collection; its fingerprint changes with `more` too."""
    card = schema.Model(
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
    applications = encoder.arguments.application, index.arguments.application
    more = (*more, *([reranker.application] if reranker else []))
    return CollectionSpec(
        fingerprint=_fingerprint(settings, card, locked, *applications, *more),
        encoder=applications[0],
        index=applications[1],
        shards=index.shards,
        changes=index.changes,
        card=card,
        rerank=reranker and settings.rerank and reranker.spec(settings.rerank),
    )


def _require_safe(settings: ServeSettings, locked: bool) -> None:
    """InputError if the API would be open to other machines, or the settings contradict each other."""
    if not locked and not is_loopback(settings.host):
        raise InputError(
            f"host={settings.host}: open to other machines without API keys; "
            f"set {settings.api_keys_env or 'api_keys_env and its variable'} to key1,key2,... or host=127.0.0.1"
        )
    limit = settings.max_changed_documents
    if settings.writable and limit is not None and settings.compact_at is not None and settings.compact_at > limit:
        raise InputError(
            f"compact_at={settings.compact_at}: documents are refused from max_changed_documents={limit} on, so no compaction "
            f"would start; set compact_at to at most {limit}, or null"
        )
    if settings.shard_cache is not None and not settings.shard_cache.startswith(("/", "~")):
        raise InputError(
            f"shard_cache={settings.shard_cache}: replicas have other working directories; give an absolute path, or one "
            "that begins with ~"
        )
    if (
        settings.gpus_per_shard and not on_a_cluster()
    ):  # on a cluster, GPU nodes have their own FAISS; replicas check it
        require_gpu_faiss()


def _fingerprint(settings: ServeSettings, card: schema.Model, locked: bool, *applications: str) -> str:
    """Return 16 hex digits that change with anything that changes what is served, how, or from where."""
    content = {
        "settings": settings.identity(),
        "card": card.model_dump(exclude={"created"}),
        "locked": locked,
        "applications": applications,
        "code_version": __version__,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
