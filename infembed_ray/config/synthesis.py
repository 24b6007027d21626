"""Settings of `infembed synthesize`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from infembed_ray.config.base import Settings, runtime_field
from infembed_ray.config.llm import Batches, ChatModel, Endpoint, JournalUpload, Limits

SeedFormat = Literal["table", "msmarco", "robust04", "leetcode", "metamath"]


class Selection(Settings):
    """Choice of seeds that cover the set: greedy facility location over embeddings."""

    seeds: int = Field(ge=1, description="number of seeds to choose")
    encoder: str = runtime_field(description="checkpoint or hub name of the encoder")
    batch_tokens: int = runtime_field(4096, ge=64, description="tokens per encoding batch, with padding")


class SynthesizeSettings(Settings):
    """`infembed synthesize`: seeds -> InF-IR records (paper, section 4)."""

    seeds: str = runtime_field(
        description="a file, or a directory of files: Parquet, JSONL, JSON, CSV or TSV with id, query, passage"
    )
    format: SeedFormat = Field(
        "table", description="table, or the published layout of msmarco (v2.1), robust04, leetcode or metamath"
    )
    output: str = runtime_field(description="directory or URI for the published records")
    journal: str | None = runtime_field(
        None, description="directory or URI of the response journal; null: OUTPUT/journal"
    )
    journal_upload: JournalUpload = runtime_field(
        JournalUpload(), description="journal in an object store: when answers are uploaded"
    )
    replay: tuple[str, ...] = runtime_field(
        (), description="finished journals (files or directories) that are only read"
    )
    columns: dict[str, str] = Field({}, description="format=table: our column name -> its name in the seeds file")
    split: str | None = Field(None, description="only seeds of this split: their column `split`, or their file's name")
    passage_words: int | None = Field(None, ge=1, description="cut the seeds' passages after N words; null: whole")
    limit: int | None = Field(None, ge=1, description="use only the first N seeds")
    select: Selection | None = Field(
        None,
        description="choose seeds that cover all of them, by `seed`, before `limit`; null: all, in their order",
    )
    generator: ChatModel = Field(ChatModel(model="gpt-4o-mini"), description="writes instructions and negatives")
    judge: ChatModel = Field(ChatModel(model="o4-mini"), description="judges the three scenarios")
    steps: dict[str, ChatModel] = Field(
        {}, description="step -> the model for it instead, for example judge_positive: {model: gpt-5}"
    )
    endpoint: Endpoint = runtime_field(Endpoint(), description="serves the models")
    more_endpoints: tuple[Endpoint, ...] = runtime_field(
        (), description="also serve the models: requests are shared by weight, and each stands in for the others"
    )
    batches: Batches | None = runtime_field(
        None, description="{}: ask the Batch API of `endpoint` first, the rest online; null: all online"
    )
    limits: Limits = runtime_field(Limits(), description="of all actors together")
    prices: str | None = runtime_field(
        None, description="path or URI of a YAML file like llm/prices.yaml with your own prices, which override it"
    )
    distractors: int = Field(4, ge=0, description="random passages shown to the judge beside the three candidates")
    seed: int = Field(0, description="random seed of the distractors and of the order of the candidates")
    complement: bool = Field(
        False, description="also write, per kept record, an instruction that makes its hard negative the positive"
    )
    in_flight: int = runtime_field(64, ge=1, description="most requests in flight per actor")
    actors: int = runtime_field(1, ge=1, description="synthesis actors")
