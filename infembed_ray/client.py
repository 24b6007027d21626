"""A client of the HTTP API: embed, search and change documents, from programs that have neither torch nor Ray loaded.

    with Client("http://127.0.0.1:8000") as client:
        for hit in client.search("diabetes", "Only guidelines written for clinicians.", top_k=3).hits:
            print(hit.score, hit.text)

`AsyncClient` is the same with `await`. What is full, restarting or unreachable is asked again until `timeout_s` is over:
after what `Retry-After` says, and a random time besides that doubles in range with each attempt, so that clients that
were turned away together do not come back together (full jitter). Every call may be repeated: none has another effect
the second time.
"""

from __future__ import annotations

import asyncio
import base64
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

import httpx2
import numpy as np

Metadata = str | int | float | bool | None
T = TypeVar("T")

KEY_VARIABLE = "INFEMBED_API_KEY"
"""Environment variable of the API key."""
WORTH_ANOTHER_TRY = frozenset({429, 502, 503, 504})
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


# ----------------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True)
class Embeddings:
    """Vectors of texts, in their order."""

    vectors: np.ndarray
    """(texts, dimensions) float32, of unit length."""
    model: str
    tokens: int
    """That the model read."""


@dataclass(frozen=True)
class Hit:
    """A passage found."""

    id: str
    score: float
    """Cosine of query and passage."""
    text: str
    metadata: Mapping[str, Metadata]


@dataclass(frozen=True)
class Found:
    """The answer to one query, all of it from one model and one version of the index."""

    hits: Sequence[Hit]
    """Best first."""
    model: str
    index_version: str
    sequence: int
    """Changes of documents up to this one are in the answer."""
    encode_ms: float
    search_ms: float
    missing_shards: Sequence[str]
    """Whose hits are missing; none unless a partial answer was allowed."""


@dataclass(frozen=True)
class Document:
    """A passage to put, or as the index has it."""

    id: str
    text: str
    metadata: Mapping[str, Metadata] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """A served model and the index it searches."""

    id: str
    dimension: int
    encoder: str
    """Fingerprint of the encoder."""
    index_version: str
    passages: int
    metadata: Mapping[str, str]
    """Field of the passages -> its type."""
    writable: bool


# ------------------------------------------------------------------------------------------------------ errors


class Error(Exception):
    """A call was not answered as it should."""


