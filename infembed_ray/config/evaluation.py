"""Settings of `infembed evaluate` and `infembed report`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from infembed_ray.config.base import InputPath, ModelName, RecordsPath, RowSettings, Settings, runtime_field
from infembed_ray.config.llm import Endpoint
from infembed_ray.config.training import Pooling

# ------------------------------------------------------------------------------------------------- retrievers


class Bm25(Settings):
    """Tokenization and term weights of BM25, by bm25s's formula of Lucene."""

    k1: float = Field(1.5, ge=0, description="term frequency saturation")
    b: float = Field(0.75, ge=0, le=1, description="document length normalization")
    stemmer: str | None = Field("english", description="language of the Snowball stemmer; null: no stemming")


def _format(*required: str, optional: str | None = None) -> AfterValidator:
    """Make a validator: a format has each required placeholder once, perhaps the optional one, and no other."""
    allowed = [*required, optional] if optional else [*required]

    def check(text_format: str) -> str:
        used = re.findall(r"\{(\w+)\}", text_format)
        if not set(required) <= set(used) <= set(allowed) or len(used) > len(set(used)):
            raise ValueError(f"write it with {' and '.join(f'{{{name}}}' for name in allowed)}, each once")
        return text_format

    return AfterValidator(check)


InstructedFormat = Annotated[str, _format("query", optional="instruction")]
QueryFormat = Annotated[str, _format("query")]
PassageFormat = Annotated[str, _format("passage")]
PairFormat = Annotated[str, _format("query", "passage")]
RetrieverKind = Literal["encoder", "api", "bm25", "run", "seq2seq", "classifier", "causal"]

_PROMPTS = ("instructed_query", "plain_query")
_MODEL = ("model", "revision", "dtype")
_EMBEDDER = ("passage", "dimensions", "query_length", "passage_length")
_RERANKER = ("passage", "query_length", "pair_length")
TAKES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "encoder": (
        ("model",),
        (*_MODEL, "adapter", *_PROMPTS, *_EMBEDDER, "pooling", "append_eos", "bidirectional"),
    ),
    "api": (("model", *_PROMPTS), ("passage", "dimensions", "endpoint")),
    "bm25": (_PROMPTS, ("bm25",)),
    "run": (("model",), ()),
    "seq2seq": (("model", *_PROMPTS, "pair", "answers"), (*_MODEL, *_RERANKER)),
    "classifier": (("model", *_PROMPTS), (*_MODEL, *_RERANKER)),
    "causal": (("model", *_PROMPTS, "pair", "answers"), (*_MODEL, "adapter", *_RERANKER)),
}
"""Kind of a retriever -> the settings that it needs, and the further ones that it takes."""


