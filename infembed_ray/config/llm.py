"""Settings of the LLM client: models, endpoints, limits and the Batch API."""

import re
from typing import Literal

from pydantic import Field, field_validator

from infembed_ray.config.base import Settings, runtime_field

_URL = re.compile(r"https?://(\[[\da-fA-F:]+\]|[^\s/:?#]+)(:0*[1-9]\d*)?(/\S*)?")


class ChatModel(Settings):
    """An LLM of the synthesis pipeline and its parameters."""

    model: str = Field(description="model id at the endpoint, for example gpt-4o-mini; recorded in the provenance")
    temperature: float | None = Field(None, ge=0, le=2, description="sampling temperature; null: not sent")
    max_tokens: int | None = Field(None, ge=1, description="maximum tokens of an answer; null: not sent")
    reasoning_effort: str | None = Field(None, description="low, medium, high, ... (reasoning models); null: not sent")
    structured: bool = Field(False, description="ask for JSON by a strict schema; false: labelled text")


class Endpoint(Settings):
    """An OpenAI-compatible endpoint."""

    base_url: str = runtime_field(
        "https://api.openai.com/v1",
        description="URL up to /v1; of Azure OpenAI https://RESOURCE.openai.azure.com/openai/v1, models by deployment",
    )
    api_key_env: str | None = runtime_field(
        "OPENAI_API_KEY",
        description="environment variable with the key, set on every node; null: the endpoint needs no key",
    )
    timeout_s: float = runtime_field(120.0, gt=0, description="seconds until a request is abandoned and retried")
    max_retries: int = runtime_field(
        6,
        ge=0,
        description="retries of 5xx and time-outs before the row becomes a dead letter, while the endpoint answers others",
    )
    patience_s: float = runtime_field(
        600.0,
        ge=0,
        description="seconds for which requests are retried while the endpoint gives no answer (429, 5xx, time-out, no "
        "connection) before the run stops; also for a call about batches",
    )

    @field_validator("base_url")
    @classmethod
    def _require_url(cls, url: str) -> str:
        if not _URL.fullmatch(url):
            raise ValueError("no URL; write it like https://host/v1")
        return url


class Limits(Settings):
    """Limits of all actors of a run together; null: unlimited."""

    requests_per_minute: int | None = runtime_field(None, ge=1, description="requests sent, answered or not")
    tokens_per_minute: int | None = runtime_field(None, ge=1, description="tokens of prompts and answers")
    budget_usd: float | None = runtime_field(
        None, ge=0, description="maximum USD at list prices, over all runs on this journal; when spent, the run ends"
    )
    window_s: float = runtime_field(60.0, gt=0, description="seconds of the sliding windows of the limits per minute")


class Batches(Settings):
    """The Batch API, at half the price. A row's requests go out one after another, in waves of batches.

    The limits per minute do not apply to batches, which have a quota of their own. The budget applies to the worst case of
    each submitted batch.
    """

    poll_s: float = runtime_field(30.0, gt=0, description="seconds between two status requests for a batch")
    rest: Literal["stop", "dead_letter", "online"] = runtime_field(
        "stop",
        description="requests that all attempts left unanswered: stop (the run ends; a rerun batches them again), "
        "dead_letter (their rows become dead letters) or online (ask them at full price)",
    )
