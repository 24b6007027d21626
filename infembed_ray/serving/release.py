"""A release: one encoder and one index version of each collection, as the arguments of their Serve applications.

It is plain JSON: the `user_config` of the ingress, so a new one restarts nothing. The name of an application contains a digest
of its arguments: applications with different arguments run side by side, and equal ones are shared.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from infembed_ray import __version__
from infembed_ray.config.serving import DEFAULT_COLLECTION, RerankSettings, ServeSettings
from infembed_ray.serving import schema
from infembed_ray.telemetry import json_logs

APPLICATION = "infembed"
"""Serve application of the API, and prefix of the others."""
ENCODER, INGRESS, RERANKER, STORE, SUPERVISOR = "encoder", "ingress", "reranker", "store", "supervisor"
"""Deployments; `STORE` stands for the shards where an external engine holds the index."""
LOGGING = {"log_level": "WARNING", "enable_access_log": False} | ({"encoding": "JSON"} if json_logs() else {})
"""Logging of Serve's processes."""
INGRESS_CPUS = 0.1
"""CPUs that an ingress replica reserves; it mostly waits."""


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps({**content, "code_version": __version__}, sort_keys=True).encode()).hexdigest()


class Arguments(BaseModel):
    """Arguments of an application."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    builder: ClassVar[str] = ""
    """`module:function` that builds the application."""
    relevant: ClassVar[set[str]] = set()
    """Names of the settings that affect the application."""
    places: ClassVar[set[str]] = set()
    """Fields that say where the content is read; its fingerprint says what it is."""
    settings: ServeSettings
    """The relevant settings; the others get their defaults, so they do not change the digest."""

    @field_validator("settings")
    @classmethod
    def _keep_relevant(cls, settings: ServeSettings) -> ServeSettings:
        return ServeSettings(index="", **settings.model_dump(include=cls.relevant))

    def digest(self) -> str:
        """Return 8 hex digits that change with the arguments and with the version of this package."""
        relevant = self.settings.model_dump(mode="json", include=self.relevant)
        return _digest({**self.model_dump(mode="json", exclude=self.places), "settings": relevant})[:8]


class EncoderArguments(Arguments):
    """Arguments of an encoder, which is identified by its fingerprint, wherever it was read."""

    builder: ClassVar[str] = "infembed_ray.serving.deployments:encoder_application"
    relevant: ClassVar[set[str]] = {
        *("encoder_replicas", "max_encoder_replicas", "gpus_per_encoder", "cpus_per_encoder", "dtype"),
        "request_timeout_s",
    }
    places: ClassVar[set[str]] = {"model"}
    model: str
    """Directory, URI in an object store, or hub name."""
    fingerprint: str
    dimensions: int | None = None
    """Dimensions of its embeddings, if fewer than the model's."""

    @property
    def application(self) -> str:
        """Name of the application."""
        return f"{APPLICATION}-encoder-{self.fingerprint[:8]}-{self.digest()}"


class IndexArguments(Arguments):
    """Arguments of the shards of an index."""

    builder: ClassVar[str] = "infembed_ray.serving.deployments:index_application"
    relevant: ClassVar[set[str]] = {"shard_replicas", "gpus_per_shard", "cpus_per_shard", "request_timeout_s"}
    index: str
    """Directory of an index version, its URI in an object store, or its address in an external engine."""
    version: str

    @property
    def application(self) -> str:
        """Name of the application."""
        return f"{APPLICATION}-index-{self.version[:8]}-{self.digest()}"


class RerankerArguments(Arguments):
    """Arguments of a reranker."""

    builder: ClassVar[str] = "infembed_ray.serving.deployments:reranker_application"
    relevant: ClassVar[set[str]] = {"cpus_per_encoder", "gpus_per_encoder", "request_timeout_s"}
    places: ClassVar[set[str]] = {"model"}
    model: str
    """Directory, URI in an object store, or hub name."""
    fingerprint: str
    """Hash of the model's files and of the settings that decide the scores."""
    reranker: dict[str, Any] | None = None
    """Settings of a cross-encoder but its model, as of a model of `infembed evaluate`; None: late interaction."""
    replicas: int

    @property
    def application(self) -> str:
        """Name of the application; it changes with the model."""
        return f"{APPLICATION}-reranker-{self.digest()}"


