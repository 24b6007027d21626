"""Settings of `infembed mine`."""

from pydantic import Field

from infembed_ray.config.base import IndexPath, RecordsPath, RowSettings, runtime_field
from infembed_ray.config.evaluation import NamedRetriever


class MineSettings(RowSettings):
    """`infembed mine`: hard negatives from an index for training tuples or InF-IR records."""

    records: RecordsPath = runtime_field(description="training tuples or InF-IR records: file, directory or output")
    columns: dict[str, str | tuple[str, ...]] = Field({}, description="field -> its column in the files, or several")
    index: IndexPath = runtime_field(description="output of `infembed index`: passages to mine, and the encoder")
    output: str = runtime_field(description="directory or object-store URI of the published tuples")
    negatives: int = Field(7, ge=1, description="mined negatives per tuple; its own ones stay, before them")
    max_share: float = Field(
        0.95,
        gt=0,
        le=1,
        description="a passage is a false negative from this share of the positive's score (TopK-PercPos of NV-Retriever)",
    )
    teacher: NamedRetriever | None = runtime_field(
        None,
        description="encoder or reranker that judges in place of the index's encoder, as in `models` of `infembed evaluate`; "
        "its scores are written, for distillation",
    )
    workers: int = runtime_field(1, ge=1, description="actors; each holds the index, the encoder and the teacher")
    gpus_per_worker: float = runtime_field(0.0, ge=0, description="GPUs per actor")
