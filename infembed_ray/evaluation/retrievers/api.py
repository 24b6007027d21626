"""Remote embedders: OpenAI-compatible /embeddings, and Cohere's /embed.

They are asked by the engine of the synthesis: every text's embedding is in a journal before it is used, and is looked up
before a request is sent, so no text is paid for twice, whatever task or run it is in; the budget is reserved before.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from infembed_ray.config import RetrieverSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation.retrievers import formats
from infembed_ray.evaluation.tasks.task import Query
from infembed_ray.modeling.layout import Side
from infembed_ray.storage import local_path, require_writable
from infembed_ray.synthesis import budget, prices
from infembed_ray.synthesis.chat import Completion, Request, RowFailure, RunFailure, sound
from infembed_ray.synthesis.client import ChatClient, Unanswered, Wire, finish, token_counts
from infembed_ray.synthesis.journal import Journal
from infembed_ray.synthesis.limits import REQUESTS, SLOTS, TOKENS, USD, Amounts, Gate, Grant, Lease, Report, resources
from infembed_ray.synthesis.prices import PriceTable

RENEWED_S = 0.5
"""Seconds between two reports to the ledger while all goes well."""
COHERE_TEXTS = 96
"""Most texts of one request to Cohere."""
BLANK = "."
"""What is sent for a text without any: the APIs refuse it."""

_PATHS = {"openai": "embeddings", "cohere": "embed"}
_INPUT_TYPES: dict[Side, str] = {"query": "search_query", "passage": "search_document"}


class ApiEncoder:
    """A remote embedder. There is one process of it in a run: it keeps the budget.

    Args:
        settings: resolved, of kind `api`.
        identity: hash of all that decides its embeddings.

    Raises:
        InputError: no journal is given, or it cannot be written; or the budget cannot be kept.
    """

    def __init__(self, settings: RetrieverSettings, identity: str) -> None:
        require_usable(settings)
        assert settings.model is not None
        assert settings.api.journal is not None
        api = settings.api
        self.identity = identity
        self._settings = settings
        self._model = settings.model
        self._directory = local_path(settings.api.journal, "api.journal")
        require_writable(self._directory, "api.journal")
        self._prices = prices.load(api.prices)
        self._journal = Journal(self._directory)
        spent_usd = 0.0 if api.limits.budget_usd is None else budget.spent_usd(self._directory, self._prices)
        slots = min(api.limits.in_flight or api.in_flight, api.in_flight)
        self._ledger = budget.NotedLedger(api.limits, slots, spent_usd, self._directory)

    def encode_queries(self, queries: Sequence[Query]) -> np.ndarray:
        """(n, d) float32 unit vectors.

        Raises:
            InputError: as of `encode_passages`.
        """
        return self._encode([formats.query_text(self._settings, query) for query in queries], "query")

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """(n, d) float32 unit vectors.

        Raises:
            InputError: a key is missing or refused, the model unknown, the budget used up, the endpoint out of reach, a
                text refused, or an embedding is no vector of finite numbers. What was paid for is in the journal.
        """
        return self._encode([formats.passage_text(self._settings, text) for text in texts], "passage")

    def _encode(self, texts: Sequence[str], side: Side) -> np.ndarray:
        wanted = [self._request(text, side) for text in texts]
        missing = {request.key: request for request in wanted if self._journal.get(request.key) is None}
        if missing:
            finish(self._ask(list(missing.values())))
        embeddings = [self._vector(request) for request in wanted]
        if len({len(vector) for vector in embeddings}) > 1:
            raise InputError(
                f"model={self._model}: its embeddings differ in length; set dimensions, or another journal"
            )
        whole = np.array(embeddings, dtype=np.float32)
        return whole / np.linalg.norm(whole, axis=-1, keepdims=True).clip(min=1e-12)

    def _vector(self, request: _Embed) -> np.ndarray:
        known = self._journal.get(request.key)
        assert known is not None
        return _numbers(known.text)

    def _request(self, text: str, side: Side) -> _Embed:
        cut = text[: self._settings.api.max_characters]
        protocol = self._settings.api.protocol
        parameters: dict[str, Any] = {"encoding_format": "float"}
        if protocol == "cohere":
            parameters = {"input_type": _INPUT_TYPES[side], "embedding_types": ["float"], "truncate": "END"}
        if self._settings.dimensions is not None:
            parameters["output_dimension" if protocol == "cohere" else "dimensions"] = self._settings.dimensions
        parameters["texts" if protocol == "cohere" else "input"] = [cut if cut.strip() else BLANK]
        return _Embed(self._model, (), "embedding=1", "embed", side, parameters)

    async def _ask(self, requests: Sequence[_Embed]) -> None:
        """Have the endpoint embed texts; all embeddings are in the journal afterwards."""
        api = self._settings.api

        async def exchange(report: Report) -> Grant:
            return self._ledger.exchange(report)

        lease = Lease(uuid.uuid4().hex, resources(api.limits), api.in_flight, api.limits.window_s)
        gate = Gate(lease, exchange, min(RENEWED_S, api.limits.window_s / 100))
        wire = Wire(_PATHS[api.protocol], partial(embeddings_of, api.protocol), worst_case)
        client = ChatClient([api.endpoint], self._journal, gate, self._prices, wire)
        tasks = [
            asyncio.create_task(self._ask_at_once(client, requests[start : start + api.texts_per_request]))
            for start in range(0, len(requests), api.texts_per_request)
        ]
        try:
            await asyncio.gather(*tasks)
        except (RowFailure, RunFailure) as failure:
            gate.fail(str(failure))  # what is in flight is still journaled, nothing more is sent
            await asyncio.gather(*tasks, return_exceptions=True)
            raise InputError(
                f"model={self._model}: {failure}; the same command resumes, nothing is paid twice"
            ) from failure
        finally:
            await client.close()
            self._ledger.conclude()

    async def _ask_at_once(self, client: ChatClient, requests: Sequence[_Embed]) -> None:
        together = replace(requests[0], parameters=requests[0].with_texts([each.texts[0] for each in requests]))
        try:
            answer = await client.send(together)
        except RowFailure as failure:
            if failure.__cause__ is not None:  # given up after retries: the texts are not to blame
                raise
            if len(requests) == 1:
                raise RowFailure(
                    f"the endpoint refuses the text {requests[0].texts[0][:60]!r} ({failure}); lower api.max_characters if "
                    "it is too long for the model"
                ) from failure
            half = len(requests) // 2
            await self._ask_at_once(client, requests[:half])
            await self._ask_at_once(client, requests[half:])
            return
        vectors: list[str] = json.loads(answer.text)
        if len(vectors) != len(requests):
            raise RowFailure(f"{len(vectors)} embeddings for {len(requests)} texts; this is no embeddings endpoint")
        shares = _shares(answer.prompt_tokens, [len(each.texts[0].encode()) for each in requests])
        answered = list(zip(requests, vectors, shares, strict=True))
        sound = [np.isfinite(_numbers(vector)).all() for vector in vectors]
        await asyncio.gather(
            *(
                self._journal.append(each, replace(answer, text=vector, prompt_tokens=tokens))
                for each, vector, tokens in itertools.compress(answered, sound)
            )
        )
        if not all(sound):
            text = requests[sound.index(False)].texts[0]
            raise RowFailure(f"the embedding of {text[:60]!r} is not finite; its endpoint is at fault")


def require_usable(settings: RetrieverSettings, where: str = "model") -> None:
    """Can this API be asked, as far as its settings say?

    Raises:
        InputError: it has no URL or no journal, or a budget that cannot be kept; `where` names the setting.
    """
    api = settings.api
    if not api.endpoint.base_url.startswith(("http://", "https://")):
        raise InputError(
            f"{where}.api.endpoint.base_url={api.endpoint.base_url}: no URL; write it like https://host/v1"
        )
    if api.journal is None:
        raise InputError(f"{where}.api.journal is missing: give a directory, in which what was paid for is kept")
    if api.protocol == "cohere" and api.texts_per_request > COHERE_TEXTS:
        raise InputError(f"{where}.api.texts_per_request={api.texts_per_request}: Cohere takes at most {COHERE_TEXTS}")
    if api.limits.budget_usd is not None and prices.load(api.prices).price(str(settings.model)) is None:
        raise InputError(
            f"{where}.api.limits.budget_usd={api.limits.budget_usd:g}: no price is known of model={settings.model}; give its "
            f"prices in a file and set {where}.api.prices=FILE"
        )


class _Embed(Request):
    """A request to embed some texts, which stand where the protocol has them."""

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the HTTP request."""
        return {"model": self.model, **self.parameters}

    @cached_property
    def texts(self) -> list[str]:
        """The texts."""
        texts: list[str] = self.parameters["texts" if "texts" in self.parameters else "input"]
        return texts

    def with_texts(self, texts: Sequence[str]) -> dict[str, Any]:
        """Its parameters with other texts."""
        return {**self.parameters, "texts" if "texts" in self.parameters else "input": list(texts)}


