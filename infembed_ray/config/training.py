"""Settings of `infembed train` and `infembed export`."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from infembed_ray.config.base import InputPath, ModelName, RecordsPath, RowSettings, Settings, runtime_field

Template = Literal["instruction_first", "query_first", "instruct_query"]
PoolingMode = Literal["last", "mean", "cls"]
Pooling = Literal["auto", "last", "mean", "cls"]
Variable = Literal["P", "I", "IQ", "PIQ"]
IQNegatives = Literal["kk", "ik"]
Interaction = Literal["joint", "cross_attention"]


class Lora(Settings):
    """Low-rank adapters (LoRA) instead of training all weights; merged into the weights on export."""

    rank: int = Field(16, ge=1, description="rank of the update of a weight matrix")
    alpha: float = Field(32.0, gt=0, description="the update is scaled by alpha / rank")
    dropout: float = Field(0.05, ge=0, lt=1, description="dropout on the input of the adapters")
    target_modules: tuple[str, ...] = Field((), description="names of the linear layers with adapters; []: all")
    quantized: bool = Field(False, description="quantize the backbone to 4 bits (QLoRA); needs a GPU and bitsandbytes")


class Distillation(Settings):
    """Training on a teacher's scores of hard negatives, by the divergence of the softmax over the candidates."""

    weight: float = Field(0.5, gt=0, le=1, description="share of the loss; the objective has the rest")
    teacher_temperature: float = Field(1.0, gt=0, description="divisor of the teacher's scores")


class Source(Settings):
    """One of several sources of training data."""

    path: InputPath = runtime_field(description="InF-IR records or training tuples: file, directory or output")
    columns: dict[str, str | tuple[str, ...]] = Field({}, description="field -> its column in the files, or several")
    split: str | None = Field(None, description="use only rows of this split, by the column `split` or the file")


class ValidationSettings(Settings):
    """Evaluation on held-out records during training, as by `infembed evaluate`."""

    records: RecordsPath = runtime_field(description="held-out InF-IR records, in any format of the training records")
    split: str | None = Field(None, description="use only rows whose column `split` has this value")
    every: int = Field(50, ge=1, description="steps between evaluations; the last step is always evaluated")
    metric: Literal["p_mrr", "ndcg_at_10"] = Field("p_mrr", description="score of a checkpoint; the best is exported")
    patience: int | None = Field(None, ge=1, description="evaluations without a better score before the run stops")


_OF_SCORES = {"objective": "uni{P}", "temperature": 1.0}
"""Defaults with `head=score`."""
_TEXTS = ("append_eos", "passage_prefix", "query_length", "query_prefix", "template")
_VECTORS = ("bidirectional", "interaction", "iq_negatives", "matryoshka", "pooling", "share_encoder", "term_weights")
_OF_EMBEDDINGS = (*_TEXTS, *_VECTORS, "distillation", "instruction_negatives", "interpolation", "lora", "validation")
"""Settings that `head=score` does not take."""


