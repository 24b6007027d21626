"""Schemas of the HTTP API. `/v1/embeddings` is OpenAI's, extended by `instruction` and `input_type`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from infembed_ray.config.retrieval import FieldType
from infembed_ray.serving.explaining import (
    MAX_EXPLAINED_CHARACTERS,
    MAX_EXPLAINED_HITS,
    Explanation,
    require_explainable,
)

InputType = Literal["query", "passage"]
Metadata = str | int | float | bool | None
"""A value of a metadata field; dates are ISO 8601 strings."""

MAX_CHARACTERS = 100_000
"""Characters of one text. The encoder truncates longer inputs than it reads, as it did when the index was built."""
MAX_QUERIES = 64
"""Queries of one search."""
MAX_TOP_K = 1000
MAX_HITS = 10_000
"""Hits of one search, over all its queries."""
MAX_DOCUMENTS = 1000
"""Documents of one put or delete request."""
MAX_ID_CHARACTERS = 1000
MAX_SUGGESTIONS = 12
"""Example searches of the playground; every answer of `GET /v1/models` carries them."""


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


Text = Annotated[StrictStr, Field(min_length=1, max_length=MAX_CHARACTERS), AfterValidator(_not_blank)]
ModelName = Annotated[StrictStr, Field(max_length=1000)]
Instruction = Annotated[StrictStr, Field(max_length=MAX_CHARACTERS)]


OneOrMoreInstructions = Annotated[
    Annotated[Instruction, Tag("instruction")]
    | Annotated[list[Instruction | None], Field(max_length=MAX_QUERIES), Tag("instructions")],
    Discriminator(lambda value: "instructions" if isinstance(value, list) else "instruction"),
]


def _query_shape(value: Any) -> str:
    return "queries" if isinstance(value, list) else "query"


OneOrMoreQueries = Annotated[
    Annotated[Text, Tag("query")] | Annotated[list[Text], Field(min_length=1, max_length=MAX_QUERIES), Tag("queries")],
    Discriminator(_query_shape),
]


class Request(BaseModel):
    """A request body. Unknown fields are rejected: a misspelt `instruction` must not pass as a plain query."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


Filter = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {
                "anyOf": [
                    {"type": ["string", "number", "boolean"]},
                    {"type": "object", "description": "gt, gte, lt, lte, eq, ne, in or nin -> value or values"},
                ]
            },
        }
    ),
]


class SearchRequest(Request):
    """A query under an instruction, or several queries."""

    query: OneOrMoreQueries = Field(description=f"one query, or up to {MAX_QUERIES}")
    instruction: OneOrMoreInstructions | None = Field(
        None,
        description="what a relevant passage must satisfy besides the query's topic; one for all queries, or one per query",
    )
    top_k: Annotated[StrictInt, Field(ge=1, le=MAX_TOP_K)] = Field(10, description="largest number of hits per query")
    filter: Filter | None = Field(
        None,
        description="conditions on metadata fields (GET /v1/models lists them); every hit satisfies all of them",
        examples=[{"year": {"gte": 2020, "lt": 2024}, "language": {"in": ["en", "de"]}, "draft": False}],
    )
    allow_partial: StrictBool = Field(
        False,
        description="answer even if some shards of the index do not, and list the missing ones; false: 503 in that case",
    )
    min_sequence: Annotated[StrictInt, Field(ge=0)] = Field(
        0,
        description="wait until the answer reflects the changes up to this sequence number (of a put or delete); 503 if "
        "it does not within the request's time-out",
    )
    exclude: StrictBool | None = Field(
        None,
        description="lower passages that resemble what the instruction excludes (`not ...`, `except ...`, `leave out "
        "...`); null: as the server is set",
    )
    hybrid: Annotated[float, Field(ge=0, le=1, strict=True)] | None = Field(
        None,
        description="share of BM25 in the score, 0: none; needs a lexical index (GET /v1/models); null: as the server is set",
    )
    explain: StrictBool = Field(
        False,
        description="say what the instruction did to each hit, and which of its phrases did it; for one query under an "
        f"instruction of up to {MAX_EXPLAINED_CHARACTERS} characters, with a top_k of up to {MAX_EXPLAINED_HITS}",
    )
    rerank: StrictBool | None = Field(
        None,
        description="re-rank the first hits by the server's reranker (GET /v1/models names it); null: the server's default",
    )
    model: ModelName | None = Field(None, description="if given, must be the served model's name (GET /v1/models)")

    @field_validator("explain")
    @classmethod
    def _can_be_explained(cls, explain: bool, info: ValidationInfo) -> bool:
        known = info.data  # without the fields that are invalid
        if explain and {"query", "instruction", "top_k"} <= known.keys():
            require_explainable(known["query"], known["instruction"], known["top_k"])
        return explain

    @model_validator(mode="after")
    def _as_many_instructions_as_queries(self) -> SearchRequest:
        queries = len(self.queries())
        if isinstance(self.instruction, list) and len(self.instruction) != queries:
            raise ValueError(
                f"instruction: {len(self.instruction)} instructions for {queries} queries; send one, or one per query"
            )
        if queries * self.top_k > MAX_HITS:
            raise ValueError(f"top_k: {queries} queries x {self.top_k} hits exceed {MAX_HITS}; ask for fewer")
        return self

    def queries(self) -> list[str]:
        """Return all queries as a list."""
        return [self.query] if isinstance(self.query, str) else self.query

    def instructions(self) -> list[str | None]:
        """Return the instruction of every query; None for an empty one."""
        given = self.instruction if isinstance(self.instruction, list) else [self.instruction] * len(self.queries())
        return [instruction or None for instruction in given]