class ApiError(Error):
    """The server refused a request, or failed; the message is its own.

    Attributes:
        status: of HTTP.
        message, type, param, code: as in OpenAI's errors; param names the field.
        request_id: by which the server's log has it.
        retry_after_s: how long it asks to be left alone; 0 if it does not.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        request_id: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        where = f" (request {request_id})" if request_id else ""
        super().__init__(f"{status} {code or type or 'error'}: {message}{where}")
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.request_id, self.retry_after_s = request_id, retry_after_s


class Unreachable(Error):
    """There was no answer in time; `__cause__` says what happened last."""


# ----------------------------------------------------------------------------------------------------- clients


class Client:
    """Blocking client; safe to share between threads.

    Args:
        base_url: of the server, without `/v1`.
        api_key: None takes it from the environment variable INFEMBED_API_KEY, if it is set.
        timeout_s: of a call with all its attempts.
        transport: another way to the server, for tests.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        *,
        timeout_s: float = 30.0,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._http = httpx2.Client(base_url=base_url, headers=_headers(api_key), transport=transport)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End its connections."""
        self._http.close()

    def embed(
        self,
        texts: Sequence[str],
        *,
        instruction: str | None = None,
        input_type: Literal["query", "passage"] | None = None,
        dimensions: int | None = None,
        model: str | None = None,
    ) -> Embeddings:
        """Unit vectors of texts.

        Args:
            texts: up to 2,048.
            instruction: what queries ask for besides their topic; makes every text a query.
            input_type: None is query where there is an instruction, else passage.
            dimensions: keep so many components, normalised again; None keeps all.
            model: if given, must be the served one's name.

        Raises:
            ApiError: the request is refused.
            Unreachable: there was no answer in time.
        """
        return self._send(_embed(texts, instruction, input_type, dimensions, model))

    def search(
        self,
        query: str,
        instruction: str | None = None,
        *,
        top_k: int = 10,
        filter: Mapping[str, Any] | None = None,
        allow_partial: bool = False,
        model: str | None = None,
    ) -> Found:
        """The passages nearest to a query under an instruction.

        Args:
            query: the topic.
            instruction: what it asks for besides.
            top_k: most hits, up to 1,000.
            filter: conditions on metadata fields, such as `{"year": {"gte": 2020}, "language": "en"}`.
            allow_partial: answer even if some shards do not, see `Found.missing_shards`.
            model: if given, must be the served one's name.

        Raises:
            ApiError, Unreachable: as `embed`.
        """
        return self._send(_search([query], instruction, top_k, filter, allow_partial, model))[0]

    def search_many(
        self,
        queries: Sequence[str],
        instruction: str | Sequence[str | None] | None = None,
        *,
        top_k: int = 10,
        filter: Mapping[str, Any] | None = None,
        allow_partial: bool = False,
        model: str | None = None,
    ) -> list[Found]:
        """As `search`, of up to 64 queries at once; one instruction for all, or one each."""
        return self._send(_search(queries, instruction, top_k, filter, allow_partial, model))

    def put(self, documents: Iterable[Document]) -> int:
        """Add up to 1,000 documents, or replace those of the same ids. Durable when this returns.

        Returns:
            The sequence from which on searches find them, within a second: compare it with `Found.sequence`.

        Raises:
            ApiError, Unreachable: as `embed`.
        """
        return self._send(_put(documents))

    def delete(self, ids: Iterable[str]) -> int:
        """Delete up to 1,000 documents, those that are not there included; returns the sequence as `put` does."""
        return self._send(_delete(ids))

    def document(self, id: str) -> Document | None:
        """A document as it is now; None if there is none."""
        try:
            return self._send(_document(id))
        except ApiError as error:
            if error.code == "document_not_found":
                return None
            raise

    def models(self) -> list[Model]:
        """The served models: one."""
        return self._send(_MODELS)

    def _send(self, call: _Call[T]) -> T:
        attempts = _Attempts(self._timeout_s)
        while True:
            try:
                answer = self._http.request(call.method, call.path, json=call.body, timeout=attempts.left())
                result = call.result(answer)
            except (httpx2.TransportError, ApiError) as error:
                time.sleep(attempts.pause_after(error))
            else:
                return result


class AsyncClient:
    """Client for asyncio. As `Client`, whose arguments and methods it has."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        *,
        timeout_s: float = 30.0,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._http = httpx2.AsyncClient(base_url=base_url, headers=_headers(api_key), transport=transport)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End its connections."""
        await self._http.aclose()

    async def embed(
        self,
        texts: Sequence[str],
        *,
        instruction: str | None = None,
        input_type: Literal["query", "passage"] | None = None,
        dimensions: int | None = None,
        model: str | None = None,
    ) -> Embeddings:
        """As `Client.embed`."""
        return await self._send(_embed(texts, instruction, input_type, dimensions, model))

    async def search(
        self,
        query: str,
        instruction: str | None = None,
        *,
        top_k: int = 10,
        filter: Mapping[str, Any] | None = None,
        allow_partial: bool = False,
        model: str | None = None,
    ) -> Found:
        """As `Client.search`."""
        return (await self._send(_search([query], instruction, top_k, filter, allow_partial, model)))[0]

    async def search_many(
        self,
        queries: Sequence[str],
        instruction: str | Sequence[str | None] | None = None,
        *,
        top_k: int = 10,
        filter: Mapping[str, Any] | None = None,
        allow_partial: bool = False,
        model: str | None = None,
    ) -> list[Found]:
        """As `Client.search_many`."""
        return await self._send(_search(queries, instruction, top_k, filter, allow_partial, model))

    async def put(self, documents: Iterable[Document]) -> int:
        """As `Client.put`."""
        return await self._send(_put(documents))

    async def delete(self, ids: Iterable[str]) -> int:
        """As `Client.delete`."""
        return await self._send(_delete(ids))

    async def document(self, id: str) -> Document | None:
        """As `Client.document`."""
        try:
            return await self._send(_document(id))
        except ApiError as error:
            if error.code == "document_not_found":
                return None
            raise

    async def models(self) -> list[Model]:
        """As `Client.models`."""
        return await self._send(_MODELS)

    async def _send(self, call: _Call[T]) -> T:
        attempts = _Attempts(self._timeout_s)
        while True:
            try:
                answer = await self._http.request(call.method, call.path, json=call.body, timeout=attempts.left())
                result = call.result(answer)
            except (httpx2.TransportError, ApiError) as error:
                await asyncio.sleep(attempts.pause_after(error))
            else:
                return result


# ------------------------------------------------------------------------------------------- what both have in common


@dataclass(frozen=True)
class _Call(Generic[T]):
    """A request, and how its answer is read."""

    method: str
    path: str
    read: Callable[[Any], T]
    body: Mapping[str, Any] | None = None

    def result(self, answer: httpx2.Response) -> T:
        """ApiError unless it is a success."""
        if not answer.is_success:
            raise _refusal(answer)
        try:
            return self.read(answer.json())
        except (ValueError, TypeError, KeyError) as error:
            raise ApiError(answer.status_code, f"{answer.url} does not answer as this API") from error


class _Attempts:
    """The attempts of one call, within its time."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._made = 0

    def left(self) -> float:
        """Seconds for the attempt that begins now."""
        self._made += 1
        return max(self._deadline - time.monotonic(), 0.001)

    def pause_after(self, error: httpx2.TransportError | ApiError) -> float:
        """Seconds until the next attempt; raises if there is none."""
        least = 0.0
        if isinstance(error, ApiError):
            if error.status not in WORTH_ANOTHER_TRY:
                raise error
            least = error.retry_after_s
        pause = least + random.uniform(0, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._made - 1)))
        if time.monotonic() + pause < self._deadline:
            return pause
        if isinstance(error, ApiError):
            raise error
        attempts = f"{self._made} attempt{'s' if self._made > 1 else ''}"
        raise Unreachable(
            f"no answer within {self._timeout_s:g} s ({attempts}): {error or type(error).__name__}"
        ) from error


