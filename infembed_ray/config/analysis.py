"""Settings of `infembed analyze`."""

from __future__ import annotations

from pydantic import Field

from infembed_ray.config.base import Settings, runtime_field


class AnalyzeSettings(Settings):
    """`infembed analyze`: records -> quality report, with comparisons to other sets (paper, section 4.2)."""

    records: str = runtime_field(description="a published synthesis output, or a file of InF-IR records")
    output: str = runtime_field(description="directory for the published report")
    label: str = Field("records", description="label of the records in comparisons")
    compare: dict[str, str] = runtime_field(
        {}, description="label -> another set: InF-IR records, or a file with instructions, queries or passages"
    )
    compare_columns: dict[str, str] = Field(
        {}, description="instruction, query or passage -> its column in the other sets"
    )
    encoder: str | None = runtime_field(
        None, description="checkpoint or hub name of the encoder; null: no pairwise similarity and no coverage"
    )
    batch_tokens: int = runtime_field(4096, ge=64, description="tokens per encoding batch, with padding")
    sample: int = Field(10_000, ge=2, description="texts of each kind to draw from each set for diversity and coverage")
    seed: int = Field(0, description="seed of the samples, the bootstrap and the annotators' items")
    agreement: tuple[str, ...] = runtime_field(
        (), description="files of answers to the same items: item_id, and a column per annotator or judge"
    )
    bootstrap: int = Field(2000, ge=100, description="bootstrap resamples for the interval of an agreement")
    annotate: int = Field(0, ge=0, description="number of random items for annotators; 0: none")
    evaluations: dict[str, str] = runtime_field(
        {}, description="label -> a file of an evaluation set whose texts must not be in the records"
    )
    ngram: int = Field(13, ge=2, description="consecutive words that count as an overlap with an evaluation set")
