"""Settings of `infembed evaluate` and `infembed report`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from infembed_ray.config.base import Settings, _json, runtime_field
from infembed_ray.config.llm import Endpoint, Limits
from infembed_ray.config.training import Pooling, Template

# ------------------------------------------------------------------------------------------------- retrievers


class Bm25(Settings):
    """Tokenization and term weights of BM25."""

    k1: float = Field(1.5, ge=0, description="term frequency saturation")
    b: float = Field(0.75, ge=0, le=1, description="document length normalization")
    variant: Literal["lucene", "robertson", "atire"] = Field("lucene", description="formula, by bm25s's names")
    stemmer: str | None = Field("english", description="language of the Snowball stemmer; null: no stemming")
    stopwords: str | None = Field("en", description="language of bm25s's stopword list; null: no stopwords")


class EmbeddingApi(Settings):
    """Access to a remote embedder, with a journal and a budget."""

    protocol: Literal["openai", "cohere"] = Field("openai", description="/embeddings of OpenAI, or /embed of Cohere")
    endpoint: Endpoint = runtime_field(Endpoint(), description="URL, and the environment variable of the key")
    limits: Limits = runtime_field(Limits(), description="rate limits and budget")
    journal: str | None = runtime_field(None, description="directory of the journal, shared by all runs; required")
    prices: str | None = runtime_field(None, description="YAML file with prices that override those of the package")
    texts_per_request: int = runtime_field(16, ge=1, description="texts per request; at most 96 for Cohere")
    in_flight: int = runtime_field(16, ge=1, description="requests in flight")
    max_characters: int = Field(20_000, ge=1, description="texts are truncated here, because APIs reject long ones")


def placeholders(text_format: str) -> list[str]:
    """Return the names of a format's placeholders, in order: `{query} {instruction}` has two."""
    return re.findall(r"\{(\w+)\}", text_format)


def _format(*required: str, optional: str | None = None) -> AfterValidator:
    """Make a validator: a format has each required placeholder once, perhaps the optional one, and no other."""
    allowed = [*required, optional] if optional else [*required]

    def check(text_format: str) -> str:
        found = placeholders(text_format)
        if not set(required) <= set(found) <= set(allowed) or len(found) > len(set(found)):
            raise ValueError(f"write it with {' and '.join(f'{{{name}}}' for name in allowed)}, each once")
        return text_format

    return AfterValidator(check)


InstructedFormat = Annotated[str, _format("query", optional="instruction")]
QueryFormat = Annotated[str, _format("query")]
PassageFormat = Annotated[str, _format("passage")]
PairFormat = Annotated[str, _format("query", "passage")]
RetrieverKind = Literal[
    "encoder", "sentence_transformers", "api", "bm25", "run", "seq2seq", "classifier", "causal", "random"
]


class _Retriever(Settings):
    """Fields of all kinds of retrievers."""

    baseline: str | None = runtime_field(None, description="baseline whose values apply where none are given")

    @classmethod
    def unknown_key(cls, name: str) -> str:
        """Say which other kinds have the setting, or which name is nearest."""
        others = [kind for kind, of_kind in KINDS.items() if name in of_kind.model_fields]
        return (
            f"a setting of kind {' or '.join(others)}; drop it or set `kind`" if others else super().unknown_key(name)
        )

    def identity(self) -> dict[str, Any]:
        """Return what decides embeddings, scores or rankings.

        Settings of other kinds count with their defaults, because the identities of stored embeddings contain them.
        """
        return _defaults() | super().identity()


class _Prompted(_Retriever):
    instructed_query: InstructedFormat = Field(description="format of a query with an instruction")
    plain_query: QueryFormat = Field(description="format of a query without an instruction")


class _Local(_Retriever):
    model: str = runtime_field(description="checkpoint directory or hub name")
    revision: str | None = Field(None, description="commit of a hub model; null: the newest")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="precision of the model")