def _refusal(answer: httpx2.Response) -> ApiError:
    after = answer.headers.get("retry-after", "")
    refused = partial(
        ApiError,
        answer.status_code,
        request_id=answer.headers.get("x-request-id"),
        retry_after_s=float(after) if after.isdecimal() else 0.0,
    )
    try:
        said = answer.json()["error"]
        return refused(said["message"], type=said["type"], param=said["param"], code=said["code"])
    except (ValueError, TypeError, KeyError):  # not this server's: of a proxy between
        return refused(" ".join(answer.text.split())[:200] or answer.reason_phrase)


def _headers(api_key: str | None) -> dict[str, str]:
    key = api_key or os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _list(name: str, texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str):
        raise TypeError(f"{name}: a list of texts, not one text")
    return list(texts)


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _embed(
    texts: Sequence[str], instruction: str | None, input_type: str | None, dimensions: int | None, model: str | None
) -> _Call[Embeddings]:
    def read(body: Any) -> Embeddings:
        vectors = [np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4") for item in body["data"]]
        return Embeddings(np.stack(vectors).astype(np.float32), body["model"], body["usage"]["total_tokens"])

    optional = _given(instruction=instruction, input_type=input_type, dimensions=dimensions, model=model)
    return _Call(
        "POST", "/v1/embeddings", read, {"input": _list("texts", texts), "encoding_format": "base64", **optional}
    )


def _search(
    queries: Sequence[str],
    instruction: str | Sequence[str | None] | None,
    top_k: int,
    filter: Mapping[str, Any] | None,
    allow_partial: bool,
    model: str | None,
) -> _Call[list[Found]]:
    def read(body: Any) -> list[Found]:
        return [
            Found(
                [Hit(hit["id"], hit["score"], hit["text"], hit["metadata"]) for hit in result["hits"]],
                body["model"],
                body["index_version"],
                body["sequence"],
                body["timings"]["encode_ms"],
                body["timings"]["search_ms"],
                body["missing_shards"],
            )
            for result in body["results"]
        ]

    each = instruction if instruction is None or isinstance(instruction, str) else list(instruction)
    optional = _given(instruction=each, filter=filter, model=model)
    body = {"query": _list("queries", queries), "top_k": top_k, "allow_partial": allow_partial, **optional}
    return _Call("POST", "/v1/search", read, body)


def _put(documents: Iterable[Document]) -> _Call[int]:
    body = {"documents": [{"id": d.id, "text": d.text, "metadata": dict(d.metadata)} for d in documents]}
    return _Call("PUT", "/v1/documents", _sequence, body)


def _delete(ids: Iterable[str]) -> _Call[int]:
    return _Call("DELETE", "/v1/documents", _sequence, {"ids": list(ids)})


def _sequence(body: Any) -> int:
    sequence: int = body["sequence"]
    return sequence


def _document(id: str) -> _Call[Document]:
    def read(body: Any) -> Document:
        return Document(body["id"], body["text"], body["metadata"])

    return _Call("GET", f"/v1/documents/{quote(id, safe='')}", read)


def _models(body: Any) -> list[Model]:
    return [
        Model(m["id"], m["dimension"], m["encoder"], m["index_version"], m["passages"], m["metadata"], m["writable"])
        for m in body["data"]
    ]


_MODELS = _Call("GET", "/v1/models", _models)
