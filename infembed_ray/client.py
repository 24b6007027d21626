"""HTTP client: embed, search and change documents from programs that load neither torch nor Ray.

`AsyncClient` has the same methods with `await`. A request that is rejected for load, or that does not reach the server, is
retried until `timeout_s` is over. The pause is the server's `Retry-After` plus exponential backoff with full jitter, so clients
that were rejected together do not retry together. Every request is idempotent, so a retry is always safe.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar
from urllib.parse import quote

import httpx2
import numpy as np

from infembed_ray.errors import InputError, in_one_line
from infembed_ray.serving.schema import Collection, Model, SearchResponse
from infembed_ray.serving.service import Document

P = ParamSpec("P")
T = TypeVar("T")

KEY_VARIABLE = "INFEMBED_API_KEY"
"""Environment variable that holds the API key."""
DEFAULT_URL = "http://127.0.0.1:8000"
RETRIED_STATUS = frozenset({429, 502, 503, 504})
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0


class ClientError(Exception):
    """A call failed."""


@dataclass(eq=False)
class ApiError(ClientError):
    """The server answered with an error.

    Attributes:
        status: HTTP status.
        message, type, param, code: fields of an OpenAI error object; `param` names the faulty field.
        request_id: id of the request in the server's log.
        retry_after_s: pause in seconds that the server asks for; 0 if none.
    """

    status: int
    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None
    request_id: str | None = None
    retry_after_s: float = 0.0

    def __str__(self) -> str:
        where = f" (request {self.request_id})" if self.request_id else ""
        return f"{self.status} {self.code or self.type or 'error'}: {self.message}{where}"


class Unreachable(ClientError):
    """No answer arrived within `timeout_s`; `__cause__` holds the last failure."""


def _api_error(answer: httpx2.Response) -> ApiError:
    """Return the error of an answer that is no success."""
    after = answer.headers.get("retry-after", "")
    try:
        error = answer.json()["error"]
        values = {name: error[name] for name in ("message", "type", "param", "code")}
    except (ValueError, TypeError, KeyError):  # the answer of another server, such as a proxy in between
        values = {"message": " ".join(answer.text.split())[:200] or answer.reason_phrase}
    values |= {"request_id": answer.headers.get("x-request-id")}
    return ApiError(answer.status_code, **values, retry_after_s=float(after) if after.isdecimal() else 0.0)


class _Attempts:
    """The attempts of one call within its time-out."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._made = 0

    def start(self) -> float:
        """Count an attempt; return the seconds that it may take."""
        self._made += 1
        return max(self._deadline - time.monotonic(), 0.001)

    def pause_after(self, error: httpx2.TransportError | ApiError) -> float:
        """Return the seconds until the next attempt; raise if no attempt is left."""
        least = error.retry_after_s if isinstance(error, ApiError) else 0.0
        pause = least + random.uniform(0, min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (self._made - 1)))
        retried = not isinstance(error, ApiError) or error.status in RETRIED_STATUS
        if retried and time.monotonic() + pause < self._deadline:
            return pause
        if isinstance(error, ApiError):
            raise error
        reason = str(error) or type(error).__name__
        raise Unreachable(f"no answer within {self._timeout_s:g} s (attempts: {self._made}): {reason}") from error


@dataclass(frozen=True)
class Embeddings:
    """Vectors of texts, in the order of the texts."""

    vectors: np.ndarray
    """(texts, dimensions) float32, of unit length."""
    model: str
    tokens: int
    """Tokens that the model read."""


@dataclass(frozen=True)
class _Request(Generic[T]):
    """An HTTP request and the function that reads its answer."""

    method: str
    path: str
    read: Callable[[Any], T]
    body: Mapping[str, Any] | None = None
    none_code: str | None = None
    """Error code for which the result is None instead of an error."""

    def result(self, answer: httpx2.Response) -> T:
        """Read the answer; raise ApiError unless it is a success."""
        if not answer.is_success:
            error = _api_error(answer)
            if error.code is not None and error.code == self.none_code:
                return self.read(None)
            raise error
        try:
            return self.read(answer.json())
        except (ValueError, TypeError, KeyError) as error:
            fault = f"{answer.url} does not answer as this API ({in_one_line(error)}); check base_url"
            raise ClientError(fault) from error