class RetrieverSettings(Settings):
    """A retriever. A format is a text with placeholders: `{query}`, `{instruction}`, `{passage}`.

    Each kind takes some of the settings (`TAKES`); others are errors. Values over a baseline are checked together with the
    baseline's own, in `evaluation.retrievers.baselines.resolve`.
    """

    kind: RetrieverKind = Field("encoder", description="how the model ranks: docs/guides/retrievers.md has the kinds")
    baseline: str | None = runtime_field(None, description="baseline whose values apply where none are given")
    model: ModelName = runtime_field(
        "",
        description="checkpoint directory or hub name; of kind api the API's model id; of kind run a file in TREC's format, "
        "perhaps compressed by gzip, or a folder runs/MODEL of an evaluation",
    )
    revision: str | None = Field(None, description="commit of a hub model; null: the newest")
    adapter: ModelName | None = runtime_field(None, description="LoRA adapters over `model`: directory or hub name")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="precision of the model")
    instructed_query: InstructedFormat | None = Field(
        None, description="format of a query with an instruction; null: the checkpoint's template"
    )
    plain_query: QueryFormat | None = Field(None, description="format of a query without one; null: the checkpoint's")
    passage: PassageFormat | None = Field(
        None, description="format of a passage; null: the checkpoint's own, or the passage itself"
    )
    pooling: Pooling = Field("auto", description="from token states to one vector; auto: the checkpoint's own")
    append_eos: bool | None = Field(None, description="end texts with EOS; null: if the last token is pooled")
    bidirectional: bool | None = Field(None, description="bidirectional attention in a decoder; null: by its config")
    dimensions: int | None = Field(None, ge=1, description="leading components of the embeddings; null: all")
    query_length: int | None = Field(None, ge=1, description="tokens of query and instruction; null: the model's own")
    passage_length: int | None = Field(None, ge=1, description="tokens of a passage; null: the model's own")
    pair_length: int | None = Field(None, ge=8, description="tokens of a reranker's pair; null: as trained, else 512")
    pair: PairFormat | None = Field(
        None, description="input of a generative reranker: {query} as its own formats write it, and {passage}"
    )
    answers: tuple[str, str] | None = Field(
        None, description="tokens of a generative reranker's vocabulary for relevant and for irrelevant"
    )
    bm25: Bm25 = Field(Bm25(), description="tokenization and term weights of BM25")
    endpoint: Endpoint = runtime_field(Endpoint(), description="OpenAI-compatible API of a remote embedder")

    @model_validator(mode="after")
    def _fits_its_kind(self) -> RetrieverSettings:
        if self.baseline is not None:
            return self
        required, further = TAKES[self.kind]
        if missing := [name for name in required if not getattr(self, name)]:
            raise ValueError(f"{missing[0]} is missing: kind={self.kind} needs {' and '.join(missing)}")
        foreign = type(self).model_fields.keys() - {"kind", "baseline", *required, *further}
        for name in sorted(name for name in foreign if getattr(self, name) != type(self).model_fields[name].default):
            kinds = [kind for kind, (needs, takes) in TAKES.items() if name in (*needs, *takes)]
            fault = f"{name} is a setting of kind {' or '.join(kinds)}, not of {self.kind}"
            raise ValueError(f"{fault}; drop it or set `kind`")
        if self.kind == "encoder" and (self.instructed_query is None) != (self.plain_query is None):
            raise ValueError("give instructed_query and plain_query both, or neither")
        return self

    @model_serializer(mode="wrap")
    def _as_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what is not given: a baseline may have another value than the default."""
        return {name: value for name, value in dump(self).items() if name in self.model_fields_set}


if TYPE_CHECKING:
    NamedRetriever = str | RetrieverSettings
else:  # tagged, so that an error is about the form that was given
    NamedRetriever = Annotated[
        Annotated[ModelName, Tag("<str>")] | Annotated[RetrieverSettings, Tag("<RetrieverSettings>")],
        Discriminator(lambda given: f"<{'RetrieverSettings' if isinstance(given, (Mapping, Settings)) else 'str'}>"),
    ]
"""A retriever by its name, or its settings."""


# ------------------------------------------------------------------------------------------------------ commands


class GateSettings(Settings):
    """Limits that a model must keep on every task with changed instructions, in points (x100).

    Its p-MRR must exceed the base's too. A gate fails if the 95 % interval of a figure lies wholly beyond its limit.
    """

    tolerance: float = Field(
        1.0, ge=0, description="maximum loss against the base: quality, its change by a paraphrase, reversed pairs"
    )
    foreign_share: float = Field(
        30.0,
        ge=0,
        description="maximum gain of p-MRR under generic and shuffled instructions, in % of the gain as given",
    )


class EvaluateSettings(RowSettings):
    """`infembed evaluate`: how well models retrieve and follow instructions, on benchmarks and on InF-IR records."""

    tasks: tuple[str, ...] = Field(
        (),
        description="tasks or benchmarks by name (followir/core17, bright), data sets of the hub (mteb/scifact), "
        "or directories in the layout of mteb or BEIR",
    )
    measures: tuple[str, ...] = runtime_field(  # the tasks' figures are part of their contents
        (),
        description="measures by ir_measures' names (nDCG@10, P@5, RR, bpref): further figures of published tasks and "
        "records; for other collections they replace all figures but p-MRR and Robustness@10",
    )
    data: InputPath | None = runtime_field(
        None,
        description="directory with data sets of the hub, OWNER/NAME, as `hf download` writes them; null: download them to "
        "the cache of the hub's client",
    )
    records: RecordsPath | None = runtime_field(None, description="InF-IR records or a synthesis output, as a task")
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
    ignore_identical_ids: bool | None = runtime_field(  # part of the tasks' contents
        None,
        description="leave out of a ranking the document with the query's id; null: only for ArguAna and the other data "
        "sets of the hub for which mteb does so",
    )
    distractors: InputPath | None = runtime_field(None, description="irrelevant passages: id, and passage or text")
    max_distractors: int = Field(1000, ge=0, description="distractors to add to the corpus, from the first")
    depth: int = Field(1000, ge=1, description="documents per ranking")
    first_stage: str | None = Field(
        None, description="label of the encoder, bm25 or run whose top documents rerankers score"
    )
    rerank: int = Field(100, ge=1, description="documents of the first stage that rerankers score")
    controls: bool = Field(
        True,
        description="ask tasks with changed instructions under control instructions too, about five times the queries, "
        "and rank them by BM25",
    )
    gate: str | None = runtime_field(
        None,
        description="label of a model that must pass `gates`, else the exit status is 1; the first model is its base",
    )
    gates: GateSettings = runtime_field(GateSettings(), description="limits of `gate`")
    batch_tokens: int | None = runtime_field(None, ge=64, description="padded tokens per batch; null: by the device")
    actors: int = runtime_field(1, ge=1, description="encoding actors")
    gpus_per_actor: float = runtime_field(0.0, ge=0, description="GPUs per encoding actor and per search")


class ReportSettings(Settings):
    """`infembed report`: the paper's tables and figures from published results, next to the paper's numbers."""

    results: dict[str, InputPath] = runtime_field(description="label -> output of `infembed evaluate` or `sweep`")
    output: str = runtime_field(description="directory for the published report")
    rows: dict[str, str] = Field({}, description="model -> its row in Tables 2 and 5, if the names differ")
    unfiltered: tuple[str, ...] = Field(
        (), description="labels of results whose models were trained without the quality filter (Figure 6)"
    )
