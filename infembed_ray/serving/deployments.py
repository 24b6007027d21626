"""`infembed serve`: encoder, index shards and HTTP ingress as deployments of one Ray Serve application.

A search goes client -> ingress -> encoder -> all shards at once -> ingress, which merges their hits.

Only the encoder's replicas import torch and transformers: a replica of a shard or of the ingress is half the size and
starts in half the time without.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.config import BackpressureConfig
from ray.serve.context import _get_global_client
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from ray.serve.schema import LoggingConfig

from infembed_ray import __version__
from infembed_ray.config import ServeSettings
from infembed_ray.distributed import connect, on_a_cluster
from infembed_ray.errors import InputError
from infembed_ray.modeling.layout import Tokens
from infembed_ray.progress import say
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.shards import Hit, Shard, ShardFacts, merge
from infembed_ray.serving import schema
from infembed_ray.serving.app import ApiError, Embedded, Found, create_app
from infembed_ray.serving.auth import ApiKeys, is_loopback
from infembed_ray.serving.engine import BatchingEngine, QueueFull, measured_overhead

APPLICATION = "infembed"
SMALL_CPUS = 0.1
"""CPUs asked for by a replica that mostly waits: ingress and shards. All of them fit beside an encoder on 2 CPUs."""
READY_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 2.0
CONSTRUCTOR_ATTEMPTS = 3
RETRY_AFTER_S = 1.0
"""What a client is told to wait when a replica is full or lost, and nobody knows better."""


# ------------------------------------------------------------------------------------------------ deployments


class Encoder:
    """A replica of the encoder behind its batching engine."""

    def __init__(self, model: str, settings: ServeSettings) -> None:
        import torch

        from infembed_ray.modeling.encoder import InstructionEncoder

        torch.set_num_threads(max(1, int(settings.cpus_per_encoder)))
        self._encoder = InstructionEncoder.from_pretrained(
            model, device="cuda" if settings.gpus_per_encoder else "cpu"
        ).eval()
        embed = partial(self._encoder.embed, batch_tokens=settings.batch_tokens)
        self._engine = BatchingEngine(
            embed,
            batch_tokens=settings.batch_tokens,
            max_queue=settings.max_queue,
            overhead_tokens=measured_overhead(embed, lambda n: Tokens([0] * n), settings.batch_tokens),
        )
        # One thread: truncation is state of a fast tokenizer, so two calls at a time would fail. Beside the event
        # loop, which a long text would hold up.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def embed(
        self, inputs: list[str] | list[list[int]], input_type: schema.InputType, instruction: str | None
    ) -> Embedded:
        """As `app.Service.embed`. Token arrays are decoded first, so template, prefix and special tokens apply."""
        tokens = await asyncio.get_running_loop().run_in_executor(
            self._tokenizing, self._tokenize, inputs, input_type, instruction
        )
        return Embedded(await self._engine.embed(tokens), sum(map(len, tokens)))

    def _tokenize(
        self, inputs: list[str] | list[list[int]], input_type: schema.InputType, instruction: str | None
    ) -> list[Tokens]:
        decode = partial(self._encoder.tokenizer.decode, skip_special_tokens=True)
        texts = [x if isinstance(x, str) else decode(x) for x in inputs]
        if input_type == "passage":
            return self._encoder.tokenize_passages(texts)
        return self._encoder.tokenize_queries(texts, [instruction] * len(texts))

    async def ready(self) -> bool:
        """Answers once the model is loaded."""
        return True


class ShardSearch:
    """A replica of one shard."""

    def __init__(self, root: Path, facts: ShardFacts) -> None:
        self._shard = Shard.open(root, facts)

    def search(self, vectors: np.ndarray, k: int) -> list[list[Hit]]:
        """As `Shard.search`; Serve runs it in a thread, beside the event loop."""
        return self._shard.search(vectors, k)

    async def ready(self) -> bool:
        """Answers once the shard is open."""
        return True


@serve.ingress()
class Ingress:
    """A replica of the HTTP API: `app.Service` over the other deployments."""

    def __init__(
        self,
        model: schema.Model,
        deployment: str,
        api_keys_env: str | None,
        locked: bool,
        encoder: DeploymentHandle,
        shards: list[DeploymentHandle],
    ) -> None:
        self._model, self._deployment = model, deployment
        self._encoder, self._shards = encoder, shards
        self._keys = ApiKeys.from_environment(api_keys_env)
        if locked and not self._keys:
            raise RuntimeError(
                f"api_keys_env={api_keys_env}: set where `serve` was started but not on the node of the ingress, "
                "which would be open; set it in the environment of all nodes"
            )

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self, self._model, self._deployment, self._keys)

    async def embed(
        self, inputs: list[str] | list[list[int]], input_type: schema.InputType, instruction: str | None
    ) -> Embedded:
        """As `app.Service.embed`."""
        embedded: Embedded = await _answer(self._encoder.embed.remote(inputs, input_type, instruction))
        return embedded

    async def search(self, query: str, instruction: str | None, top_k: int) -> Found:
        """As `app.Service.search`: all shards are asked at once and their hits merged."""
        start = time.perf_counter()
        embedded = await self.embed([query], "query", instruction)
        encoded = time.perf_counter()
        calls = [shard.search.remote(embedded.vectors, top_k) for shard in self._shards]
        answers = await asyncio.gather(*map(_answer, calls))
        hits = merge((hits for (hits,) in answers), top_k)
        return Found(
            [schema.SearchHit(id=hit.id, score=hit.score, text=hit.text) for hit in hits],
            schema.Timings(
                encode_ms=round(1e3 * (encoded - start), 3),
                search_ms=round(1e3 * (time.perf_counter() - encoded), 3),
            ),
        )

    async def ready(self) -> bool:
        """Do the encoder and every shard answer?"""
        calls = [handle.ready.remote() for handle in (self._encoder, *self._shards)]
        try:
            await asyncio.wait_for(asyncio.gather(*map(_answer, calls)), PROBE_TIMEOUT_S)
        except (asyncio.TimeoutError, ApiError, QueueFull):
            return False
        return True


async def _answer(response: DeploymentResponse) -> Any:
    """Await another deployment; its troubles come as what `app.Service` may raise."""
    try:
        return await response
    except RayTaskError as error:
        raise error.cause from error
    except BackPressureError as error:
        raise QueueFull(RETRY_AFTER_S) from error
    except (RayActorError, DeploymentUnavailableError) as error:
        raise ApiError(
            503,
            "a replica was lost; try again",
            type="server_error",
            code="replica_lost",
            headers={"Retry-After": str(int(RETRY_AFTER_S))},
        ) from error


def _application(plan: Plan) -> serve.Application:
    settings, index = plan.settings, plan.index
    # The engine's queue is what is bounded; these only keep Serve from queueing without bound before it.
    bounds: dict[str, Any] = {
        "max_ongoing_requests": 2 * settings.max_queue,
        "max_queued_requests": 2 * settings.max_queue,
        "max_constructor_retry_count": CONSTRUCTOR_ATTEMPTS,
    }
    encoder = serve.deployment(
        Encoder,
        name="encoder",
        num_replicas=settings.encoder_replicas,
        ray_actor_options={"num_cpus": settings.cpus_per_encoder, "num_gpus": settings.gpus_per_encoder},
        **bounds,
    ).bind(plan.model, settings)
    shards = [
        serve.deployment(
            ShardSearch,
            name=facts.name,
            num_replicas=settings.shard_replicas,
            ray_actor_options={"num_cpus": SMALL_CPUS},
            **bounds,
        ).bind(index.path.resolve(), facts)
        for facts in index.facts.shards
    ]
    ingress = serve.deployment(
        Ingress,
        name="ingress",
        ray_actor_options={"num_cpus": SMALL_CPUS},
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=RETRY_AFTER_S),
        **bounds,
    )
    return ingress.bind(plan.card, plan.fingerprint, settings.api_keys_env, plan.locked, encoder, shards)


# ------------------------------------------------------------------------------------------------------- verb


@dataclass(frozen=True)
class Plan:
    """A validated wish to serve."""

    settings: ServeSettings
    index: Index
    model: str
    """Directory or hub name of the encoder."""
    card: schema.Model
    locked: bool
    """There are API keys."""

    @classmethod
    def of(cls, settings: ServeSettings) -> Plan:
        """Check all that can be checked before anything starts.

        Raises:
            InputError: no such index or model, the index is damaged or another encoder built it, or the API would be
                open to other machines.
        """
        from infembed_ray.modeling.checkpoint import locate
        from infembed_ray.modeling.encoder import InstructionEncoder

        keys = ApiKeys.from_environment(settings.api_keys_env)
        if not keys and not is_loopback(settings.host):
            raise InputError(
                f"host={settings.host}: open to other machines without API keys; "
                f"set {settings.api_keys_env or 'api_keys_env and its variable'} to key1,key2,... or host=127.0.0.1"
            )
        index = Index.open(settings.index)
        found = locate(settings.model or index.facts.model, "model")
        encoder = InstructionEncoder.from_pretrained(found.path)
        index.require_encoder(encoder.fingerprint())
        card = schema.Model(
            id=settings.model_name or (Path(found.path).name if found.inputs else found.path),
            created=int(time.time()),
            dimension=index.facts.dimension,
            encoder=encoder.fingerprint(),
            index_version=index.version,
            passages=index.facts.passages,
            vocabulary=len(encoder.tokenizer),
        )
        return cls(settings, index, found.path, card, bool(keys))

    @property
    def url(self) -> str:
        """Where this machine reaches the API."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.settings.host, self.settings.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.settings.port}"

    @property
    def fingerprint(self) -> str:
        """Changes with anything that changes what is served, or how."""
        decides = {
            "settings": self.settings.identity(),
            "model": self.card.model_dump(exclude={"created"}),
            "locked": self.locked,
            "code_version": __version__,
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]

    def welcome(self) -> str:
        """Where the API is and how to ask it."""
        key = f' -H "Authorization: Bearer $KEY"  # one of ${self.settings.api_keys_env}' if self.locked else ""
        return (
            f"serve: {self.card.passages} passages, model {self.card.id}, at {self.url} (its page: {self.url}/docs)\n"
            f"  curl -s {self.url}/v1/search -H 'Content-Type: application/json' \\\n"
            """       -d '{"query": "...", "instruction": "...", "top_k": 3}'"""
            f"{key}"
        )


