"""Remote embedders: OpenAI-compatible /embeddings, and Cohere's /embed, through the LLM client (`infembed_ray.llm`).

Every embedding is in a journal before it is used, and the journal is read before a request is sent: an embedding in the
journal is never paid for again, whatever task or run its text is in. Each request's worst-case cost is reserved from the budget first.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from infembed_ray.config.evaluation import RetrieverSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation.tasks.task import Query
from infembed_ray.llm import budget, prices
from infembed_ray.llm.chat import PROBE, Completion, Request, RowFailure, RunFailure, replace_surrogates
from infembed_ray.llm.client import ChatClient, run_in_thread
from infembed_ray.llm.endpoint import Unanswered, WireFormat, token_counts
from infembed_ray.llm.journal import Journal
from infembed_ray.llm.ledger import REQUESTS, TOKENS, USD, Amounts, Grant, LeaseReport, RateLimiter
from infembed_ray.llm.prices import PriceTable
from infembed_ray.modeling.formats import passage_text, query_text
from infembed_ray.modeling.tokenizer import Side
from infembed_ray.storage.steps import local_path, require_writable

TEXTS = 32
"""Texts per request; Cohere accepts 96."""
IN_FLIGHT = 16
"""Requests in flight, if the limits do not say."""
BLANK = "."
"""Stands in for an empty text, which the APIs reject."""

_PATHS = {"openai": "embeddings", "cohere": "embed"}
_INPUT_TYPES: dict[Side, str] = {"query": "search_query", "passage": "search_document"}


class ApiEncoder:
    """A remote embedder. A run has one process of it, which keeps the budget. Embeddings are unit vectors.

    Args:
        settings: from `baselines.resolve`.
        identity: hash of all that decides its embeddings.

    Raises:
        InputError: the journal is missing or cannot be written, or the budget cannot be kept.
    """

    def __init__(self, settings: RetrieverSettings, identity: str) -> None:
        require_usable(settings)
        api = settings.api
        assert api.journal is not None
        self.identity = identity
        self._settings = settings
        directory = local_path(api.journal, "api.journal")
        require_writable(directory, "api.journal")
        self._prices = prices.load(api.prices)
        self._journal = Journal(directory)
        spent_usd = 0.0 if api.limits.budget_usd is None else budget.spent_usd(directory, self._prices)
        self._directory = directory
        self._ledger = budget.ledger(api.limits, spent_usd, directory)

    def encode_queries(self, queries: Sequence[Query]) -> np.ndarray:
        """Embed queries with their instructions: (n, d) float32.

        Raises:
            InputError: as `encode_passages`.
        """
        return self._encode([query_text(self._settings, query) for query in queries], "query")

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Embed passages: (n, d) float32.

        Raises:
            InputError: a key is missing or refused, the model is unknown, the budget is used up, the endpoint cannot be
                reached or refuses a text, or an embedding is not finite. Embeddings that were paid are in the journal.
        """
        return self._encode([passage_text(self._settings.passage, text) for text in texts], "passage")

    def _encode(self, texts: Sequence[str], side: Side) -> np.ndarray:
        requests = [self._request(text, side) for text in texts]
        missing = {request.key: request for request in requests if self._journal.get(request.key) is None}
        if missing:
            run_in_thread(self._fetch(list(missing.values())))
        embeddings = [self._embedding(request) for request in requests]
        if len({len(embedding) for embedding in embeddings}) > 1:
            raise InputError(
                f"model={self._settings.model}: its embeddings differ in length; set dimensions, or another journal"
            )
        stacked = np.array(embeddings, dtype=np.float32)
        return stacked / np.linalg.norm(stacked, axis=-1, keepdims=True).clip(min=1e-12)

    def _embedding(self, request: _EmbedRequest) -> np.ndarray:
        journaled = self._journal.get(request.key)
        assert journaled is not None
        return _decoded(journaled.text)

    def _request(self, text: str, side: Side) -> _EmbedRequest:
        """Make the request for one text; its key names the embedding in the journal."""
        protocol = self._settings.api.protocol
        parameters: dict[str, Any] = {"encoding_format": "float"}
        if protocol == "cohere":
            parameters = {"input_type": _INPUT_TYPES[side], "embedding_types": ["float"], "truncate": "END"}
        if self._settings.dimensions is not None:
            parameters["output_dimension" if protocol == "cohere" else "dimensions"] = self._settings.dimensions
        truncated = text[: self._settings.api.max_characters]
        parameters["texts" if protocol == "cohere" else "input"] = [truncated if truncated.strip() else BLANK]
        return _EmbedRequest(self._settings.model, (), "embedding=1", "embed", side, parameters)

    async def _fetch(self, requests: Sequence[_EmbedRequest]) -> None:
        """Send the texts of requests, many in each HTTP request, until all embeddings are in the journal."""
        api = self._settings.api

        async def exchange(report: LeaseReport) -> Grant:
            return self._ledger.exchange(report)

        gate = RateLimiter(api.limits, api.limits.in_flight or IN_FLIGHT, exchange)
        wire = WireFormat(_PATHS[api.protocol], partial(embeddings_of, api.protocol), worst_case, _short_request)
        client = ChatClient([api.endpoint], self._journal, gate, self._prices, wire)
        tasks = [
            asyncio.create_task(self._fetch_batch(client, requests[start : start + TEXTS]))
            for start in range(0, len(requests), TEXTS)
        ]
        try:
            await asyncio.gather(*tasks)
        except (RowFailure, RunFailure) as failure:
            gate.fail(str(failure))  # responses in flight are still journaled, nothing more is sent
            await asyncio.gather(*tasks, return_exceptions=True)
            raise InputError(
                f"model={self._settings.model}: {failure}; the same command resumes, and paid embeddings are kept"
            ) from failure
        finally:
            await client.close()
            if api.limits.budget_usd is not None:  # nothing is in flight: only what was spent counts
                budget.note_at_most(self._directory, self._ledger.committed_usd)

    async def _fetch_batch(self, client: ChatClient, requests: Sequence[_EmbedRequest]) -> None:
        """Send several texts in one HTTP request; if the endpoint refuses it, halve it to find the text at fault."""
        try:
            answer = await client.send(requests[0].with_texts([request.texts[0] for request in requests]))
        except RowFailure as failure:
            if failure.__cause__ is not None:  # retries failed, so no text is at fault
                raise
            if len(requests) == 1:
                raise RowFailure(
                    f"the endpoint refuses the text {requests[0].texts[0][:60]!r} ({failure}); lower api.max_characters if it "
                    "is too long for the model"
                ) from failure
            half = len(requests) // 2
            await self._fetch_batch(client, requests[:half])
            await self._fetch_batch(client, requests[half:])
            return
        embeddings: list[str] = json.loads(answer.text)
        if len(embeddings) != len(requests):
            raise RowFailure(f"{len(embeddings)} embeddings for {len(requests)} texts; is this an embeddings endpoint?")
        tokens = _divided(answer.prompt_tokens, [len(request.texts[0].encode()) for request in requests])
        finite = [np.isfinite(_decoded(embedding)).all() for embedding in embeddings]
        answered = itertools.compress(zip(requests, embeddings, tokens, strict=True), finite)
        await asyncio.gather(
            *(
                self._journal.append(request, replace(answer, text=embedding, prompt_tokens=count))
                for request, embedding, count in answered
            )
        )
        if not all(finite):
            text = requests[finite.index(False)].texts[0]
            raise RowFailure(f"the embedding of {text[:60]!r} is not finite; check the endpoint")


