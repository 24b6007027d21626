"""Settings of `infembed plan`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from infembed_ray.config.base import Settings, runtime_field
from infembed_ray.config.pipeline import (
    OR_EARLIER,
    PipelineIndexing,
    PipelineServing,
    PipelineSettings,
    PipelineSynthesis,
    PipelineTraining,
)
from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.config.serving import ServeSettings
from infembed_ray.config.training import TrainSettings


class Hardware(Settings):
    """The GPU cluster of a plan. A null takes the device's figure from planning/hardware.yaml."""

    device: str = Field("a100-80g", description="a GPU of planning/hardware.yaml")
    nodes: int = Field(1, ge=1, description="nodes of the cluster")
    gpus_per_node: int = Field(8, ge=1, description="GPUs per node, one worker each")
    memory_gib: float | None = Field(None, gt=0, description="GiB of a GPU's memory that a process can use")
    host_gib: float | None = Field(None, gt=0, description="GiB of CPU memory per node")
    nvme_gib: float | None = Field(None, ge=0, description="GiB of local disk per node")
    peak_tflops: float | None = Field(None, gt=0, description="dense TFLOP/s of a GPU in the run's precision")
    usd_per_gpu_hour: float | None = Field(None, ge=0, description="price of a GPU and its share of the node")


class Mix(Settings):
    """Size and mean lengths of records that do not exist yet, in tokens of the model.

    The defaults are those of the published set: its size (paper, section 4.1) and its mean words (Table 1) x 1.35.
    """

    records: int = Field(38_759, ge=1, description="records of an epoch")
    instruction: int = Field(48, ge=1, description="tokens of an instruction")
    query: int = Field(11, ge=1, description="tokens of a query")
    passage: int = Field(75, ge=1, description="tokens of a passage")


class PlanTrainSettings(TrainSettings):
    """`infembed plan train`: the settings of a training, and its hardware."""

    records: str = runtime_field("", description="as for training; existing records are read instead of `mix`")
    output: str = runtime_field("", description="as for training")
    hardware: Hardware = Field(Hardware(), description="GPU cluster; it decides the number of workers")
    mix: Mix = Field(Mix(), description="number and lengths of records, if they do not exist yet")
    mfu: float | None = Field(
        None, gt=0, lt=1, description="measured MFU (share of the peak) of these settings; null: assumed"
    )
    measured: str | None = Field(
        None, description="output of a finished training with these settings on such GPUs, whose MFU to take"
    )


class PlannedCollection(Settings):
    """The collection that an index is planned for."""

    passages: int = Field(1_000_000, ge=1, description="passages of the corpus")
    passage_tokens: int = Field(75, ge=1, description="mean tokens of a passage")
    passage_bytes: int = Field(400, ge=1, description="mean bytes of a passage's text and metadata")
    matryoshka: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), description="smaller dimensions that the model was trained for, to be considered as well"
    )
    node: str | None = Field(None, description="a CPU node of planning/hardware.yaml; null: the cheapest")
    tokens_per_s: float | None = Field(
        None, gt=0, description="measured tokens per second that a GPU encodes; null: an assumed share of its peak"
    )


class PlanIndexSettings(PlannedCollection, IndexSettings):
    """`infembed plan index`: the settings of an index, and its size."""

    corpus: str = runtime_field("", description="as for the index")
    output: str = runtime_field("", description="as for the index")
    shards: int = Field(0, ge=0, description="shards of the index; 0: the cheapest number")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="precision of the encoder")
    hardware: Hardware = Field(Hardware(), description="GPU cluster that encodes the corpus")


class PlanServeSettings(PlannedCollection, ServeSettings):
    """`infembed plan serve`: the settings of the API, and its load."""

    index: str = runtime_field("", description="a published index to plan for, instead of `passages`")
    shards: int = Field(0, ge=0, description="shards of the index; 0: the cheapest number that is fast enough")
    dimensions: int | None = Field(
        None, ge=1, description="dimensions of the index; null: those of the model or `matryoshka`"
    )
    factory: str | None = Field(None, description="index type, as faiss.index_factory spells it; null: any")
    recall_floor: float = Field(0.95, ge=0, le=1, description="least recall@10 against exact search")
    qps: float = Field(50.0, gt=0, description="searches per second at peak load")
    p99_ms: float = Field(250.0, gt=0, description="target p99 latency of a search (ms)")
    query_tokens: int = Field(59, ge=1, description="mean tokens of an instruction with its query")
    least_replicas: int = Field(2, ge=1, description="least replicas of every deployment; 2: one may fail")
    device: str = Field("l40s-48g", description="a GPU of planning/hardware.yaml for encoders")


class PlannedSynthesis(PipelineSynthesis):
    """The stage `synthesize` of a planned pipeline."""

    seeds: str = runtime_field("", description="as for the synthesis; not read")
    seed_count: int = Field(100_000, ge=1, description="seeds of the run")
    measured: str | None = Field(
        None, description="canary/forecast.json of a synthesis with these settings; null: published and assumed figures"
    )


class PlannedTraining(PlanTrainSettings, PipelineTraining):
    """The stage `train` of a planned pipeline. `mix.records` is the number that the synthesis keeps, if there is one."""


class PlannedIndexing(PlanIndexSettings, PipelineIndexing):
    """The stage `index` of a planned pipeline."""

    model: str = runtime_field("", description=f"encoder; {OR_EARLIER}")


class PlannedServing(PlanServeSettings, PipelineServing):
    """The stage `serve` of a planned pipeline. Size and layout of the collection are those of the stage `index`."""


class PlanPipelineSettings(PipelineSettings):
    """`infembed plan pipeline`: the settings of a pipeline, the sizes of its data, and its hardware."""

    output: str = runtime_field("", description="as for the pipeline")
    synthesize: PlannedSynthesis | None = Field(None, description="seeds -> records")
    train: PlannedTraining | None = Field(None, description="records + backbone -> checkpoint")
    index: PlannedIndexing | None = Field(None, description="checkpoint + corpus -> index")
    serve: PlannedServing | None = Field(None, description="index -> HTTP API")
    hardware: Hardware = Field(
        Hardware(), description="GPU cluster of training and encoding; train.hardware and index.hardware come first"
    )
    nodes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (1, 2, 4, 8, 16), description="numbers of GPU nodes to compare"
    )