def run(settings: ServeSettings) -> None:
    """Serve until interrupted, or with `wait=False` leave the API up on the cluster and return.

    Nothing happens if the same index is already served with the same settings. If the cluster serves another one at
    this address, it is replaced.

    Raises:
        InputError: before anything starts, for anything wrong with the settings, the index, the model or the port.
    """
    plan = Plan.of(settings)
    if _served_at(plan.url) == plan.fingerprint:
        say(f"serve: nothing to do: same index and settings, already served at {plan.url}")
        return
    if not (settings.wait or on_a_cluster()):
        raise InputError("wait=false: there is no cluster to leave it on; start Ray and set RAY_ADDRESS, or wait=true")
    _deploy(plan)
    say(plan.welcome())
    if settings.wait:
        try:
            say("Ctrl-C ends it.")
            _until_interrupted()
        finally:
            _stop_if_ours(plan)


@contextmanager
def serving(settings: ServeSettings) -> Iterator[str]:
    """The API, up while the block runs: gives its base URL. `settings.wait` plays no part.

    Raises:
        InputError: as `run`.
    """
    plan = Plan.of(settings)
    _deploy(plan)
    try:
        yield plan.url
    finally:
        _stop_if_ours(plan)


def stop() -> None:
    """Take the API of this cluster down, and Serve with it where nothing else is served."""
    if APPLICATION in serve.status().applications:
        serve.delete(APPLICATION)
    if not serve.status().applications:
        serve.shutdown()