def require_usable(settings: RetrieverSettings, where: str = "model") -> None:
    """Check that the settings of an API are complete.

    Raises:
        InputError: the URL or the journal is missing, or a budget cannot be kept; `where` names the retriever.
    """
    api = settings.api
    if not api.endpoint.base_url.startswith(("http://", "https://")):
        raise InputError(
            f"{where}.api.endpoint.base_url={api.endpoint.base_url}: not a URL; write it like https://host/v1"
        )
    if api.journal is None:
        raise InputError(f"{where}.api.journal is missing: give a directory for the embeddings that you pay for")
    if api.limits.budget_usd is not None and prices.load(api.prices).price(settings.model) is None:
        raise InputError(
            f"{where}.api.limits.budget_usd={api.limits.budget_usd:g}: the price of model={settings.model} is unknown; give "
            f"it in a file and set {where}.api.prices=FILE"
        )


class _EmbedRequest(Request):
    """A request to embed texts, which are in the protocol's parameter for them."""

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the HTTP request."""
        return {"model": self.model, **self.parameters}

    @property
    def texts(self) -> list[str]:
        """The texts to embed."""
        texts: list[str] = self.parameters.get("texts", self.parameters.get("input"))
        return texts

    def with_texts(self, texts: list[str]) -> _EmbedRequest:
        """Return the same request for other texts."""
        return replace(self, parameters={**self.parameters, "texts" if "texts" in self.parameters else "input": texts})


def worst_case(request: Request, table: PriceTable) -> Amounts:
    """Bound what a request can use: no tokenizer makes more tokens of a text than its UTF-8 bytes and two marks."""
    assert isinstance(request, _EmbedRequest)
    tokens = sum(len(text.encode()) + 2 for text in request.texts)
    usd = table.usd(request.model, Completion("", "", "", tokens, 0))
    return {REQUESTS: 1, TOKENS: tokens, USD: float("inf") if usd is None else usd}


def _short_request(request: Request) -> Request:
    assert isinstance(request, _EmbedRequest)
    return replace(request.with_texts([BLANK]), step=PROBE)


def embeddings_of(protocol: str, body: bytes) -> Completion:
    """Read a response: its text is a JSON list of base64 strings, each an embedding's float32 numbers.

    Raises:
        Unanswered: the body holds no embeddings.
    """
    try:
        answer = json.loads(body)
        if protocol == "cohere":
            embeddings = answer["embeddings"]["float"]
            usage, name = (answer.get("meta") or {}).get("billed_units"), "input_tokens"
        else:
            embeddings = [entry["embedding"] for entry in sorted(answer["data"], key=lambda entry: int(entry["index"]))]
            usage, name = answer.get("usage"), "prompt_tokens"
        return Completion(
            text=json.dumps([base64.b64encode(np.array(e, dtype="<f4").tobytes()).decode() for e in embeddings]),
            finish_reason="stop",
            model=replace_surrogates(str(answer.get("model") or "")),
            prompt_tokens=token_counts(usage, name)[0],
            completion_tokens=0,
        )
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Unanswered("the response holds no embeddings (truncated?)") from error


def _decoded(embedding: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(embedding), dtype="<f4")


def _divided(total: int, sizes: Sequence[int]) -> list[int]:
    """Divide a total in proportion to sizes, into whole numbers that sum to it."""
    borders = (np.cumsum([0, *sizes], dtype=np.int64) * total // max(1, sum(sizes))).tolist()
    return [stop - start for start, stop in itertools.pairwise(borders)]