class _Adapted(_Local):
    adapter: str | None = runtime_field(None, description="LoRA adapters over `model`: directory or hub name")
    adapter_revision: str | None = Field(None, description="commit of hub adapters; null: the newest")


class _Embedder(_Retriever):
    pool_prompt: bool = Field(True, description="false: leave the text before the query or passage out of the mean")
    dimensions: int | None = Field(None, ge=1, description="leading components of the embeddings to use; null: all")
    query_length: int | None = Field(None, ge=1, description="tokens of query and instruction; null: the model's own")
    passage_length: int | None = Field(None, ge=1, description="tokens of a passage; null: the model's own")


class EncoderSettings(_Adapted, _Embedder):
    """An encoder that `InstructionEncoder` loads."""

    kind: Literal["encoder"] = "encoder"
    instructed_query: InstructedFormat | None = Field(
        None, description="format of a query with an instruction; null: the checkpoint's template"
    )
    plain_query: QueryFormat | None = Field(None, description="format of a query without one; null: the checkpoint's")
    passage: PassageFormat | None = Field(None, description="format of a passage; null: the checkpoint's own")
    template: Template | None = Field(None, description="template of a checkpoint that has none, if no formats are set")
    pooling: Pooling = Field("auto", description="from token states to one vector; auto: the checkpoint's own")
    append_eos: bool | None = Field(None, description="end texts with EOS; null: if the last token is pooled")
    bidirectional: bool | None = Field(None, description="bidirectional attention in a decoder; null: by its config")

    @model_validator(mode="after")
    def _formats_fit_together(self) -> EncoderSettings:
        if (self.instructed_query is None) != (self.plain_query is None):
            raise ValueError("give instructed_query and plain_query both, or neither")
        if self.template is not None and self.instructed_query is not None:
            raise ValueError(f"template={self.template}: formats replace the template; drop it or the formats")
        if not self.pool_prompt and self.instructed_query is None:
            raise ValueError("pool_prompt=false: needs formats; give instructed_query and plain_query")
        if not self.pool_prompt and self.pooling not in ("auto", "mean"):
            raise ValueError(f"pool_prompt=false: needs pooling=mean, not {self.pooling}")
        return self


class SentenceTransformersSettings(_Local, _Prompted, _Embedder):
    """An encoder that only sentence-transformers loads, or whose embeddings are not normalized."""

    kind: Literal["sentence_transformers"]
    passage: PassageFormat = Field(description="format of a passage")
    normalize: bool = Field(True, description="false: rank by inner products of the embeddings as they are")


class ApiSettings(_Prompted):
    """A remote embedder."""

    kind: Literal["api"]
    model: str = runtime_field(description="the API's model id")
    passage: PassageFormat | None = Field(None, description="format of a passage; null: the passage itself")
    dimensions: int | None = Field(None, ge=1, description="dimensions to request; null: the model's own")
    api: EmbeddingApi = Field(EmbeddingApi(), description="protocol, endpoint, limits and journal")


class Bm25Settings(_Prompted):
    """BM25."""

    kind: Literal["bm25"]
    bm25: Bm25 = Field(Bm25(), description="tokenization and term weights")


class RunSettings(_Retriever):
    """Rankings of another system, or of an earlier evaluation."""

    kind: Literal["run"]
    runs: tuple[str, ...] = runtime_field(
        description="files in TREC's format, perhaps compressed by gzip, or folders runs/MODEL of an evaluation, with a "
        "file per task; several are fused by reciprocal ranks",
        min_length=1,
    )


class _PairReranker(_Local, _Prompted):
    passage: PassageFormat | None = Field(None, description="format of a passage; null: the passage itself")
    query_length: int | None = Field(None, ge=1, description="tokens of query and instruction; null: any number")
    pair_length: int = Field(512, ge=8, description="tokens of a pair; the passage is truncated first")


class ClassifierSettings(_PairReranker):
    """A reranker that classifies the pair: monoBERT, cross-encoders."""

    kind: Literal["classifier"]