def _stop_if_ours(plan: Plan) -> None:
    """Take down what this plan deployed; not what has replaced it since."""
    if _served_at(plan.url) in (plan.fingerprint, None):
        stop()


def require_free_port(host: str, port: int) -> None:
    """InputError unless `host:port` can be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InputError(
                f"port={port}: cannot be listened on at {host} ({error.strerror}); "
                "stop what listens there, or set another port=..."
            ) from error


def _deploy(plan: Plan) -> None:
    """Start or replace the application, and wait until it answers at its URL. After a failure nothing is left up."""
    _join(plan)
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # this process' own talk of what it starts
    say(f"serve: starting {len(plan.index.shards)} shards, encoder {plan.card.id} and the HTTP API")
    try:
        serve.start(http_options={"host": plan.settings.host, "port": plan.settings.port}, logging_config=quiet)
        serve.run(_application(plan), name=APPLICATION, logging_config=quiet)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while _served_at(plan.url, "/readyz") != plan.fingerprint:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{plan.url}/readyz did not answer within {READY_TIMEOUT_S:.0f} s")
            time.sleep(0.1)
    except BaseException:
        stop()
        raise


def _join(plan: Plan) -> None:
    """Connect to the cluster; InputError unless the API can listen where it should, or is there to be replaced."""
    port = plan.settings.port
    replaces = _served_at(plan.url) is not None
    if not replaces and not on_a_cluster():
        require_free_port(plan.settings.host, port)  # before a cluster is started for nothing
    connect()
    status = serve.status()
    if status.proxies and not status.applications:
        serve.shutdown()  # what a job that was stopped in a hurry left listening
        status = serve.status()
    if not replaces:
        require_free_port(plan.settings.host, port)
    if replaces and APPLICATION not in status.applications:
        raise InputError(f"port={port}: another cluster's API is served there; stop it, or set another port")
    if status.proxies:
        # Serve keeps the address it was started with, whatever it is asked later: an API meant for loopback, and so
        # without keys, must not come up on one that listens everywhere.
        listens = _get_global_client().http_config
        if (listens.host, listens.port) != (plan.settings.host, port):
            raise InputError(
                f"port={port}: Serve runs on this cluster already and listens at {listens.host}:{listens.port}; "
                "give its host and port, or end it with `serve shutdown`"
            )


def _served_at(url: str, path: str = "/healthz") -> str | None:
    """The fingerprint of what this package serves at a URL of this machine; None if that is nothing."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url + path, timeout=PROBE_TIMEOUT_S) as response:
            fingerprint = json.load(response)["deployment"]
    except (OSError, ValueError, KeyError, TypeError):  # nothing there, or something else; HTTPError is an OSError
        return None
    return str(fingerprint)


def _until_interrupted() -> None:
    interrupted = threading.Event()
    previous = {
        number: signal.signal(number, lambda *_: interrupted.set()) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        interrupted.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
