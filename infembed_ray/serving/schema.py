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
from infembed_ray.retrieval.chunks import Chunk
from infembed_ray.serving.explaining import (
    MAX_EXPLAINED_CHARACTERS,
    MAX_EXPLAINED_HITS,
    Explanation,
    require_explainable,
)

InputType = Literal["query", "passage"]
Metadata = str | int | float | bool | list[str] | None
"""A value of a metadata field; dates and times are ISO 8601 strings."""

MAX_CHARACTERS = 100_000
"""Characters of one text. The encoder truncates longer inputs than it reads, or cuts them, as it did when the index was built."""
MAX_INPUTS = 2048
"""Inputs of one embeddings request; OpenAI's limit."""
MAX_TOP_K = 1000
MAX_DOCUMENTS = 1000
"""Documents of one put or delete request, and chunks of those of a put."""
MAX_ID_CHARACTERS = 1000


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


Text = Annotated[StrictStr, Field(min_length=1, max_length=MAX_CHARACTERS), AfterValidator(_not_blank)]
ModelName = Annotated[StrictStr, Field(max_length=1000)]
Instruction = Annotated[StrictStr, Field(max_length=MAX_CHARACTERS)]


class RequestBody(BaseModel):
    """A request body. Unknown fields are rejected: a misspelt `instruction` must not pass as a plain query."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


OneOrMoreTexts = Annotated[
    Annotated[Text, Tag("_text")] | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS), Tag("_texts")],
    Discriminator(lambda value: "_texts" if isinstance(value, list) else "_text"),
]


class EmbeddingsRequest(RequestBody):
    """OpenAI's embeddings request. `user` is accepted and ignored."""

    input: OneOrMoreTexts = Field(description=f"one text, or up to {MAX_INPUTS:,}; no token ids")
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

    def texts(self) -> tuple[list[str], list[str | None] | None]:
        """Return the texts and the instruction of each query; None for passages.

        Passages are the default, because OpenAI clients mostly embed corpora.
        """
        texts = [self.input] if isinstance(self.input, str) else self.input
        kind = self.input_type or ("query" if self.instruction else "passage")
        return texts, None if kind == "passage" else [self.instruction] * len(texts)


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


Filter = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {name: {"type": "array", "items": {"type": "object"}} for name in ("$and", "$or")},
            "additionalProperties": {
                "anyOf": [
                    {"type": ["string", "number", "boolean", "null"]},
                    {"type": "object", "description": "eq, ne, gt, gte, lt, lte, in, nin or all -> value or values"},
                ]
            },
        }
    ),
]