class TrainSettings(RowSettings):
    """`infembed train`: records + a backbone -> a model (paper, section 5)."""

    records: RecordsPath = runtime_field("", description="InF-IR records or training tuples: file, directory or output")
    model: ModelName = runtime_field(description="backbone: a local directory, an object-store URI or a hub name")
    output: str = runtime_field(description="directory or object-store URI of the published model")
    split: str | None = Field(None, description="use only rows whose column `split` has this value")
    sources: dict[str, Source] = Field({}, description="name -> a source, instead of `records`; `mixture` weighs them")
    head: Literal["embedding", "score"] = Field(
        "embedding",
        description="embedding: a retriever; score: a reranker (cross-encoder), by the softmax over a tuple's passages, so "
        "with objective=uni{P}, temperature=1 and no setting of vectors",
    )
    objective: str = Field("multi{P,I}", description="uni{...} or multi{...} of P, I, IQ (Eq. 8-21); nce{PIQ} (Eq. 1)")
    temperature: float = Field(0.05, gt=0, description="temperature: divisor of the similarities")
    term_weights: dict[Variable, Annotated[float, Field(gt=0)]] = Field(
        {}, description="variable -> weight of its cross-entropy (uni) or of its sum in the denominator (multi); else 1"
    )
    instruction_negatives: int | None = Field(
        5,
        ge=0,
        description="I-negatives per row: the record's own poisoned instruction, then sampled ones of all workers; null: "
        "all instructions of the worker's own records",
    )
    hard_negatives: int | None = Field(7, ge=0, description="hard negatives per tuple, drawn at each step; null: all")
    distillation: Distillation | None = Field(None, description="{}: also learn the tuples' teacher scores")
    iq_negatives: IQNegatives = Field(
        "kk",
        description="IQ-negatives: kk, other rows' pairs (Eq. 10-21); ik, other queries, same instruction (Eq. 6-7)",
    )
    template: Template | None = Field(None, description="text of instruction and query (Eq. 3); null: the model's")
    interaction: Interaction | None = Field(
        None,
        description="joint: instruction and query as one text (Eq. 3); cross_attention: encoded separately (Eq. 4); null: "
        "the model's, else joint",
    )
    pooling: Pooling = Field("auto", description="auto: the model's, else mean for encoders and last for decoders")
    query_length: int | None = Field(
        None, ge=8, description="maximum tokens of instruction + query; null: the model's, else 256"
    )
    passage_length: int | None = Field(
        None, ge=8, description="maximum tokens of a passage, of a pair with head=score; null: the model's, or 512"
    )
    query_prefix: str | None = Field(
        None, description="text before instruction and query, for example e5's 'query: '; null: the model's, else none"
    )
    passage_prefix: str | None = Field(None, description="text before a passage; null: the model's, else none")
    append_eos: bool | None = Field(
        None, description="end texts with EOS; null: the model's, else only for last pooling of a plain decoder"
    )
    bidirectional: bool | None = Field(
        None, description="let the tokens of a decoder attend in both directions; null: as in its config"
    )
    share_encoder: bool | None = Field(None, description="one encoder for both sides; null: the model's, or true")
    lora: Lora | None = Field(None, description="{}: train low-rank adapters only; null: train all weights")
    matryoshka: tuple[Annotated[int, Field(ge=1)], ...] = Field((), description="truncated dimensions, trained too")
    epochs: int = Field(2, ge=1, description="passes over the records")
    records_per_step: int = Field(8, ge=1, description="records (3 tuples each) per step, over all workers")
    mixture: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {}, description="source -> weight: shares of the sources in an epoch of the same size; {}: as in the records"
    )
    grad_cache_tokens: int | None = Field(
        None, ge=16, description="maximum tokens of a forward pass, with GradCache; null: one pass per side, without"
    )
    workers: int = runtime_field(2, ge=1, description="data-parallel workers, which share the records of a step")
    learning_rate: float = Field(5e-5, gt=0, description="peak learning rate")
    schedule: Literal["linear", "cosine", "constant"] = Field(
        "linear", description="learning rate after the warm-up; linear and cosine decay to 0"
    )
    warmup_fraction: float = Field(0.0, ge=0, lt=1, description="share of the steps with linear warm-up")
    weight_decay: float = Field(0.0, ge=0, description="weight decay of AdamW")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    interpolation: float = Field(
        1.0,
        gt=0,
        le=1,
        description="published weights: the model's + this x (trained - the model's). Below 1 keeps more of the model's earlier quality",
    )
    seed: int = Field(42, description="seed of the record order, sampled negatives and dropout")
    validation: ValidationSettings | None = Field(None, description="evaluation on held-out records; null: none")
    zero_stage: Literal[0, 1, 2, 3] = Field(2, description="DeepSpeed ZeRO stage")
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="bf16 keeps fp32 master weights; on a GPU they start from weights rounded to bf16"
    )
    offload: Literal["optimizer", "all"] | None = runtime_field(
        None,
        description="what DeepSpeed keeps in CPU memory. optimizer: optimizer states and fp32 weights; all: also the "
        "parameters, under ZeRO-3; null: nothing",
    )
    activation_checkpointing: bool = runtime_field(
        False, description="recompute activations in the backward pass: less memory, about a third more time"
    )
    deepspeed: dict[str, Any] = Field({}, description="additions to the DeepSpeed configuration")
    launcher: Literal["ray", "process"] = runtime_field("ray", description="ray: a cluster; process: one local worker")
    gpus_per_worker: float = runtime_field(0.0, ge=0, description="GPUs per worker; 0: train on CPU with gloo")
    cpus_per_worker: float = runtime_field(1.0, gt=0, description="CPUs per worker")
    max_failures: int = runtime_field(3, ge=0, description="restarts after lost workers; preemptions do not count")
    trackers: tuple[str, ...] = runtime_field(
        ("tensorboard",),
        description="tensorboard, and functions or classes as module:name, which worker 0 calls with every step and its figures",
    )
    checkpoint_every: int = runtime_field(50, ge=1, description="steps between checkpoints")

    @model_validator(mode="before")
    @classmethod
    def _fill_in_head(cls, values: Any) -> Any:
        return _OF_SCORES | values if isinstance(values, dict) and values.get("head") == "score" else values

    @model_validator(mode="after")
    def _fits_its_head(self) -> Self:
        if self.head == "score":
            foreign = [name for name in _OF_EMBEDDINGS if getattr(self, name) != type(self).model_fields[name].default]
            foreign += ["objective"] * (self.objective != _OF_SCORES["objective"])
            if foreign:
                raise ValueError(f"{', '.join(foreign)}: not with head=score; leave out, or set head=embedding")
        return self

    def identity(self) -> dict[str, Any]:
        """Include the number of workers if a setting draws negatives from a worker's own share of a step."""
        from_own_share = self.instruction_negatives is None or self.iq_negatives == "ik"
        return super().identity() | ({"workers": self.workers} if from_own_share else {})


class ExportSettings(Settings):
    """`infembed export`: a model with an encoder backbone -> an ONNX graph from token ids to unit vectors."""

    model: ModelName = runtime_field(description="model directory or hub name")
    output: str = runtime_field(description="directory or object-store URI of the published graph")
