"""Schemas of `POST /v1/embeddings`: OpenAI's, extended by `instruction` and `input_type`."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Discriminator, Field, StrictInt, StrictStr, Tag, model_validator
from pydantic_core import to_json

from infembed_ray.serving.schema import InputType, Instruction, ModelName, Request, Text

MAX_INPUTS = 2048
"""Inputs of one embeddings request; OpenAI's limit."""
MAX_TOKENS = 32_768
"""Ids of one token array."""

Tokens = Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(min_length=1, max_length=MAX_TOKENS)]


def _input_shape(value: Any) -> str | None:
    """Return which of the four forms of `input` a value has, so that its errors are reported for that form only."""
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


class EmbeddingsRequest(Request):
    """OpenAI's embeddings request. `user` is accepted and ignored."""

    input: Input = Field(
        description="one text, up to 2,048 texts, or token ids of the served model's own tokenizer (one array or "
        "several), which are decoded to text first"
    )
    model: ModelName | None = Field(None, description="if given, must be the served model's name (GET /v1/models)")
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="a list of numbers, or little-endian float32 in base64"
    )
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = Field(
        None, description="number of leading components to keep; the vectors are normalised again"
    )
    instruction: Instruction | None = Field(
        None, description="what a relevant passage must satisfy besides its topic; makes every input a query"
    )
    input_type: InputType | None = Field(
        None, description="query or passage; null: query if an instruction is given, else passage"
    )
    user: StrictStr | None = Field(None, description="ignored")

    @model_validator(mode="after")
    def _passages_have_no_instruction(self) -> EmbeddingsRequest:
        if self.instruction and self.input_type == "passage":
            raise ValueError("an instruction applies to queries: remove it, or set input_type to query")
        return self

    def inputs(self) -> list[str] | list[list[int]]:
        """Return all inputs as a list of texts or of token arrays."""
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [self.input]
        return self.input

    def kind(self) -> InputType:
        """Return the type of the inputs; passage by default, because OpenAI clients mostly embed corpora."""
        return self.input_type or ("query" if self.instruction else "passage")


class Usage(BaseModel):
    """Tokens that the model read, including special tokens and instruction."""

    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    """One vector: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsResponse(BaseModel):
    """OpenAI's embeddings response: one unit vector per input, in order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage

    @staticmethod
    def json_of(vectors: np.ndarray, tokens: int, model: str, request: EmbeddingsRequest) -> Iterator[bytes]:
        """Yield the JSON of a response, one vector per piece.

        A response can hold millions of numbers. It is serialised without a pydantic model, and the event loop can answer
        other requests between two pieces.

        Args:
            vectors: (inputs, d) unit vectors; truncated and normalised again if the request asks for fewer dimensions.
            tokens: number of tokens of all inputs.
            model: name of the model.
            request: the request.
        """
        if request.dimensions is not None:
            vectors = vectors[:, : request.dimensions]
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        yield b'{"object":"list","data":['
        for i, vector in enumerate(vectors.astype("<f4")):
            if request.encoding_format == "base64":
                embedding = b'"%s"' % base64.b64encode(vector)
            else:
                embedding = to_json(vector.tolist())
            yield b'%s{"object":"embedding","index":%d,"embedding":%s}' % (b"," if i else b"", i, embedding)
        yield b'],"model":%s,"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (to_json(model), tokens, tokens)