class ApiArguments(Arguments):
    """Arguments of the API."""

    builder: ClassVar[str] = "infembed_ray.serving.supervisor:api_application"
    relevant: ClassVar[set[str]] = {
        *("api_keys_env", "api_keys_file", "ingress_replicas", "encoder_replicas", "max_encoder_replicas"),
        *("shard_replicas", "request_timeout_s", "ha_proxy", "compact_at", "ranking"),
    }
    locked: bool
    package: str = __version__
    """Version of this package; another one restarts the API."""

    def application(self, release: ReleaseSpec | None) -> dict[str, Any]:
        """Return the API over a release, as an application of a config file of `serve deploy`."""
        config = release and [{"name": INGRESS, "user_config": release.model_dump(mode="json")}]
        return {
            "name": APPLICATION,
            "route_prefix": "/",
            "import_path": self.builder,
            "args": self.model_dump(mode="json", exclude_defaults=True) | {"package": self.package},
            "logging_config": LOGGING,
            "deployments": config or [],
        }


class Probe(BaseModel):
    """A query under an instruction and the ids of its relevant passages; optionally the same under another instruction."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    query: str = Field(min_length=1)
    instruction: str | None = None
    relevant: list[str] = Field(min_length=1)
    changed_instruction: str | None = None
    changed_relevant: list[str] = []

    @model_validator(mode="after")
    def _both_or_neither(self) -> Probe:
        if (self.changed_instruction is None) != (not self.changed_relevant):
            raise ValueError("changed_instruction and changed_relevant: give both or neither")
        return self


class Reservation(NamedTuple):
    """Amount of a Ray resource that each replica of an application reserves, because of a setting."""

    application: str
    setting: str
    resource: str
    replicas: int
    each: float


class CollectionSpec(BaseModel):
    """What answers the requests to one collection."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    encoder: EncoderArguments
    index: IndexArguments
    shards: tuple[str, ...]
    """Deployments of the shards in the index's application, in order."""
    changes: str | None
    """Directory of the index's write-ahead log; None: the only shard takes changes itself, as an external engine does."""
    card: schema.Model


class ReleaseSpec(BaseModel):
    """What answers all requests: its collections, which the API switches in one step, and what it must prove before."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: ServeSettings = ServeSettings(index="")
    """What names the release, with places as every node finds them. An index of theirs is a version, or the directory of its
    versions, whose latest the API follows."""
    api: str
    collections: dict[str, CollectionSpec]
    reranker: RerankerArguments | None = None
    rerank: RerankSettings | None = None
    probes: list[Probe] = []
    """Queries that it must rank as well as the one that it replaces, but for what its settings allow it to lose."""
    command: str = ""
    """Id of the command that serves it. Empty: a config file names it, so its index versions must stay, because a cluster
    that restarts begins with them."""

    @property
    def default(self) -> CollectionSpec:
        """The default collection."""
        return self.collections[DEFAULT_COLLECTION]

    @property
    def by_name(self) -> dict[str, CollectionSpec]:
        """All collections, the default one first."""
        return {DEFAULT_COLLECTION: self.default, **self.collections}

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with anything that changes what is served, how, or from where."""
        content = self.model_dump(mode="json", exclude={"settings", "probes", "reranker", "command"})
        for collection in content["collections"].values():
            del collection["card"]["created"], collection["encoder"]["model"]
        named = {"reranker": self.reranker and self.reranker.application, "indexes": self.settings.indexes}
        return _digest({**content, **named})[:16]

    @property
    def encoders(self) -> dict[str, EncoderArguments]:
        """Application -> its arguments: an encoder for each distinct fingerprint of the indexes."""
        return {one.encoder.application: one.encoder for one in self.by_name.values()}

    @property
    def parts(self) -> dict[str, Arguments]:
        """All applications but the API: encoders, indexes and the reranker."""
        reranker = {self.reranker.application: self.reranker} if self.reranker else {}
        return {**self.encoders, **{one.index.application: one.index for one in self.by_name.values()}, **reranker}

    @property
    def reservations(self) -> set[Reservation]:
        """What all replicas reserve: encoders and rerankers without autoscaling, shards, and the API."""
        reserved = {Reservation(APPLICATION, "ingress_replicas", "CPU", self.settings.ingress_replicas, INGRESS_CPUS)}
        shards = {one.index.application: len(one.shards) for one in self.by_name.values()}
        for name, part in self.parts.items():
            own, kind = part.settings, "shard" if name in shards else "encoder"
            replicas = own.encoder_replicas
            if name in shards:
                replicas = own.shard_replicas * shards[name]
            elif isinstance(part, RerankerArguments):
                replicas = part.replicas
            for resource, setting in (("CPU", f"cpus_per_{kind}"), ("GPU", f"gpus_per_{kind}")):
                reserved.add(Reservation(name, setting, resource, replicas, getattr(own, setting)))
        return reserved

    @property
    def versions(self) -> str:
        """The version of each collection's index, for progress lines."""
        return ", ".join(f"{name} {one.card.index_version}" for name, one in self.by_name.items())
