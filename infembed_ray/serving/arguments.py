"""Arguments of three kinds of Serve applications: encoder, index and API. A config file holds them as JSON.

The name of an encoder or index application contains a digest of its arguments, so applications with different arguments
can run beside each other, and equal ones are shared.
"""

from __future__ import annotations

import hashlib
import json
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, field_validator

from infembed_ray import __version__
from infembed_ray.config.serving import ServeSettings

APPLICATION = "infembed"
"""Serve application of the API, and prefix of the others."""
ENCODER, INGRESS, METRICS, RERANKER, STORE = "encoder", "ingress", "metrics", "reranker", "store"
"""Deployments; `STORE` stands for the shards where an external engine holds the index."""
INGRESS_CPUS = 0.1
"""CPUs that an ingress replica reserves; it mostly waits."""


class Arguments(BaseModel):
    """Arguments of an application."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    relevant: ClassVar[set[str]] = set()
    """Names of the settings that affect the application."""
    settings: ServeSettings
    """The relevant settings; the others get their defaults, so they do not change the digest."""

    @field_validator("settings")
    @classmethod
    def _keep_relevant(cls, settings: ServeSettings) -> ServeSettings:
        return ServeSettings(index="", **settings.model_dump(include=cls.relevant))

    def digest(self) -> str:
        """Return 8 hex digits that change with the arguments and with the version of this package."""
        relevant = self.settings.model_dump(mode="json", include=self.relevant)
        content = {**self.model_dump(mode="json"), "settings": relevant, "code_version": __version__}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


class EncoderArguments(Arguments):
    """Arguments of `deployments.encoder_application`."""

    relevant: ClassVar[set[str]] = {
        *("model", "encoder_replicas", "max_encoder_replicas", "gpus_per_encoder", "cpus_per_encoder", "runtime"),
        *("dtype", "min_cosine", "prefix_cache_mib", "batch_tokens", "max_queue", "request_timeout_s"),
    }
    model: str
    """Directory, URI in an object store, or hub name."""
    fingerprint: str
    """Fingerprint of the encoder that built the index."""
    dimensions: int | None = None
    """Dimensions of its embeddings, if fewer than the model's."""

    @property
    def application(self) -> str:
        """Name of the application."""
        return f"{APPLICATION}-encoder-{self.fingerprint[:8]}-{self.digest()}"


class IndexArguments(Arguments):
    """Arguments of `deployments.index_application`."""

    relevant: ClassVar[set[str]] = {
        "shard_replicas",
        "gpus_per_shard",
        "cpus_per_shard",
        "shard_cache",
        "store_token_env",
        "max_queue",
        "request_timeout_s",
    }
    index: str
    """Directory of an index version, its URI in an object store, or its address in an external engine."""
    version: str

    @property
    def application(self) -> str:
        """Name of the application."""
        return f"{APPLICATION}-index-{self.version[:8]}-{self.digest()}"


class ApiArguments(Arguments):
    """Arguments of `deployments.api_application`."""

    relevant: ClassVar[set[str]] = {
        *("api_keys_env", "api_keys_file", "ingress_replicas", "encoder_replicas", "max_encoder_replicas"),
        *("shard_replicas", "max_queue", "request_timeout_s", "max_body_mib", "ha_proxy", "query_cache_mib"),
        *("max_changed_documents", "ranking"),
    }
    locked: bool
    """API keys are configured; a replica that finds none does not start."""