def _embed(
    texts: Sequence[str],
    *,
    instruction: str | None = None,
    input_type: Literal["query", "passage"] | None = None,
    dimensions: int | None = None,
    model: str | None = None,
) -> _Request[Embeddings]:
    """Embed texts as unit vectors.

    Args:
        texts: at most 2,048 texts.
        instruction: conditions besides the topic; makes every text a query.
        input_type: None means "query" with an instruction, else "passage".
        dimensions: keep this many leading components and normalise again; None keeps all.
        model: name of the served model, which the server checks; None skips the check.

    Returns:
        The unit vectors, (texts, dimensions) float32, in the order of the texts.

    Raises:
        ApiError: the server rejects the request.
        Unreachable: no answer arrived in time.
    """

    def read(body: Any) -> Embeddings:
        # In base64, or as lists from a gateway that asks for these.
        given = [item["embedding"] for item in body["data"]]
        vectors = [
            np.frombuffer(base64.b64decode(one), "<f4") if isinstance(one, str) else np.array(one) for one in given
        ]
        return Embeddings(np.stack(vectors).astype(np.float32), body["model"], body["usage"]["total_tokens"])

    options = {"instruction": instruction, "input_type": input_type, "dimensions": dimensions, "model": model}
    if isinstance(texts, str):
        raise TypeError("texts: must be a list of texts, not one text")
    body = {"input": list(texts), "encoding_format": "base64", **_without_none(options)}
    return _Request("POST", "/v1/embeddings", read, body)


def _search(
    query: str,
    instruction: str | None = None,
    *,
    top_k: int = 10,
    filter: Mapping[str, Any] | None = None,
    hybrid: float | None = None,
    min_sequence: int | None = None,
    rerank: bool | None = None,
    model: str | None = None,
    collection: str | None = None,
    explain: bool = False,
) -> _Request[SearchResponse]:
    """Find the passages nearest to a query under an instruction.

    Args:
        query: the topic.
        instruction: conditions besides the topic.
        top_k: maximum number of hits, up to 1,000.
        filter: conditions on metadata fields, such as `{"year": {"gte": 2020}, "language": "en"}`.
        hybrid: share of BM25 in the score, 0 to 1; None: the server's default.
        min_sequence: wait until the answer includes the change with this sequence number, which `put` or `delete` returned.
        rerank: re-rank the first hits with the server's reranker; None: the server's default.
        model: as `embed`.
        collection: name of the collection; None means the default one.
        explain: also return the effect of the instruction and of each of its phrases on every hit; for at most 20 hits.

    Returns:
        The hits, best first, with the index version and the last change that they include. `notes` lists what the answer lacks.

    Raises:
        ApiError, Unreachable: as `embed`.
    """
    body = {"query": query, "instruction": instruction, "filter": filter, "hybrid": hybrid}
    body |= {"min_sequence": min_sequence, "rerank": rerank, "model": model}
    body = _without_none(body) | {"top_k": top_k, "explain": explain}
    return _Request("POST", _path("search", collection), SearchResponse.model_validate, body)


def _put(documents: Iterable[Document], *, collection: str | None = None) -> _Request[int]:
    """Add at most 1,000 documents (or chunks), or replace those with the same ids. The change is durable when this returns.

    Args:
        documents: documents with distinct ids.
        collection: as `search`.

    Returns:
        The sequence number of the change. A search with `min_sequence` waits for it; others include it within a second.

    Raises:
        ApiError, Unreachable: as `embed`.
    """
    body = {"documents": [{"id": d.id, "text": d.text, "metadata": dict(d.metadata)} for d in documents]}
    return _Request("PUT", _path("documents", collection), lambda body: int(body["sequence"]), body)


def _delete(ids: Iterable[str], *, collection: str | None = None) -> _Request[int]:
    """Delete at most 1,000 documents; unknown ids are no error. `collection`, result and errors: as `put`."""
    if isinstance(ids, str):
        raise TypeError("ids: must be a list of ids, not one id")
    return _Request("DELETE", _path("documents", collection), lambda body: int(body["sequence"]), {"ids": list(ids)})


def _document(id: str, *, collection: str | None = None) -> _Request[Document | None]:
    """Get a document as it is now, with all changes; None if no document has this id. Raises as `embed`."""
    path = f"{_path('documents', collection)}/{_quoted(id)}"
    return _Request(
        "GET",
        path,
        lambda body: body and Document(body["id"], body["text"], body["metadata"]),
        none_code="document_not_found",
    )