class _Answering(_PairReranker):
    pair: PairFormat = Field(description="input of the model: {query} as its own formats write it, and {passage}")
    answers: tuple[str, str] = Field(description="tokens of the vocabulary for relevant and for irrelevant")


class Seq2SeqSettings(_Answering):
    """A reranker whose first output token is the answer: monoT5, FLAN-T5."""

    kind: Literal["seq2seq"]


class CausalSettings(_Answering, _Adapted):
    """A reranker whose next token is the answer: FollowIR-7B, Qwen3-Reranker."""

    kind: Literal["causal"]


class RandomSettings(_Retriever):
    """A reranker with random scores."""

    kind: Literal["random"]
    seed: int = Field(0, description="seed of the scores")


class BaselineSettings(Settings):
    """Values over those of a baseline. They are checked once the baseline's kind is known."""

    model_config = ConfigDict(extra="allow")

    baseline: str | None = runtime_field(None, description="name of the baseline")
    kind: RetrieverKind | None = Field(None, description="the baseline's kind, if it is given")


RetrieverSettings = (
    EncoderSettings
    | SentenceTransformersSettings
    | ApiSettings
    | Bm25Settings
    | RunSettings
    | Seq2SeqSettings
    | ClassifierSettings
    | CausalSettings
    | RandomSettings
)
"""Settings of a retriever. A format is a text with placeholders: `{query}`, `{instruction}`, `{passage}`."""
RerankerSettings = Seq2SeqSettings | ClassifierSettings | CausalSettings

KINDS: Mapping[str, type[_Retriever]] = {
    get_args(settings.model_fields["kind"].annotation)[0]: settings for settings in get_args(RetrieverSettings)
}


@cache
def _defaults() -> dict[str, Any]:
    """Identity of a retriever that has the settings of all kinds, each with its default; None where it has none."""
    defaults: dict[str, Any] = {}
    for kind in KINDS.values():
        for name, field in kind.model_fields.items():
            if not (isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("identity") is False):
                default = None if field.is_required() else _json(field.default)
                defaults[name] = default if defaults.get(name) is None else defaults[name]
    return defaults


def _settings_of(given: Mapping[str, Any] | Settings) -> type[Settings]:
    """Return the class of a retriever's settings: values over a baseline, or settings of its kind."""
    if isinstance(given, Settings):
        return type(given)
    if given.get("baseline") is not None:
        return BaselineSettings
    kind = given.get("kind", "encoder")
    return KINDS.get(str(kind), EncoderSettings if kind is None else BaselineSettings)  # either rejects the kind


def retriever_settings(values: Mapping[str, Any], where: str) -> RetrieverSettings | BaselineSettings:
    """Validate a mapping as settings of its kind (default: encoder), or as values over a baseline.

    Raises:
        InputError: a value is missing, unknown or wrong; `where` names the mapping.
    """
    return _settings_of(values).from_mapping(dict(values), f"{where}.")  # type: ignore[return-value]


def _tag(given: Any) -> str:
    return f"<{(_settings_of(given) if isinstance(given, (Mapping, Settings)) else str).__name__}>"


if TYPE_CHECKING:
    NamedRetriever = str | BaselineSettings | RetrieverSettings
else:
    _FORMS = (str, BaselineSettings, *KINDS.values())
    NamedRetriever = Annotated[reduce(or_, (Annotated[f, Tag(f"<{f.__name__}>")] for f in _FORMS)), Discriminator(_tag)]
"""A retriever by its name, or as a mapping of settings."""


# ------------------------------------------------------------------------------------------------------ commands


