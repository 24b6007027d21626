"""Settings of `infembed pipeline`: one section per stage; what a stage takes from an earlier one is left out."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from infembed_ray.config.analysis import AnalyzeSettings
from infembed_ray.config.base import Settings, filled_in, runtime_field
from infembed_ray.config.evaluation import EvaluateSettings
from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.config.serving import ServeSettings
from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.config.training import TrainSettings

BASE, TRAINED = "base", "trained"
"""Labels of the backbone and of the trained model in the pipeline's evaluation."""
WIRES: dict[str, dict[str, tuple[str, ...]]] = {
    "synthesize": {},
    "analyze": {"records": ("synthesize",)},
    "train": {"records": ("analyze", "synthesize")},
    "evaluate": {"models": ("train",), "records": ("analyze", "synthesize")},
    "index": {"model": ("train",)},
    "serve": {"index": ("index",)},
}
"""Stage, in order -> setting that it leaves out -> the stages that may make its value, the best first."""
HELD_OUT = ("evaluate", "records")
"""Taken only with `evaluate.split`, because records that were trained on are not held out."""


class PipelineSettings(Settings):
    """`infembed pipeline`: stages from seeds to the HTTP API, each from the output of the ones before.

    A stage without `output` publishes in its folder of the pipeline's output. What it takes from an earlier stage is left out.
    """

    output: str = runtime_field(description="directory or URI; each stage publishes into its folder there")
    synthesize: Annotated[SynthesizeSettings, filled_in(output="")] | None = Field(None, description="seeds -> records")
    analyze: Annotated[AnalyzeSettings, filled_in(output="", records="")] | None = Field(
        None,
        description="records -> quality report; `gates` stops the pipeline, `clean` passes on the records that stay",
    )
    train: Annotated[TrainSettings, filled_in(output="")] | None = Field(None, description="records -> checkpoint")
    evaluate: Annotated[EvaluateSettings, filled_in(output="", models={}, gate=TRAINED)] | None = Field(
        None,
        description=f"models (default: `{BASE}`, the backbone, and `{TRAINED}`) -> tables; `gate` (default: `{TRAINED}`) "
        "stops the pipeline",
    )
    index: Annotated[IndexSettings, filled_in(output="", model="")] | None = Field(None, description="corpus -> index")
    serve: Annotated[ServeSettings, filled_in(index="")] | None = Field(None, description="index -> HTTP API")

    @model_validator(mode="after")
    def _complete(self) -> PipelineSettings:
        if not self.stages:
            raise ValueError(f"no stage: give at least one of {', '.join(WIRES)}")
        for stage in self.stages:
            section = getattr(self, stage)
            for setting, makers in WIRES[stage].items():
                given = getattr(section, setting) or getattr(section, "sources", None) or (stage, setting) == HELD_OUT
                if not given and self.maker(stage, setting) is None:
                    raise ValueError(f"{stage}.{setting} is missing: set it, or add the stage {' or '.join(makers)}")
        train, evaluate = self.train, self.evaluate
        if train and train.head == "score":
            raise ValueError("train.head=score: the later stages take an encoder; train a reranker by `infembed train`")
        if evaluate and evaluate.gate and evaluate.models and evaluate.gate not in evaluate.models:
            raise ValueError(f"evaluate.gate={evaluate.gate}: not a label of evaluate.models; give one, or null")
        same_records = train and evaluate and self.maker(*HELD_OUT) and self.maker("train", "records")
        if train and evaluate and same_records and train.split in (None, evaluate.split):
            fault = f"would train on the records of evaluate.split={evaluate.split}; set train.split to another split"
            raise ValueError(f"train.split={train.split or 'null'}: {fault}")
        return self

    @property
    def stages(self) -> list[str]:
        """The stages that the pipeline has, in order."""
        return [stage for stage in WIRES if getattr(self, stage) is not None]

    def maker(self, stage: str, setting: str) -> str | None:
        """Return the stage whose output is the value of a setting; None if the settings give it, or no stage makes it."""
        section = getattr(self, stage)
        if getattr(section, setting) or getattr(section, "sources", None):  # `train.sources` stands for `train.records`
            return None
        if (stage, setting) == HELD_OUT and section.split is None:
            return None
        without = "analyze" if self.analyze and not self.analyze.clean else None  # it makes no records
        return next((made for made in WIRES[stage][setting] if made in self.stages and made != without), None)
