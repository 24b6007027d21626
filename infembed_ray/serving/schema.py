"""Requests and answers of the HTTP API. `/v1/embeddings` is OpenAI's, with `instruction` and `input_type` besides."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StrictInt,
    StrictStr,
    Tag,
    model_validator,
)

InputType = Literal["query", "passage"]

MAX_INPUTS = 2048
"""Inputs of one embeddings request, as at OpenAI."""
MAX_CHARACTERS = 100_000
"""Characters of one text. What is longer than the encoder reads is cut, as it was when the index was built."""
MAX_TOKENS = 32_768
"""Ids of one token array."""
MAX_TOP_K = 1000


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


Text = Annotated[StrictStr, Field(min_length=1, max_length=MAX_CHARACTERS), AfterValidator(_not_blank)]
Tokens = Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(min_length=1, max_length=MAX_TOKENS)]
Instruction = Annotated[StrictStr, Field(max_length=MAX_CHARACTERS)]


def _input_shape(value: Any) -> str | None:
    """Which of the four forms of `input` a value means to be: its faults are then told for that form alone."""
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    return {str: "texts", int: "tokens", list: "token arrays"}.get(type(first))


Input = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS), Tag("texts")]
    | Annotated[Tokens, Tag("tokens")]
    | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_INPUTS), Tag("token arrays")],
    Discriminator(
        _input_shape,
        custom_error_type="input_shape",
        custom_error_message="give a text, a list of texts, an array of token ids, or a list of such arrays",
    ),
]


class Request(BaseModel):
    """A request body. Unknown fields are refused: a misspelt `instruction` must not pass as a plain query."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class EmbeddingsRequest(Request):
    """OpenAI's embeddings request. `user` is accepted and ignored."""

    input: Input = Field(
        description="one text, up to 2,048 texts, or token ids of the served model's own tokenizer (one array or "
        "several), which stand for the text they decode to"
    )
    model: str = Field(description="the served model's name, as GET /v1/models says it")
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="numbers, or little-endian float32 in base64"
    )
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = Field(
        None, description="keep the first N components and normalise again"
    )
    instruction: Instruction | None = Field(
        None, description="what the queries ask for besides their topic; makes every input a query"
    )
    input_type: InputType | None = Field(
        None, description="query or passage; null: query where an instruction is given, else passage"
    )
    user: str | None = Field(None, description="ignored")

    @model_validator(mode="after")
    def _passages_have_no_instruction(self) -> EmbeddingsRequest:
        if self.instruction and self.input_type == "passage":
            raise ValueError("instruction belongs to a query: leave it out, or set input_type to query")
        return self

    def inputs(self) -> list[str] | list[list[int]]:
        """All inputs as a list, one text or token array each."""
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [self.input]
        return self.input

    def kind(self) -> InputType:
        """What the inputs are. Clients that know nothing of `input_type` embed corpora most: passage by default."""
        return self.input_type or ("query" if self.instruction else "passage")


class Usage(BaseModel):
    """Tokens the model read, special tokens and instruction included."""

    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    """One vector: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsResponse(BaseModel):
    """OpenAI's embeddings response: one unit vector an input, in their order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage

    @classmethod
    def of(cls, vectors: np.ndarray, tokens: int, model: str, request: EmbeddingsRequest) -> EmbeddingsResponse:
        """In the encoding and dimensions the request asks for; `vectors` is (n, d), `tokens` all inputs' together."""
        if request.dimensions is not None:
            vectors = vectors[:, : request.dimensions]
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        vectors = vectors.astype("<f4")
        encoded: list[str] | list[list[float]]
        if request.encoding_format == "base64":
            encoded = [base64.b64encode(vector.tobytes()).decode() for vector in vectors]
        else:
            encoded = vectors.tolist()
        return cls(
            data=[Embedding(index=i, embedding=embedding) for i, embedding in enumerate(encoded)],
            model=model,
            usage=Usage(prompt_tokens=tokens, total_tokens=tokens),
        )


class SearchRequest(Request):
    """A query under an instruction."""

    query: Text
    instruction: Instruction | None = Field(None, description="what the query asks for besides its topic")
    top_k: Annotated[StrictInt, Field(ge=1, le=MAX_TOP_K)] = Field(10, description="most hits")
    model: str | None = Field(None, description="if given, must be the served model's name")


class SearchHit(BaseModel):
    """A passage found."""

    id: str
    score: float = Field(description="cosine of query and passage")
    text: str


class Timings(BaseModel):
    """Where the time of a search went, in milliseconds."""

    encode_ms: float
    search_ms: float


class SearchResponse(BaseModel):
    """Hits, best first; all from one version of the index."""

    object: Literal["search_results"] = "search_results"
    hits: list[SearchHit]
    index_version: str
    model: str
    timings: Timings


class Model(BaseModel):
    """The served model and the index it searches."""

    model_config = ConfigDict(protected_namespaces=())

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix time at which serving started")
    owned_by: str = "infembed_ray"
    dimension: int
    encoder: str = Field(description="fingerprint of the encoder")
    index_version: str
    passages: int
    vocabulary: int = Field(description="token ids lie below this")


class ModelsResponse(BaseModel):
    """OpenAI's list of models: always one."""

    object: Literal["list"] = "list"
    data: list[Model]


class HealthResponse(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"
    deployment: str = Field(description="fingerprint of what is served: settings, index and encoder")


class Error(BaseModel):
    """OpenAI's error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The body of every answer that is not a success."""

    error: Error