class SearchRequest(RequestBody):
    """A query under an instruction."""

    query: Text
    instruction: Instruction | None = Field(
        None, description="what a relevant passage must satisfy besides the query's topic"
    )
    top_k: Annotated[StrictInt, Field(ge=1, le=MAX_TOP_K)] = Field(10, description="maximum number of hits")
    filter: Filter | None = Field(
        None,
        description="conditions on metadata fields (GET /v1/models lists them), and filters in `$or` and `$and`; every hit passes",
        examples=[{"year": {"gte": 2020}, "tags": {"all": ["flu"]}, "$or": [{"draft": None}, {"draft": False}]}],
    )
    min_sequence: Annotated[StrictInt, Field(ge=0)] = Field(
        0,
        description="wait until the answer reflects the changes up to this sequence number (of a put or delete); 503 if "
        "it does not within the request's time-out",
    )
    hybrid: Annotated[float, Field(ge=0, le=1, strict=True)] | None = Field(
        None,
        description="share of BM25 in the score, 0: none; needs a lexical index (GET /v1/models); null: the server's default",
    )
    explain: StrictBool = Field(
        False,
        description="also return the effect of the instruction and of each of its phrases on every hit; for an "
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
        valid = info.data
        if explain and {"instruction", "top_k"} <= valid.keys():
            require_explainable(valid["instruction"], valid["top_k"])
        return explain


class SearchHit(BaseModel):
    """A hit of a search: a passage and its score."""

    id: str
    score: float = Field(
        description="cosine of query and passage; with `hybrid` the weighted mean of the cosine and relative BM25, so it "
        "compares hits of one answer only"
    )
    text: str
    metadata: dict[str, Metadata] = Field({}, description="field -> value; dates as in ISO 8601")
    chunk: Chunk | None = Field(None, description="the passage's best chunk, by its score before BM25; null: not cut")
    rerank_score: float | None = Field(None, description="relevance by the reranker; null: not re-ranked")


class Timings(BaseModel):
    """Durations of the stages of a search, in milliseconds."""

    encode_ms: float
    search_ms: float
    rerank_ms: float | None = Field(None, description="null: not asked to re-rank")


class SearchResponse(BaseModel):
    """The answer to a search: its hits, best first, all from one model and one index version."""

    object: Literal["search_results"] = "search_results"
    index_version: str
    sequence: int = Field(description="sequence number of the last change that the answer reflects; 0: no changes yet")
    model: str
    timings: Timings
    hits: list[SearchHit]
    notes: list[str] = Field([], description="what the answer lacks that was asked for, and why, a sentence each")
    explanation: Explanation | None = Field(None, description="of the hits, if `explain` asked for it")


class RerankDocument(BaseModel):
    """A passage to rank; other fields are ignored."""

    text: Text


class RerankResult(BaseModel):
    """A passage by its place in the request, and its relevance."""

    index: int
    relevance_score: float = Field(description="on the reranker's own scale, as `rerank_score` of a search")
    document: RerankDocument | None = None


TextOrDocument = Annotated[
    Annotated[Text, Tag("_text")] | Annotated[RerankDocument, Tag("_object")],
    Discriminator(lambda value: "_text" if isinstance(value, str) else "_object"),
]


class RerankRequest(RequestBody):
    """The rerank request of Cohere, Jina and Infinity, extended by `instruction`."""

    query: Text
    documents: list[TextOrDocument] = Field(min_length=1, max_length=MAX_DOCUMENTS)
    instruction: Instruction | None = Field(
        None, description="what a relevant passage must satisfy besides the query's topic"
    )
    top_n: Annotated[StrictInt, Field(ge=1)] | None = Field(None, description="maximum number of results; null: all")
    return_documents: StrictBool | None = Field(None, description="whether results repeat their passages")
    max_tokens_per_doc: None = Field(None, description="null: the reranker's own limit")
    model: ModelName | None = Field(
        None, description="if given, must be the name of the served model or of its reranker (GET /v1/models)"
    )

    def texts(self) -> list[str]:
        """Return the passages."""
        return [one if isinstance(one, str) else one.text for one in self.documents]

    def ranked(self, scores: list[float]) -> list[RerankResult]:
        """Return the results for the scores of `texts`, the most relevant first; of equal scores, the first passage."""
        best, texts = sorted(range(len(scores)), key=lambda place: -scores[place])[: self.top_n], self.texts()
        shown = {place: RerankDocument(text=texts[place]) for place in best} if self.return_documents else {}
        return [RerankResult(index=place, relevance_score=scores[place], document=shown.get(place)) for place in best]


class RerankResponse(BaseModel):
    """The passages of a request, the most relevant first."""

    object: Literal["rerank"] = "rerank"
    model: str
    results: list[RerankResult]


Id = Annotated[StrictStr, Field(min_length=1, max_length=MAX_ID_CHARACTERS)]


class NewDocument(RequestBody):
    """A passage to add to the index."""

    id: Id = Field(description="may contain slashes")
    text: Text
    metadata: Annotated[
        dict[str, Any],
        WithJsonSchema(
            {
                "type": "object",
                "additionalProperties": {"type": ["string", "integer", "number", "boolean", "array", "null"]},
            }
        ),
    ] = Field(
        {},
        description="field of the index (GET /v1/models lists them) -> value; missing fields are null",
        examples=[{"year": 2021, "language": "en"}],
    )


class PutRequest(RequestBody):
    """Documents to add; documents with the same ids are replaced."""

    documents: list[NewDocument] = Field(min_length=1, max_length=MAX_DOCUMENTS)

    @model_validator(mode="after")
    def _ids_are_distinct(self) -> PutRequest:
        ids = [document.id for document in self.documents]
        if len(set(ids)) < len(ids):
            twice = next(id for id in ids if ids.count(id) > 1)
            raise ValueError(f"the id {twice!r} appears twice; send every document once")
        return self


class DeleteRequest(RequestBody):
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


class Model(BaseModel):
    """The served model and the index it searches."""

    model_config = ConfigDict(protected_namespaces=())

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix time when serving started")
    owned_by: str = "infembed_ray"
    dimension: int
    encoder: str = Field(description="fingerprint of the encoder")
    exclusion_weight: float = Field(
        0.0, description="weight of what the instruction of a query excludes, against 1 for the whole query; 0: none"
    )
    index_version: str
    passages: int = Field(description="number of passages in that version, without later changes")
    metadata: dict[str, FieldType] = Field({}, description="metadata field that searches can filter by -> type")
    chunk_tokens: int | None = Field(None, description="maximum tokens of a chunk; null: passages are not cut")
    chunk_overlap: int = Field(0, description="tokens that neighbouring chunks share")
    writable: bool = Field(False, description="whether documents can be put and deleted")
    lexical: bool = Field(False, description="whether the index has words, for searches with `hybrid`")
    reranker: str | None = Field(None, description="model that re-ranks the first hits; null: none")


NO_RERANKER = "this server has no reranker; start `infembed serve` with rerank.kind"
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
