"""Remote embedders: any OpenAI-compatible /embeddings. The store of an evaluation keeps what was paid for, chunk by chunk."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import openai

from infembed_ray.config.evaluation import RetrieverSettings
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.evaluation.tasks.task import Query
from infembed_ray.llm.batch_client import openai_client
from infembed_ray.llm.chat import RunFailure
from infembed_ray.llm.endpoint import with_proxy
from infembed_ray.modeling.formats import passage_text, query_text

TEXTS = 32
"""Texts per request."""
IN_FLIGHT = 16
"""Requests in flight."""
LONGEST = 20_000
"""Characters of a text that are sent, because APIs reject long texts."""
BLANK = "."
"""Stands in for an empty text, which the APIs reject."""


def in_order(entries: Sequence[Any], texts: int) -> list[list[float]]:
    """Return the embeddings in the order of their texts, by their `index`; entries without one fill the gaps in order.

    Raises:
        ValueError: there is not one embedding of numbers for each text.
    """
    if len(entries) != texts:
        raise ValueError(f"{len(entries)} embeddings for {texts} texts; is this an embeddings endpoint?")
    given = [getattr(entry, "index", None) for entry in entries]
    gaps = iter([place for place in range(texts) if place not in given])
    places = [next(gaps, None) if index is None else index for index in given]
    rows = {place: entry.embedding for place, entry in zip(places, entries, strict=True)}
    if set(rows) != set(range(texts)):
        raise ValueError(f"the indexes of {texts} embeddings are {given[:9]}, not each of 0 to {texts - 1} once")
    if not all(isinstance(value, (int, float)) for row in rows.values() for value in row) or not all(rows.values()):
        raise ValueError("an embedding is no list of numbers")
    return [rows[place] for place in range(texts)]


class ApiEncoder:
    """A remote embedder. An evaluation has one process of it. Embeddings are unit vectors."""

    def __init__(self, settings: RetrieverSettings) -> None:
        self._settings = settings

    def encode_queries(self, queries: Sequence[Query]) -> np.ndarray:
        """Embed queries with their instructions: (n, d) float32; InputError as `encode_passages`."""
        return self._encode([query_text(self._settings, query) for query in queries])

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Embed passages: (n, d) float32.

        Raises:
            InputError: the key is missing, the endpoint does not answer or refuses a request, or an embedding is not finite.
        """
        return self._encode([passage_text(self._settings.passage, text) for text in texts])

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        if not texts:
            return np.zeros((0, 0), dtype=np.float32)
        sent = [text[:LONGEST] if text[:LONGEST].strip() else BLANK for text in texts]
        with ThreadPoolExecutor(1) as thread:  # the thread of a notebook has a loop already
            embeddings = thread.submit(asyncio.run, self._embed(sent)).result()
        stacked = np.array(embeddings, dtype=np.float32)
        norms = np.linalg.norm(stacked.astype(np.float64), axis=-1, keepdims=True)
        if faulty := np.flatnonzero(~(np.isfinite(norms) & (norms > 0)).reshape(len(sent), -1).all(axis=1)).tolist():
            fault = f"the embedding of {sent[faulty[0]][:60]!r} is not finite, or zero"
            raise self._failure(fault, "check the endpoint, and whether its server or a gateway cuts texts off")
        return (stacked / norms).astype(np.float32)

    async def _embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Embed texts, several in each request; the client retries 429, 5xx and lost connections."""
        endpoint, slots = self._settings.endpoint, asyncio.Semaphore(IN_FLIGHT)
        dimensions = self._settings.dimensions or openai.omit

        async def request(batch: Sequence[str]) -> list[list[float]]:
            async with slots:
                answer = await client.embeddings.create(
                    model=self._settings.model, input=list(batch), dimensions=dimensions, encoding_format="float"
                )
            return in_order(answer.data, len(batch))

        try:
            async with openai_client(endpoint).with_options(max_retries=endpoint.max_retries) as client:
                batches = [texts[start : start + TEXTS] for start in range(0, len(texts), TEXTS)]
                rows = [row for batch in await asyncio.gather(*map(request, batches)) for row in batch]
        except (openai.APIError, httpx2.HTTPError, RunFailure, ValueError, TypeError, AttributeError) as error:
            said = in_one_line((isinstance(error, openai.APIConnectionError) and error.__cause__) or error)[:300]
            raise self._failure(said, "the same command resumes, and finished chunks are kept") from error
        if len(set(map(len, rows))) > 1:
            raise self._failure("its embeddings differ in length", "set dimensions")
        return rows

    def _failure(self, fault: str, remedy: str) -> InputError:
        where = with_proxy(self._settings.endpoint.base_url)
        return InputError.of("model", self._settings.model, f"{where}: {fault}", remedy)
