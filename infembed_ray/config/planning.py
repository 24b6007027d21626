"""Settings of `infembed plan`."""

from typing import Annotated, Any

from pydantic import Field

from infembed_ray.config.base import Settings
from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.config.training import TrainSettings

Tokens = Annotated[int, Field(ge=1)]


class _WithoutFiles(Settings):
    """Settings of a verb whose inputs and output a plan does without."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for name in {"records", "corpus", "output"} & cls.model_fields.keys():
            cls.model_fields[name].default = ""
        cls.model_rebuild(force=True)


class PlanTrainSettings(_WithoutFiles, TrainSettings):
    """`infembed plan train`: the settings of a training, with one GPU per worker. `train --dry-run` plans for existing records.

    The defaults of `epoch_records` and `tokens` are those of the published set (paper, section 4.1 and Table 1 x 1.35).
    """

    gpu: str = Field("a100-80g", description="a GPU of planning/train.py")
    gpu_usd_per_hour: float | None = Field(None, ge=0, description="price of a GPU with its share of the node")
    epoch_records: int = Field(38_759, ge=1, description="records of an epoch")
    tokens: tuple[Tokens, Tokens, Tokens] = Field((48, 11, 75), description="tokens of instruction, query, passage")
    mfu: float | None = Field(None, gt=0, lt=1, description="share of the peak (MFU) of a step; default: measured")


class PlanIndexSettings(_WithoutFiles, IndexSettings):
    """`infembed plan index`: the settings of an index, and the size of its corpus, which is not read."""

    passages: int = Field(1_000_000, ge=1, description="passages of the corpus")
    passage_tokens: int = Field(75, ge=1, description="mean tokens of a passage")
