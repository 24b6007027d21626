"""Settings of `infembed analyze`."""

from pydantic import Field

from infembed_ray.config.base import InputPath, ModelName, RecordsPath, Settings, runtime_field
from infembed_ray.config.llm import ChatModel, Endpoint, Limits


class AnalyzeGates(Settings):
    """Limits that the records must keep, else the exit status is 1; null: no limit."""

    min_kept: float | None = Field(None, ge=0, le=1, description="minimum share of the seeds that became records")
    min_judged_right: float | None = Field(
        None,
        ge=0,
        le=1,
        description="minimum share of the judge's answers that pick the right passage, of each scenario",
    )


class AgreementSettings(Settings):
    """An agreement study: annotators and LLM raters on the same items (paper, section 4.1 and Figure 4)."""

    files: tuple[InputPath, ...] = runtime_field(
        (),
        description="files of answers to the same items: item_id, and a column per annotator or judge; LLM raters need one "
        "with instruction, query and passages, as annotate=100 writes it",
    )
    raters: dict[str, ChatModel] = Field({}, description="label -> LLM that answers the items")
    endpoint: Endpoint = runtime_field(Endpoint(), description="API of the models")
    limits: Limits = runtime_field(Limits(), description="of all LLM raters together")


class AnalyzeSettings(Settings):
    """`infembed analyze`: records -> quality report, and on request the records that stay (paper, section 4.2)."""

    records: RecordsPath = runtime_field(description="a published synthesis output, or a file of InF-IR records")
    output: str = runtime_field(description="directory or URI for the published report")
    compare: dict[str, InputPath] = runtime_field({}, description="label -> a set with instruction, query or passage")
    encoder: ModelName | None = runtime_field(
        None, description="checkpoint or hub name of the encoder; null: no pairwise similarity and no coverage"
    )
    evaluations: dict[str, InputPath] = runtime_field(
        {}, description="label -> a file or directory of an evaluation set whose texts must not be in the records"
    )
    clean: bool = Field(False, description="publish records without near-duplicates and texts of evaluation sets")
    annotate: int = Field(0, ge=0, description="number of random items for annotators; 0: none")
    agreement: AgreementSettings = Field(AgreementSettings(), description="answers of annotators and LLM raters")
    gates: AnalyzeGates = runtime_field(AnalyzeGates(), description="limits that the records must keep")