def _models() -> _Request[list[Model]]:
    """List the served models: one, or several if several encoders built the collections. Raises as `embed`."""
    return _Request("GET", "/v1/models", lambda body: list(map(Model.model_validate, body["data"])))


def _collections() -> _Request[list[Collection]]:
    """List the collections that the key may use, the default one first. Raises as `embed`."""
    return _Request("GET", "/v1/collections", lambda body: list(map(Collection.model_validate, body["data"])))


def _path(what: str, collection: str | None) -> str:
    return f"/v1/{what}" if collection is None else f"/v1/collections/{_quoted(collection)}/{what}"


def _quoted(part: str) -> str:
    """Return a part of a path; `..` as it is would mean the path above."""
    return quote(part, safe="").replace(".", "%2E")


def _without_none(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


# ----------------------------------------------------------------------------------------------------- clients


def _server(base_url: str, api_key: str | None) -> dict[str, Any]:
    """Return the address of the server and the headers of all requests; InputError without a scheme and a host."""
    url = httpx2.URL(base_url)
    if url.scheme not in ("http", "https") or not url.host:
        raise InputError.of("base_url", base_url, "is no address of a server", "give one such as http://127.0.0.1:8000")
    key = (api_key or os.environ.get(KEY_VARIABLE, "")).strip()  # of a file, with a line break
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return {"base_url": base_url.rstrip("/").removesuffix("/v1"), "headers": headers}


def _blocking(build: Callable[P, _Request[T]]) -> Callable[Concatenate[Client, P], T]:
    """Make a method of `Client` from the function that builds its request."""

    @functools.wraps(build)
    def method(self: Client, *args: P.args, **options: P.kwargs) -> T:
        return self._send(build(*args, **options))

    return method


def _awaitable(build: Callable[P, _Request[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Make a method of `AsyncClient` from the function that builds its request."""

    @functools.wraps(build)
    async def method(self: AsyncClient, *args: P.args, **options: P.kwargs) -> T:
        return await self._send(build(*args, **options))

    return method


class Client:
    """Blocking client; threads may share it.

    ```python
    from infembed_ray.client import Client, Document

    with Client("http://127.0.0.1:8000") as client:
        change = client.put([Document("dose", "Adults: 500 mg twice a day.")])
        answer = client.search("diabetes", "Only guidelines written for clinicians.", top_k=3, min_sequence=change)
        for hit in answer.hits:
            print(hit.score, hit.text)
        client.delete(["dose"])
    ```

    Args:
        base_url: address of the server, with or without `/v1`.
        api_key: None reads the environment variable INFEMBED_API_KEY, if it is set.
        timeout_s: time limit of a call with all its attempts, in seconds.
        transport: another way to reach the server, for tests.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        api_key: str | None = None,
        *,
        timeout_s: float = 30.0,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._http = httpx2.Client(**_server(base_url, api_key), transport=transport)

    embed = _blocking(_embed)
    search = _blocking(_search)
    put = _blocking(_put)
    delete = _blocking(_delete)
    document = _blocking(_document)
    models = _blocking(_models)
    collections = _blocking(_collections)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _send(self, request: _Request[T]) -> T:
        attempts = _Attempts(self._timeout_s)
        while True:
            try:
                answer = self._http.request(request.method, request.path, json=request.body, timeout=attempts.start())
                return request.result(answer)
            except (httpx2.TransportError, ApiError) as error:
                time.sleep(attempts.pause_after(error))


class AsyncClient:
    """Client for asyncio, with the arguments and methods of `Client`.

    ```python
    async with AsyncClient("http://127.0.0.1:8000") as client:
        print((await client.embed(["diabetes"], instruction="For clinicians.")).vectors.shape)
    ```
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        api_key: str | None = None,
        *,
        timeout_s: float = 30.0,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._http = httpx2.AsyncClient(**_server(base_url, api_key), transport=transport)

    embed = _awaitable(_embed)
    search = _awaitable(_search)
    put = _awaitable(_put)
    delete = _awaitable(_delete)
    document = _awaitable(_document)
    models = _awaitable(_models)
    collections = _awaitable(_collections)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _send(self, request: _Request[T]) -> T:
        attempts = _Attempts(self._timeout_s)
        while True:
            try:
                answer = await self._http.request(
                    request.method, request.path, json=request.body, timeout=attempts.start()
                )
                return request.result(answer)
            except (httpx2.TransportError, ApiError) as error:
                await asyncio.sleep(attempts.pause_after(error))
