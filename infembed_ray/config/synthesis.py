"""Settings of `infembed synthesize`."""

from pydantic import Field

from infembed_ray.config.base import InputPath, RowSettings, runtime_field
from infembed_ray.config.llm import Batches, ChatModel, Endpoint, Limits


class CheapJudge(ChatModel):
    """A cheap model that judges first: it answers twice, with the candidates in two orders.

    Two equal picks of the right passage are its verdict; otherwise the verdict is in doubt, and `judge` gives it.
    """

    rejects: bool = Field(
        False, description="whether two equal picks of a wrong passage also reject the record; false: `judge` decides"
    )
    audit: float = Field(0.05, ge=0, le=1, description="share of the settled records that `judge` decides too")


class SynthesizeSettings(RowSettings):
    """`infembed synthesize`: seeds -> InF-IR records (paper, section 4)."""

    seeds: InputPath = runtime_field(
        description="file, directory or glob: Parquet, JSONL, JSON, Arrow, CSV or TSV with id, query, passage"
    )
    output: str = runtime_field(description="directory or URI for the published records")
    journal: str | None = runtime_field(None, description="directory or URI of the journal; null: OUTPUT/journal")
    journal_upload_s: float = runtime_field(60.0, gt=0, description="seconds between uploads of a journal in a store")
    replay: tuple[InputPath, ...] = runtime_field((), description="finished journals to read: files or directories")
    columns: dict[str, str] = Field({}, description="field of a seed -> its column in the file")
    split: str | None = Field(None, description="only seeds of this split: their column `split`, or their file's name")
    limit: int | None = Field(None, ge=1, description="use only the first N seeds")
    generator: ChatModel = Field(ChatModel(model="gpt-4o-mini"), description="model for instructions and negatives")
    judge: ChatModel = Field(ChatModel(model="o4-mini"), description="model that judges the scenarios")
    cheap_judge: CheapJudge | None = Field(None, description="model that judges first; null: only `judge`")
    steps: dict[str, ChatModel] = Field({}, description="step -> its model, such as judge_positive: {model: gpt-5}")
    prompts: str | None = runtime_field(None, description="directory or URI of prompt files that replace bundled ones")
    endpoint: Endpoint = runtime_field(Endpoint(), description="API of the models")
    batches: Batches | None = runtime_field(None, description="{}: the Batch API of `endpoint`; null: online")
    limits: Limits = runtime_field(Limits(), description="limits of all actors together")
    prices: str | None = runtime_field(None, description="path or URI of a YAML file like llm/prices.yaml")
    max_dead_letters: float = runtime_field(
        0.1,
        ge=0,
        le=1,
        description="maximum share of the seeds that may become dead letters; with more, the run publishes nothing and exits with status 2",
    )
    distractors: int = Field(4, ge=0, description="random passages that the judge sees with the three candidates")
    seed: int = Field(0, description="random seed of the distractors and of the order of the candidates")
    complement: bool = Field(False, description="also write an instruction that makes the hard negative the positive")
    shared_prefix: bool = Field(
        False,
        description="put the texts that a row's requests share first, and show the judge one lineup in all scenarios, so that "
        "a prefix cache can reuse them. The requests change: a journal without it does not answer them",
    )
    in_flight: int = runtime_field(64, ge=1, description="maximum requests in flight per actor")
    actors: int = runtime_field(1, ge=1, description="synthesis actors")