def worst_case(request: Request, table: PriceTable) -> Amounts:
    """The most that a request can use: no tokenizer makes more tokens of a text than its UTF-8 bytes, and two marks."""
    assert isinstance(request, _Embed)
    tokens = sum(len(text.encode()) + 2 for text in request.texts)
    usd = table.usd(request.model, Completion("", "", "", tokens, 0))
    return {SLOTS: 1, REQUESTS: 1, TOKENS: tokens, USD: float("inf") if usd is None else usd}


def embeddings_of(protocol: str, body: bytes) -> Completion:
    """The embeddings in a response's body: a JSON list of base64 texts, each a vector's float32 numbers.

    Raises:
        Unanswered: there are none.
    """
    try:
        answer = json.loads(body)
        vectors = answer["embeddings"]["float"] if protocol == "cohere" else list(_in_order(answer["data"]))
        return Completion(
            text=json.dumps([base64.b64encode(np.array(v, dtype="<f4").tobytes()).decode() for v in vectors]),
            finish_reason="stop",
            model=sound(str(answer.get("model") or "")),
            prompt_tokens=_tokens(protocol, answer),
            completion_tokens=0,
        )
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Unanswered("the response holds no embeddings (cut short?)") from error


def _numbers(vector: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(vector), dtype="<f4")


def _in_order(data: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    for entry in sorted(data, key=lambda entry: int(entry["index"])):
        yield entry["embedding"]


def _tokens(protocol: str, answer: Mapping[str, Any]) -> int:
    if protocol == "cohere":
        return token_counts((answer.get("meta") or {}).get("billed_units"), "input_tokens")[0]
    return token_counts(answer.get("usage"), "prompt_tokens")[0]


def _shares(total: int, sizes: Sequence[int]) -> list[int]:
    """A total divided by sizes, in whole numbers that sum to it."""
    borders = (np.cumsum([0, *sizes], dtype=np.int64) * total // max(1, sum(sizes))).tolist()
    return [stop - start for start, stop in itertools.pairwise(borders)]