class SearchHit(BaseModel):
    """A hit of a search: a passage and its score."""

    id: str
    score: float = Field(
        description="cosine of query and passage; with `exclude` of the query moved away from what it excludes, and with "
        "`hybrid` the weighted mean of the cosine and relative BM25, so it compares hits of one answer only"
    )
    text: str
    metadata: dict[str, Metadata] = Field({}, description="field -> value; dates as in ISO 8601")
    rerank_score: float | None = Field(None, description="relevance by the reranker; null: not re-ranked")


class Timings(BaseModel):
    """Durations of the stages of a search, in milliseconds."""

    encode_ms: float
    search_ms: float
    rerank_ms: float | None = Field(None, description="null: not asked to re-rank")


class SearchAnswer(BaseModel):
    """Fields common to both search responses; all hits come from one model and one index version."""

    object: Literal["search_results"] = "search_results"
    index_version: str
    sequence: int = Field(description="sequence number of the last change that the answer reflects; 0: no changes yet")
    model: str
    timings: Timings
    partial: bool = Field(False, description="true: some shards did not answer, so hits may be missing")
    missing_shards: list[str] = []
    notes: list[str] = Field([], description="what the answer lacks that was asked for, and why, a sentence each")
    explanation: Explanation | None = Field(None, description="of the hits, if `explain` asked for it")


class SearchResponse(SearchAnswer):
    """The answer to one query: its hits, best first."""

    hits: list[SearchHit]


class SearchResult(BaseModel):
    """Hits of one of several queries, best first."""

    hits: list[SearchHit]


class SearchManyResponse(SearchAnswer):
    """The answer to a list of queries: the hits of each, in the order of the queries."""

    results: list[SearchResult]


Id = Annotated[StrictStr, Field(min_length=1, max_length=MAX_ID_CHARACTERS)]


class NewDocument(Request):
    """A passage to add to the index."""

    id: Id = Field(description="may contain slashes")
    text: Text
    metadata: Annotated[
        dict[str, Any],
        WithJsonSchema(
            {
                "type": "object",
                "additionalProperties": {"type": ["string", "integer", "number", "boolean", "null"]},
            }
        ),
    ] = Field(
        {},
        description="field of the index (GET /v1/models lists them) -> value; missing fields are null",
        examples=[{"year": 2021, "language": "en"}],
    )


def _distinct(ids: list[str]) -> None:
    if len(set(ids)) < len(ids):
        twice = next(id for id in ids if ids.count(id) > 1)
        raise ValueError(f"the id {twice!r} appears twice; send every document once")


class PutRequest(Request):
    """Documents to add; documents with the same ids are replaced."""

    documents: list[NewDocument] = Field(min_length=1, max_length=MAX_DOCUMENTS)

    @model_validator(mode="after")
    def _ids_are_distinct(self) -> PutRequest:
        _distinct([document.id for document in self.documents])
        return self


class DeleteRequest(Request):
    """Ids of documents to delete; unknown ids are ignored."""

    ids: list[Id] = Field(min_length=1, max_length=MAX_DOCUMENTS)


class ChangeResponse(BaseModel):
    """The change is durable; searches show it within a second."""

    object: Literal["documents.put", "documents.deleted"]
    count: int = Field(description="number of documents in the request")
    sequence: int = Field(
        description="answers with at least this sequence number show the change; a search waits for it with `min_sequence`"
    )


class DocumentResponse(BaseModel):
    """The current state of a passage."""

    object: Literal["document"] = "document"
    id: str
    text: str
    metadata: dict[str, Metadata]


class Suggestion(Request):
    """An example search of the playground."""

    query: Text
    instruction: Text


class Model(BaseModel):
    """The served model and the index it searches."""

    model_config = ConfigDict(protected_namespaces=())

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix time when serving started")
    owned_by: str = "infembed_ray"
    dimension: int
    encoder: str = Field(description="fingerprint of the encoder")
    index_version: str
    passages: int = Field(description="number of passages in that version, without later changes")
    vocabulary: int = Field(description="size of the vocabulary: token ids are smaller")
    metadata: dict[str, FieldType] = Field({}, description="metadata field that searches can filter by -> type")
    writable: bool = Field(False, description="whether documents can be put and deleted")
    lexical: bool = Field(False, description="whether the index has words, for searches with `hybrid`")
    reranker: str | None = Field(None, description="model that re-ranks the first hits; null: none")
    suggestions: list[Suggestion] = Field([], description="example searches of this index, for the playground")


NO_WORDS = "this index has no lexical index; build it again with `infembed index lexical=true` (FAISS shards only), or leave out hybrid"


class ModelsResponse(BaseModel):
    """OpenAI's list of models. It holds one, or several if collections were built by several."""

    object: Literal["list"] = "list"
    data: list[Model]


class Collection(BaseModel):
    """A collection: its name in paths, and the model and index that answer its requests."""

    object: Literal["collection"] = "collection"
    name: str
    model: Model


class CollectionsResponse(BaseModel):
    """The list of collections."""

    object: Literal["list"] = "list"
    data: list[Collection]


class HealthResponse(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"
    deployment: str = Field(description="fingerprint of what is served: settings, index and encoder")


class Error(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The body of every error answer."""

    error: Error
