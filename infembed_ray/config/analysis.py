"""Settings of `infembed analyze` and `infembed agreement`."""

from __future__ import annotations

from pydantic import Field

from infembed_ray.config.base import InputPath, ModelName, RecordsPath, Settings, runtime_field
from infembed_ray.config.llm import ChatModel, Endpoint, JournalUpload, Limits


class AnalyzeGates(Settings):
    """Limits that the records must keep, else the exit status is 1; null: no limit."""

    min_kept: float | None = Field(None, ge=0, le=1, description="least share of the seeds that became records")
    min_records: int | None = Field(None, ge=1, description="least number of records")
    min_judged_right: float | None = Field(
        None, ge=0, le=1, description="least share of the judge's answers that pick the right passage, of each scenario"
    )
    max_near_duplicates: float | None = Field(
        None, ge=0, le=1, description="largest share of a kind's texts that are nearly equal to another"
    )
    max_contaminated: float | None = Field(
        None, ge=0, le=1, description="largest share of a kind's texts that match an evaluation set"
    )


class AnalyzeSettings(Settings):
    """`infembed analyze`: records -> quality report, with comparisons to other sets (paper, section 4.2)."""

    records: RecordsPath = runtime_field(description="a published synthesis output, or a file of InF-IR records")
    output: str = runtime_field(description="directory for the published report")
    label: str = Field("records", description="label of the records in comparisons")
    compare: dict[str, InputPath] = runtime_field(
        {}, description="label -> another set: InF-IR records, or a file with instructions, queries or passages"
    )
    compare_columns: dict[str, str] = Field(
        {}, description="instruction, query or passage -> its column in the other sets"
    )
    encoder: ModelName | None = runtime_field(
        None, description="checkpoint or hub name of the encoder; null: no pairwise similarity and no coverage"
    )
    batch_tokens: int = runtime_field(4096, ge=64, description="tokens per encoding batch, with padding")
    sample: int = Field(10_000, ge=2, description="texts of each kind to draw from each set for diversity and coverage")
    seed: int = Field(0, description="seed of the samples, the bootstrap and the annotators' items")
    agreement: tuple[InputPath, ...] = runtime_field(
        (), description="files of answers to the same items: item_id, and a column per annotator or judge"
    )
    bootstrap: int = Field(2000, ge=100, description="bootstrap resamples for the interval of an agreement")
    annotate: int = Field(0, ge=0, description="number of random items for annotators; 0: none")
    evaluations: dict[str, InputPath] = runtime_field(
        {}, description="label -> a file of an evaluation set whose texts must not be in the records"
    )
    ngram: int = Field(13, ge=2, description="consecutive words that count as an overlap with an evaluation set")
    gates: AnalyzeGates = runtime_field(AnalyzeGates(), description="limits that the records must keep")


class AgreementSettings(Settings):
    """`infembed agreement`: LLM raters answer the annotators' items (paper, section 4.1 and Figure 4)."""

    sheet: InputPath = runtime_field(
        description="file of items: item_id, instruction, query, passages; its other columns are reference raters"
    )
    answers: tuple[InputPath, ...] = runtime_field(
        (), description="files of reference answers to the same items: item_id, and a column per annotator or judge"
    )
    output: str = runtime_field(description="directory or URI for the published report")
    raters: dict[str, ChatModel] = Field(
        min_length=1, description="label -> LLM rater, for example new: {model: gpt-5-mini, max_tokens: 2000}"
    )
    min_kappa: float | None = runtime_field(
        None, ge=-1, le=1, description="exit with status 2 if the mean kappa of an LLM rater is lower; null: no floor"
    )
    max_dead_letters: float = runtime_field(
        0.1,
        ge=0,
        le=1,
        description="largest share of a rater's items that may stay without an answer; with more, the run publishes nothing and exits with status 2",
    )
    bootstrap: int = Field(2000, ge=100, description="bootstrap resamples of the items for the intervals")
    seed: int = Field(0, description="seed of the bootstrap")
    journal: str | None = runtime_field(
        None, description="directory or URI of the response journal; null: OUTPUT/journal"
    )
    journal_upload: JournalUpload = runtime_field(
        JournalUpload(), description="journal in an object store: when answers are uploaded"
    )
    replay: tuple[InputPath, ...] = runtime_field(
        (), description="finished journals (files or directories) that are only read"
    )
    endpoint: Endpoint = runtime_field(Endpoint(), description="serves the models")
    more_endpoints: tuple[Endpoint, ...] = runtime_field(
        (), description="also serve the models: requests are shared by weight, and each stands in for the others"
    )
    limits: Limits = runtime_field(Limits(), description="of all raters together")
    prices: str | None = runtime_field(
        None, description="path or URI of a YAML file like llm/prices.yaml with your own prices, which override it"
    )
    in_flight: int = runtime_field(64, ge=1, description="most requests in flight")


class CleanSettings(Settings):
    """`infembed clean`: records -> records without near-duplicates and without texts of evaluation sets."""

    records: RecordsPath = runtime_field(
        description="a published synthesis output, or a file or directory of InF-IR records"
    )
    output: str = runtime_field(description="directory or URI for the published records")
    near_duplicates: float | None = Field(
        0.7,
        ge=0.5,
        le=1,
        description="remove records of at least this similarity to an earlier one: Jaccard of the word trigrams of positive "
        "instruction, query and passage; null: none",
    )
    evaluations: dict[str, InputPath] = runtime_field(
        {}, description="label -> a file or directory of an evaluation set whose texts must not be in the records"
    )
    ngram: int = Field(13, ge=2, description="consecutive words that count as an overlap with an evaluation set")