class GateSettings(Settings):
    """Limits that a model must keep on every task with changed instructions, in points (x100)."""

    p_mrr_gain: float = Field(0.0, description="p-MRR must exceed the base's by more than this")
    quality_loss: float = Field(1.0, ge=0, description="most that either quality may be below the base's")
    control_gain: float = Field(
        1.0, ge=0, description="most that p-MRR under generic and shuffled may differ from the base's"
    )
    pairs_reversed: float = Field(
        70.0, ge=0, le=100, description="least labelled pairs that the inverse instruction reverses"
    )
    paraphrase_change: float = Field(1.0, ge=0, description="most that either quality may move under a paraphrase")


class EvaluateSettings(Settings):
    """`infembed evaluate`: how well models retrieve and follow instructions, on benchmarks and on InF-IR records."""

    tasks: tuple[str, ...] = Field(
        (),
        description="tasks or benchmarks by name (followir/core17, bright), data sets of the hub (mteb/scifact) or of "
        "ir_datasets (ir_datasets:cranfield), or directories in the layout of mteb, BEIR or TREC",
    )
    measures: tuple[str, ...] = runtime_field(  # the tasks' figures are part of their contents
        (),
        description="measures by ir_measures' names (nDCG@10, P@5, RR, bpref): further figures of published tasks and "
        "records; of other collections the figures beside p-MRR and Robustness@10",
    )
    data: str | None = runtime_field(
        None, description="mirror made by `infembed data fetch`; null: download from the hub"
    )
    records: str | None = runtime_field(
        None, description="InF-IR records (JSONL, Parquet or a published synthesis output) as a task"
    )
    models: dict[str, NamedRetriever] = runtime_field(
        description="label -> checkpoint directory, hub name, name of a baseline, or a mapping of settings "
        "(docs/guides/retrievers.md); the first model is the baseline of the comparisons"
    )
    output: str = runtime_field(description="directory for the published results")
    embeddings: str | None = runtime_field(
        None,
        description="directory, visible to all nodes, for embeddings and scores that tasks and runs share; "
        "null: `embeddings` in the output",
    )
    split: str | None = Field(None, description="only records whose column `split` has this value")
    reworded: str | None = runtime_field(
        None, description="the records with instructions in other words than their passages', as a task beside them"
    )
    distractors: str | None = runtime_field(
        None, description="passages irrelevant to all records: JSONL or Parquet with id and passage or text"
    )
    max_distractors: int = Field(1000, ge=0, description="distractors to add to the corpus, from the first")
    template: Template = Field("instruction_first", description="template of models that have none")
    depth: int = Field(1000, ge=1, description="documents per ranking")
    first_stage: str | None = Field(
        None, description="label of the model whose top documents rerankers score, for tasks without candidates"
    )
    rerank: int = Field(100, ge=1, description="documents of the first stage that rerankers score")
    controls: bool = Field(
        True,
        description="ask tasks with changed instructions under control instructions too, about five times the queries, "
        "and rank them by BM25 and a constant",
    )
    gate: str | None = runtime_field(
        None,
        description="label of a model that must pass `gates`, else the exit status is 1; the first model is its base",
    )
    gates: GateSettings = runtime_field(GateSettings(), description="limits of `gate`")
    batch_tokens: int = runtime_field(4096, ge=64, description="tokens per encoding batch, with padding")
    actors: int = runtime_field(1, ge=1, description="encoding actors")
    gpus_per_actor: float = runtime_field(0.0, ge=0, description="GPUs per encoding actor and per search")


class ReportSettings(Settings):
    """`infembed report`: the paper's tables and figures from published results, beside the paper's own numbers."""

    results: dict[str, str] = runtime_field(
        description="label -> published output of `infembed evaluate` or `infembed sweep`"
    )
    output: str = runtime_field(description="directory for the published report")
    rows: dict[str, str] = Field(
        {}, description="model -> its row in Tables 2 and 5, if the names differ; e.g. InF-Embed (e5-base-v2)"
    )
    baseline: str | None = Field(
        None,
        description="model that all others are compared with; null: the first of the same output, in a sweep the backbone",
    )
    unfiltered: tuple[str, ...] = Field(
        (), description="labels of results whose models were trained without the quality filter (Figure 6)"
    )
