"""Settings of `infembed sweep`."""

from typing import Annotated, Any

from pydantic import Field

from infembed_ray.config.base import ModelName, Settings, filled_in, runtime_field
from infembed_ray.config.evaluation import EvaluateSettings
from infembed_ray.config.training import TrainSettings


class SweepSettings(Settings):
    """`infembed sweep`: objectives x backbones x seeds, trained and evaluated -> one table (paper, Tables 3, 4 and 6)."""

    train: Annotated[TrainSettings, filled_in(model="", output="")] = Field(
        description="settings of every training; a row may change some"
    )
    evaluate: Annotated[EvaluateSettings, filled_in(models={}, output="")] = Field(
        description="settings of every evaluation"
    )
    output: str = runtime_field(description="directory of the published tables; its folder `trials` holds the trials")
    models: dict[str, ModelName] = runtime_field(description="label -> backbone: a directory or a hub name")
    objectives: tuple[str, ...] = Field(
        (),
        description="objectives to train, one table row each; []: the objective of `train`, if there are no variants",
    )
    variants: dict[str, dict[str, Any]] = Field({}, description="label -> fields of `train` to change; a row each")
    seeds: tuple[int, ...] = Field(
        (42,), min_length=1, description="seeds of every row; the table shows mean and standard deviation over them"
    )
    base: bool = Field(True, description="evaluate the untrained backbones too, as the first row")
    concurrent: int = runtime_field(1, ge=1, description="trials that run at the same time")
