"""Typed settings of every run: a YAML file plus `key=value` overrides; unknown or ill-typed keys are refused.

The settings of a stage are one frozen class each. Every field says what it is, in which unit. A field marked with
`place()` says *where* or *how fast* a step runs; it never changes the result and so is no part of the step's identity
(see `storage.Step`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, ValidationInfo, field_validator

from infembed_ray.errors import InputError

S = TypeVar("S", bound="Settings")

_NAME, _MAPPING = "<name>", "<mapping>"
"""The two forms of what is either a name or a mapping of settings; no part of a field's name."""


def place(default: Any = ..., *, description: str, **bounds: Any) -> Any:
    """A field that says where or how fast a step runs, never what it computes."""
    return Field(default, description=description, json_schema_extra={"identity": False}, **bounds)


class Settings(BaseModel):
    """Frozen, strict settings. Load with `load`, or construct directly from Python."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """Numbers are written as what they are: pydantic alone reads `true` as 1 and `2.0` as the whole number 2."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = set(get_args(annotation)) | {annotation}
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise ValueError("Input should be a number, not true or false")
        if isinstance(value, float) and int in kinds and float not in kinds:
            raise ValueError("Input should be a whole number")
        return value

    @classmethod
    def load(cls: type[S], path: str | None = None, overrides: Sequence[str] = ()) -> S:
        """Read `path` (YAML, may be None) and apply `key=value` overrides, nested keys with dots.

        Raises:
            InputError: the file is missing or no mapping, an override has no `=`, a key is unknown (the nearest
                valid name is given) or a value is of the wrong type.
        """
        values: dict[str, Any] = {}
        if path is not None:
            file = Path(path)
            if not file.is_file():
                raise InputError(f"--config {path}: no such file; give a YAML file of {cls.__name__} fields")
            try:
                loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
            except yaml.YAMLError as error:
                raise InputError(f"--config {path}: not valid YAML ({_one_line(error)})") from error
            if loaded is not None and not isinstance(loaded, dict):
                raise InputError(f"--config {path}: must hold `key: value` lines, found {type(loaded).__name__}")
            values = loaded or {}
        for override in overrides:
            key, separator, text = override.partition("=")
            if not separator or not key:
                raise InputError(f"override {override!r}: write it as key=value, for example seed=1")
            _set(values, key.split("."), _scalar(text), override)
        return cls.of(values, where=f"--config {path}" if path else "settings")

    @classmethod
    def of(cls: type[S], values: dict[str, Any], where: str = "settings") -> S:
        """Validate a mapping; InputError (one line, all faults) if it does not fit."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            faults = "; ".join(_fault(cls, fault) for fault in error.errors(include_url=False))
            raise InputError(f"{where}: {faults}") from error

    def identity(self) -> dict[str, Any]:
        """The part of the settings that decides the result, as plain JSON values."""
        kept: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("identity") is False:
                continue
            value = getattr(self, name)
            kept[name] = _plain(value)
        return kept


def _plain(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.identity()
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _scalar(text: str) -> Any:
    """An override's value by YAML's rules, so `2`, `true`, `null` and `[a, b]` mean what they do in the file."""
    try:
        return yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        return text


def _set(values: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    for key in keys[:-1]:
        inner = values.setdefault(key, {})
        if not isinstance(inner, dict):
            raise InputError(f"override {override!r}: {key} is a single value, it has no fields")
        values = inner
    values[keys[-1]] = value


def _settings_class(annotation: Any) -> type[Settings] | None:
    """The settings that a field holds: itself, or in a union or mapping."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return annotation
    return next(filter(None, map(_settings_class, get_args(annotation))), None)


def nearest(name: str, valid: Iterable[str]) -> str:
    """`did you mean X?`, or the list of valid names where none is near."""
    valid = list(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"valid: {', '.join(sorted(valid))}"


def _fault(cls: type[Settings], fault: Any) -> str:
    location = [str(part) for part in fault["loc"] if part not in (_NAME, _MAPPING)]
    name = ".".join(location)
    if fault["type"] == "extra_forbidden":
        owner: type[Settings] = cls
        for part in location[:-1]:
            inner = _settings_class(owner.model_fields[part].annotation) if part in owner.model_fields else None
            owner = inner or owner
        return f"unknown key {name}: {nearest(location[-1], owner.model_fields)}"
    if fault["type"] == "missing":
        return f"{name} is missing: set {name}=..."
    return f"{name}={fault['input']!r}: {fault['msg']}"


# ------------------------------------------------------------------------------------------------- synthesis


class ChatModel(Settings):
    """One LLM of the synthesis pipeline and how it is asked."""

    model: str = Field(description="model id at the endpoint, for example gpt-4o-mini; recorded in the provenance")
    temperature: float | None = Field(
        None, ge=0, le=2, description="sampling temperature; null: not sent (reasoning models)"
    )
    max_tokens: int | None = Field(None, ge=1, description="most completion tokens of an answer; null: not sent")
    reasoning_effort: str | None = Field(None, description="low, medium, high, ... of reasoning models; null: not sent")
    structured: bool = Field(
        False, description="answers in JSON by a strict schema, where the endpoint has them; false: as labelled text"
    )


class Endpoint(Settings):
    """An OpenAI-compatible endpoint."""

    base_url: str = place(
        "https://api.openai.com/v1", description="URL up to /v1; of Azure OpenAI (api_version set), the resource's URL"
    )
    api_key_env: str | None = place(
        "OPENAI_API_KEY",
        description="environment variable that holds the key, on every node; null: endpoint needs none",
    )
    api_version: str | None = place(
        None, description="Azure OpenAI: its api-version, for example 2024-10-21; null: any other endpoint"
    )
    deployments: dict[str, str] = place(
        {}, description="Azure OpenAI: model -> name of its deployment, where that is not the model's own"
    )
    idempotency_header: str | None = place(
        None,
        description="header to send a request's journal key in, where the endpoint, or a gateway before it, answers a "
        "repeated key from memory, for example Idempotency-Key; null: none",
    )
    weight: float = place(1.0, gt=0, description="share of the requests, beside the weights of the other endpoints")
    timeout_s: float = place(120.0, gt=0, description="seconds until one request is given up and retried")
    max_retries: int = place(6, ge=0, description="retries of 5xx and time-outs before the row is a dead letter")
    patience_s: float = place(
        600.0,
        ge=0,
        description="seconds for which a request that is answered 429, or told to wait, is tried again before it counts "
        "as lost",
    )


class Limits(Settings):
    """What all actors of a run together may ask of their endpoints; null: as much as they like."""

    requests_per_minute: int | None = place(None, ge=1, description="requests sent, answered or not")
    tokens_per_minute: int | None = place(None, ge=1, description="tokens of prompts and answers")
    in_flight: int | None = place(None, ge=1, description="requests in flight; null: actors x in_flight")
    budget_usd: float | None = place(
        None, ge=0, description="most USD at list prices, for all that this journal ever holds; its use ends the run"
    )
    window_s: float = place(
        60.0, gt=0, description="no window of so many seconds holds more than its part of a minute's limits"
    )


class Batches(Settings):
    """How a run uses the Batch API, at half the price; what a row needs comes in up to ten waves of batches.

    Limits a minute do not apply to batches, which have a quota of their own; the budget does, at the worst case of each
    batch that is out.
    """

    max_requests: int = place(50_000, ge=1, le=50_000, description="most requests of one batch")
    poll_s: float = place(30.0, gt=0, description="seconds between two looks at a batch")
    patience_h: float | None = place(
        None, gt=0, description="hours after which a batch is cancelled and the rest asked online; null: 24 at OpenAI"
    )


SeedFormat = Literal["table", "msmarco", "robust04", "leetcode", "metamath"]


class SynthesizeSettings(Settings):
    """`infembed synthesize`: seeds -> InF-IR records (paper, section 4)."""

    seeds: str = place(
        description="a file, or a directory of files: Parquet, JSONL, JSON, CSV or TSV with id, query, passage"
    )
    format: SeedFormat = Field(
        "table", description="of the seeds: table, or how msmarco (v2.1), robust04, leetcode or metamath is published"
    )
    output: str = place(description="directory for the published records")
    journal: str | None = place(None, description="directory of the response journal; null: OUTPUT/journal")
    replay: tuple[str, ...] = place(
        (), description="finished journals (files or directories) to read first, never written"
    )
    columns: dict[str, str] = Field({}, description="format=table: our column name -> the name in the seeds file")
    split: str | None = Field(None, description="only seeds of this split: their column `split`, or their file's name")
    passage_words: int | None = Field(None, ge=1, description="cut seeds' passages after N words; null: whole")
    limit: int | None = Field(None, ge=1, description="take only the first N seeds")
    generator: ChatModel = Field(
        ChatModel(model="gpt-4o-mini", temperature=1.0), description="writes instructions, negatives"
    )
    judge: ChatModel = Field(ChatModel(model="o4-mini"), description="judges the three scenarios")
    steps: dict[str, ChatModel] = Field(
        {}, description="step -> the model that does it instead, for example judge_positive: {model: gpt-5}"
    )
    endpoint: Endpoint = place(Endpoint(), description="where the models are served")
    more_endpoints: tuple[Endpoint, ...] = place(
        (), description="others that serve them too: requests are shared by weight, and each stands in for the others"
    )
    batches: Batches | None = place(
        None, description="{}: ask `endpoint` by its Batch API first, the rest online; null: all online"
    )
    limits: Limits = place(Limits(), description="of all actors together")
    prices: str | None = place(None, description="YAML like synthesis/prices.yaml, read over it: your own prices")
    distractors: int = Field(4, ge=0, description="random passages shown to the judge beside the three candidates")
    seed: int = Field(0, description="seed of the distractors and of the order of the candidates")
    complement: bool = Field(
        False, description="also write, for each kept record, an instruction that makes its hard negative the positive"
    )
    in_flight: int = place(64, ge=1, description="most requests in flight per actor")
    actors: int = place(1, ge=1, description="synthesis actors")


# -------------------------------------------------------------------------------------------------- training

Template = Literal["instruction_first", "query_first", "instruct_query"]
Pooling = Literal["auto", "last", "mean", "cls"]
Variable = Literal["P", "I", "IQ", "PIQ"]
IQNegatives = Literal["kk", "ik"]
Interaction = Literal["joint", "cross_attention"]


class Lora(Settings):
    """Low-rank adapters instead of training all weights; merged into the weights on export."""

    rank: int = Field(16, ge=1, description="of the change of a weight matrix")
    alpha: float = Field(32.0, gt=0, description="the change is scaled by alpha / rank")
    dropout: float = Field(0.05, ge=0, lt=1, description="on what the adapters read")
    target_modules: tuple[str, ...] = Field((), description="names of the linear layers with adapters; []: all")
    quantized: bool = Field(False, description="the backbone in 4 bits (QLoRA); on GPUs only, with bitsandbytes")


class Offload(Settings):
    """Where DeepSpeed keeps what a GPU has no room for; null: on the GPU."""

    optimizer: Literal["cpu"] | None = place(None, description="the optimizer's states and fp32 weights")
    parameters: Literal["cpu", "nvme"] | None = place(None, description="the parameters, under ZeRO-3, between uses")
    nvme_path: str | None = place(None, description="directory on every node's own disk, for nvme")


class Anomalies(Settings):
    """What becomes of a step that goes wrong. `skip`: no update is made; `stop`: the run ends, its last state kept."""

    nonfinite: Literal["skip", "stop"] = place("stop", description="the loss or the gradient norm is infinite or NaN")
    no_negatives: Literal["warn", "skip", "stop"] = Field("warn", description="no row of the step has any negative")
    spike_factor: float | None = Field(
        None, gt=1, description="a loss above so many medians of the 50 before is a spike; null: none is"
    )
    spike: Literal["warn", "skip", "stop"] = Field("warn", description="what becomes of a spike")

    def identity(self) -> dict[str, Any]:
        """A run that stops publishes nothing: one that was told to and got through is what a warned one is."""
        return {name: "warn" if value == "stop" else value for name, value in super().identity().items()}


class Validation(Settings):
    """Evaluation on held-out records during training, as by `infembed evaluate`."""

    records: str = place(description="InF-IR records that are not trained on, as for training")
    split: str | None = Field(None, description="only rows whose column `split` has this value")
    distractors: str | None = place(None, description="passages that answer nothing, as for `infembed evaluate`")
    max_distractors: int = Field(1000, ge=0, description="the first N of the distractors are added to the corpus")
    every: int = Field(50, ge=1, description="steps between evaluations; there is always one after the last step")
    metric: Literal["p_mrr", "ndcg_at_10"] = Field("p_mrr", description="the score: its best state is exported")
    patience: int | None = Field(
        None, ge=1, description="evaluations without a better score after which the training ends; null: it never does"
    )


TEMPERATURES = (0.01, 1.0)
"""Bounds of a learned temperature; the lower one is CLIP's: no logit above 100."""


class TrainSettings(Settings):
    """`infembed train`: records + a backbone -> a checkpoint (paper, section 5)."""

    records: str = place(
        description="InF-IR records: JSONL or Parquet file, a directory of such files, or a published synthesis output"
    )
    model: str = place(description="backbone: a local directory, an object-store URI or a hub name")
    output: str = place(description="directory, or object-store URI, for the published checkpoint")
    split: str | None = Field(None, description="only rows whose column `split` has this value")
    objective: str = Field(
        "multi{P,I}",
        description="uni{...} or multi{...} over P, I, IQ (Eq. 8-21); nce{PIQ}: all three at once (Eq. 1), small batches",
    )
    count_positive_once: bool = Field(
        True,
        description="multi: the positive once in the denominator (official code), not once per variable (Eq. 18-21)",
    )
    temperature: float = Field(0.05, gt=0, description="similarities are divided by it")
    temperature_learned: bool = Field(False, description="train the temperature too, within 0.01 and 1")
    temperature_learning_rate: float = Field(5e-3, gt=0, description="peak of the learned temperature's logit")
    term_weights: dict[Variable, Annotated[float, Field(gt=0)]] = Field(
        {}, description="variable -> weight of its cross-entropy (uni) or of its sum in the denominator (multi); else 1"
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="share of the target that goes evenly to all candidates of a softmax"
    )
    instruction_negatives: int | None = Field(
        5,
        ge=0,
        description="I-negatives per row, the record's own poisoned instruction first, the rest sampled from all workers'; "
        "null: all instructions of the worker's own records",
    )
    iq_negatives: IQNegatives = Field(
        "kk",
        description="IQ-negatives: kk, other rows' pairs (Eq. 10-21); ik, other queries, same instruction (Eq. 6-7)",
    )
    same_tower_negatives: bool = Field(
        False, description="similarities to other rows' instruction-query pairs join the negatives of P (SamToNe)"
    )
    teacher: str | None = place(
        None, description="frozen encoder (directory or hub name) that finds false negatives among other records' texts"
    )
    teacher_margin: float = Field(
        0.0, ge=0, description="a candidate is no negative if its teacher similarity >= the positive's - margin"
    )
    template: Template | None = Field(
        None, description="how instruction and query become one text (Eq. 3); null: the model's, else instruction_first"
    )
    interaction: Interaction | None = Field(
        None,
        description="joint: instruction and query as one text (Eq. 3); cross_attention: each encoded apart (Eq. 4); null: "
        "the model's, else joint",
    )
    pooling: Pooling = Field(
        "auto", description="auto: what the model directory says, else mean for encoders, last for decoders"
    )
    query_length: int | None = Field(
        None, ge=8, description="most tokens of instruction + query; null: the model's, else 256"
    )
    passage_length: int | None = Field(None, ge=8, description="most tokens of a passage; null: the model's, else 512")
    query_prefix: str | None = Field(
        None, description="before instruction and query, for example e5's 'query: '; null: the model's, else none"
    )
    passage_prefix: str | None = Field(None, description="before a passage; null: the model's, else none")
    append_eos: bool | None = Field(
        None, description="end texts with EOS; null: as the model does, or for last pooling of a plain decoder"
    )
    bidirectional: bool | None = Field(
        None, description="let a decoder's tokens attend in both directions; null: as its config says"
    )
    share_encoder: bool | None = Field(
        None, description="one encoder for queries and passages, or two (false); null: the model's, else one"
    )
    lora: Lora | None = Field(None, description="{}: train low-rank adapters only; null: all weights")
    matryoshka: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), description="dimensions that are to serve as embeddings too: the loss is the mean over them"
    )
    epochs: int = Field(2, ge=1, description="passes over the records")
    records_per_step: int = Field(8, ge=1, description="records (of 3 tuples each) per step, over all workers")
    mixture: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {},
        description="source -> weight: the shares of the records' sources in an epoch of the same size; {}: as they are",
    )
    unique_texts: bool = Field(
        False, description="keep records with the same instruction, query or passage out of one another's batch"
    )
    tokens_per_step: int | None = Field(
        None, ge=64, description="most tokens (of the records' own tuples) per step instead of records_per_step"
    )
    grad_cache_tokens: int | None = Field(
        None, ge=16, description="most tokens of one forward pass, by GradCache; null: one pass a side, graphs kept"
    )
    workers: int = place(2, ge=1, description="data-parallel workers; they share the records of a step")
    accumulation: int = Field(
        1, ge=1, description="batches that a step's records are divided into; each contrasts within itself"
    )
    learning_rate: float = Field(5e-5, gt=0, description="peak")
    schedule: Literal["linear", "cosine", "constant"] = Field(
        "linear", description="of the learning rate after the warm-up: linear and cosine decay to 0"
    )
    warmup_fraction: float = Field(0.0, ge=0, lt=1, description="share of the steps with linear warm-up")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    anomalies: Anomalies = Field(Anomalies(), description="what becomes of steps that go wrong")
    seed: int = Field(42, description="order of the records, sampled negatives, dropout")
    validation: Validation | None = Field(None, description="evaluation on held-out records; null: none")
    zero_stage: Literal[0, 1, 2, 3] = Field(2, description="DeepSpeed ZeRO stage")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16 keeps fp32 master weights")
    offload: Offload = place(Offload(), description="optimizer states and parameters, off the GPU")
    activation_checkpointing: bool = place(
        False, description="compute activations anew in the backward pass: less memory, about a third more time"
    )
    compile: bool = place(False, description="the backbone's layers by torch.compile: equal but for rounding")
    deepspeed: dict[str, Any] = Field(
        {}, description="merged over the DeepSpeed JSON, which the output holds as deepspeed.json"
    )
    launcher: Literal["ray", "torchrun", "process"] = place(
        "ray", description="torchrun: this very command is run by it; process: here and now, one worker, for debugging"
    )
    gpus_per_worker: float = place(0.0, ge=0, description="GPUs per worker; 0 trains on CPU with gloo")
    cpus_per_worker: float = place(1.0, gt=0, description="CPUs per worker")
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = place(
        "PACK", description="of Ray's workers on nodes: together, or apart; STRICT: or not at all"
    )
    placement_timeout_s: float = place(600.0, gt=0, description="seconds that the cluster may take to make room")
    collective_timeout_s: int = place(1800, ge=1, description="seconds that workers wait for one that is silent")
    max_failures: int = place(
        3,
        ge=0,
        description="times Ray restarts a run from its last state after losing workers; preemptions not counted",
    )
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = place(
        ("tensorboard",),
        description="who shows the log of the run besides; wandb and mlflow find keys and servers as ever",
    )
    checkpoint_every: int = place(50, ge=1, description="steps between resumable checkpoints")
    keep_last: int = place(2, ge=1, description="newest resumable checkpoints that are kept; 2: one may be broken")
    keep_best: int = place(0, ge=0, description="checkpoints with the highest validation scores that are kept besides")

    def identity(self) -> dict[str, Any]:
        """With the workers, where a setting draws negatives from a worker's own share of a step."""
        from_own_share = self.instruction_negatives is None or self.iq_negatives == "ik"
        return super().identity() | ({"workers": self.workers} if from_own_share else {})


class ExportSettings(Settings):
    """`infembed export`: a checkpoint of an encoder backbone -> an ONNX graph, from token ids to unit vectors."""

    model: str = place(description="checkpoint directory or hub name")
    output: str = place(description="directory, or object-store URI, for the published graph")
    dimensions: int | None = Field(None, ge=1, description="of the embeddings (Matryoshka); null: the model's")


# -------------------------------------------------------------------------------------------------- planning


class Hardware(Settings):
    """What a run is planned for. What is null is the device's own, in planning/hardware.yaml."""

    device: str = Field("a100-80g", description="a GPU of planning/hardware.yaml")
    nodes: int = Field(1, ge=1, description="nodes of the cluster")
    gpus_per_node: int = Field(8, ge=1, description="GPUs of a node, one worker each")
    memory_gib: float | None = Field(None, gt=0, description="GiB that a process may use of a GPU's memory")
    host_gib: float | None = Field(None, gt=0, description="GiB of a node's CPU memory")
    nvme_gib: float | None = Field(None, ge=0, description="GiB of a node's own disks")
    peak_tflops: float | None = Field(None, gt=0, description="dense TFLOP/s of a GPU in the run's precision")
    usd_per_gpu_hour: float | None = Field(None, ge=0, description="price of a GPU and its share of the node")


class Mix(Settings):
    """What the records hold, where there are none to look at; lengths in the model's tokens, means over texts.

    The defaults are the published set's: its size (paper, section 4.1), its mean words (Table 1) x 1.35.
    """

    records: int = Field(38_759, ge=1, description="records of an epoch")
    instruction: int = Field(48, ge=1, description="tokens of an instruction")
    query: int = Field(11, ge=1, description="tokens of a query")
    passage: int = Field(75, ge=1, description="tokens of a passage")


class PlanTrainSettings(TrainSettings):
    """`infembed plan train`: a training's own settings, and what it is to run on."""

    records: str = place("", description="the training's; those that are there already are looked at, instead of `mix`")
    output: str = place("", description="the training's")
    hardware: Hardware = Field(Hardware(), description="that it is to run on; it decides the workers")
    mix: Mix = Field(Mix(), description="of texts, where the records are not there yet")
    mfu: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of the peak that these settings were measured to reach; null: an assumption",
    )
    measured: str | None = Field(
        None, description="output of a finished training with these settings, on such GPUs: its MFU is taken"
    )


# ------------------------------------------------------------------------------------------------ evaluation


class Bm25(Settings):
    """How BM25 reads texts and weighs their terms."""

    k1: float = Field(1.5, ge=0, description="how late further occurrences of a term stop counting")
    b: float = Field(0.75, ge=0, le=1, description="how much long documents are held back")
    variant: Literal["lucene", "robertson", "atire"] = Field(
        "lucene", description="of the formula, as bm25s names them"
    )
    stemmer: str | None = Field("english", description="Snowball stemmer, by its language; null: words as they are")
    stopwords: str | None = Field("en", description="bm25s's list of words left out, by its language; null: none")


class EmbeddingApi(Settings):
    """How a remote embedder is asked: journaled, so that no text is paid for twice, and within a budget."""

    protocol: Literal["openai", "cohere"] = Field("openai", description="/embeddings of OpenAI, or /embed of Cohere")
    endpoint: Endpoint = place(Endpoint(), description="where it is, and its key's environment variable")
    limits: Limits = place(Limits(), description="requests and tokens a minute, and the budget")
    journal: str | None = place(None, description="directory of the journal, shared by all runs; null: none is given")
    prices: str | None = place(None, description="YAML file with prices, read over those of the package")
    texts_per_request: int = place(16, ge=1, description="texts of one request; Cohere takes at most 96")
    in_flight: int = place(16, ge=1, description="requests in flight")
    max_characters: int = Field(20_000, ge=1, description="texts are cut here: an API refuses what is too long for it")


RetrieverKind = Literal["encoder", "sentence_transformers", "api", "bm25", "seq2seq", "classifier", "causal", "random"]


class RetrieverSettings(Settings):
    """One retriever of an evaluation: which model it is, and how it is asked.

    A format is a text with places: `{query}`, `{instruction}` (that of the query) and `{passage}`.
    """

    baseline: str | None = place(
        None, description="entry of the baselines whose values stand for those that are not given; null: none"
    )
    kind: RetrieverKind = Field(
        "encoder",
        description="encoder: through InstructionEncoder; sentence_transformers: through that library, for models of "
        "other modules; api: a remote embedder; bm25; rerankers: seq2seq (monoT5), classifier (monoBERT), causal "
        "(FollowIR); random: a reranker by chance",
    )
    model: str | None = place(None, description="checkpoint directory, hub name, or the API's model id")
    revision: str | None = Field(None, description="commit of a hub's model; null: the newest")
    adapter: str | None = place(None, description="LoRA adapters over `model`: directory or hub name; null: none")
    adapter_revision: str | None = Field(None, description="commit of a hub's adapters; null: the newest")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="precision of the model")
    instructed_query: str | None = Field(
        None, description="format of a query under an instruction; null: the checkpoint's own template"
    )
    plain_query: str | None = Field(None, description="format of a query without one; null: the checkpoint's own")
    passage: str | None = Field(None, description="format of a passage; null: the checkpoint's own")
    template: Template | None = Field(None, description="for checkpoints without one, where no formats are given")
    pooling: Pooling = Field("auto", description="from token states to one vector; auto: as the checkpoint says")
    pool_prompt: bool = Field(
        True,
        description="false: what a format has before the query or passage is attended to, but left out of the mean",
    )
    normalize: bool = Field(True, description="false: sentence_transformers ranks by inner product of what it gives")
    append_eos: bool | None = Field(None, description="end texts with EOS; null: where the last token is pooled")
    bidirectional: bool | None = Field(None, description="let a decoder's tokens attend both ways; null: as it says")
    dimensions: int | None = Field(None, ge=1, description="leading components of the embeddings; null: all")
    query_length: int | None = Field(
        None, ge=1, description="most tokens of a query and its instruction; null: the checkpoint's own; rerankers: any"
    )
    passage_length: int | None = Field(None, ge=1, description="most tokens of a passage; null: the checkpoint's own")
    pair: str | None = Field(
        None,
        description="seq2seq and causal: what the model reads, with {query} (as its formats make it) and {passage}",
    )
    pair_length: int = Field(
        512, ge=8, description="rerankers: most tokens of a pair; the passage is cut, not the query"
    )
    answers: tuple[str, str] | None = Field(
        None, description="seq2seq and causal: the vocabulary's tokens for relevant and for not, in that order"
    )
    bm25: Bm25 = Field(Bm25(), description="of kind bm25")
    api: EmbeddingApi = Field(EmbeddingApi(), description="of kind api")
    seed: int = Field(0, description="of kind random")


NamedRetriever = Annotated[
    Annotated[str, Tag(_NAME)] | Annotated[RetrieverSettings, Tag(_MAPPING)],
    Discriminator(lambda given: _MAPPING if isinstance(given, (dict, RetrieverSettings)) else _NAME),
]
"""A retriever by its name, or as a mapping of settings."""


class EvaluateSettings(Settings):
    """`infembed evaluate`: how the given models retrieve and obey, on benchmarks and on InF-IR records."""

    tasks: tuple[str, ...] = Field(
        (),
        description="tasks or benchmarks of the catalogue (followir/core17, bright), or BEIR-style directories",
    )
    data: str | None = place(None, description="mirror that `infembed data fetch` made; null: the hub")
    records: str | None = place(
        None, description="InF-IR records (JSONL, Parquet or a published synthesis output), as a task of their own"
    )
    models: dict[str, NamedRetriever] = place(
        description="label -> checkpoint directory, hub name or name of a baseline; or a mapping (see RetrieverSettings); "
        "the first one is the baseline of the others"
    )
    output: str = place(description="directory for the published results")
    embeddings: str | None = place(
        None,
        description="directory, seen by all nodes, of what is re-used between tasks and runs: embeddings, scores of pairs; "
        "null: `embeddings` in the output",
    )
    split: str | None = Field(None, description="of the records, only rows whose column `split` has this value")
    distractors: str | None = place(
        None, description="passages that answer none of the records: JSONL or Parquet with id and passage or text"
    )
    max_distractors: int = Field(1000, ge=0, description="the first N of the distractors are added to the corpus")
    template: Template = Field("instruction_first", description="for models that carry none")
    depth: int = Field(1000, ge=1, description="most documents of a ranking")
    first_stage: str | None = Field(
        None, description="label of the model whose best documents rerankers rank where a task names none"
    )
    rerank: int = Field(100, ge=1, description="how many of the first stage's documents rerankers rank")
    batch_tokens: int = place(4096, ge=64, description="padded tokens per encoding batch")
    actors: int = place(1, ge=1, description="encoding actors")
    gpus_per_actor: float = place(0.0, ge=0, description="GPUs per encoding actor, and per search")


class ReportSettings(Settings):
    """`infembed report`: published results -> the paper's tables and figures, beside the paper's own numbers."""

    results: dict[str, str] = place(description="label -> published output of `infembed evaluate` or `infembed sweep`")
    output: str = place(description="directory for the published report")
    rows: dict[str, str] = Field(
        {},
        description="model -> the row of Tables 2 and 5 it stands for, where it is not called so; e.g. InF-Embed (e5-base-v2)",
    )
    baseline: str | None = Field(
        None,
        description="model that all others are compared with; null: the first of the same output, in a sweep the backbone",
    )
    unfiltered: tuple[str, ...] = Field(
        (), description="labels of results whose models were trained without the quality filter (Figure 6)"
    )


# ---------------------------------------------------------------------------------------------------- sweeps


class SweepTraining(TrainSettings):
    """What all trainings of a sweep have in common."""

    model: str = place("", description="given by the sweep's `models`")
    output: str = place("", description="given by the sweep's `output`")


class SweepEvaluation(EvaluateSettings):
    """How all models of a sweep are evaluated."""

    models: dict[str, NamedRetriever] = place({}, description="given by the sweep")
    output: str = place("", description="given by the sweep's `output`")


class SweepSettings(Settings):
    """`infembed sweep`: objectives x backbones x seeds, trained and evaluated -> one table (paper, Tables 3, 4 and 6)."""

    train: SweepTraining = Field(description="settings of every training, but for what the rows change")
    evaluate: SweepEvaluation = Field(description="settings of every evaluation")
    output: str = place(description="directory for the published tables; trials lie in its folder `trials`")
    models: dict[str, str] = place(description="label -> backbone: a directory or a hub name")
    objectives: tuple[str, ...] = Field(
        (), description="rows of the table; []: the one of `train`, if there are no variants"
    )
    grid: dict[str, tuple[Any, ...]] = Field(
        {}, description="field of `train` -> values: every objective is trained with all combinations, a row each"
    )
    variants: dict[str, dict[str, Any]] = Field(
        {}, description="label -> fields of `train` that differ: further rows, one training design each"
    )
    seeds: tuple[int, ...] = Field(
        (42,), min_length=1, description="of every row: the table gives mean and spread over them"
    )
    base: bool = Field(True, description="the first row is that of the backbones as they are")
    concurrent: int | None = place(None, ge=1, description="most trials at once; null: as the cluster has room for")


# ----------------------------------------------------------------------------------------- retrieval, serving


FieldType = Literal["string", "integer", "number", "boolean", "date"]
"""Of a metadata column; a date is written as in ISO 8601."""


class IndexSettings(Settings):
    """`infembed index`: checkpoint + corpus -> FAISS shards with their passages."""

    corpus: str = place(
        description="passages: JSONL, Parquet or CSV with id and text (or passage); a file, a directory or an object-store URI"
    )
    columns: dict[str, str] = Field({}, description="our column name -> the name in the corpus file")
    metadata: dict[str, FieldType] = Field(
        {}, description="further columns of the corpus that searches return and filter by -> their type"
    )
    model: str = place(description="checkpoint directory or hub name of the encoder")
    output: str = place(description="directory for the published index")
    shards: int = Field(2, ge=1, description="index shards; passages are dealt out by id")
    dimensions: int | None = Field(None, ge=1, description="of the embeddings (Matryoshka); null: the model's")
    factory: str | None = Field(
        None,
        description="of every shard, as faiss.index_factory spells it; null: chosen by count, dimension and memory",
    )
    memory_gib: float | None = Field(
        None, gt=0, description="most memory of a shard's vectors while it is searched; null: no limit"
    )
    recall_floor: float = Field(
        0.95, ge=0, le=1, description="recall@10 against exact search below which nothing is published"
    )
    batch_tokens: int = place(4096, ge=64, description="padded tokens per encoding batch")
    actors: int = place(1, ge=1, description="encoding actors")
    gpus_per_actor: float = place(0.0, ge=0, description="GPUs per encoding actor")
    cpus_per_shard: float = place(
        1.0, gt=0, description="CPUs per task that builds a shard, and its threads; graphs of several differ by the run"
    )
    gpus_per_shard: float = place(
        0.0, ge=0, description="GPUs per task that builds a shard; centroids differ from those that CPUs find"
    )


class CompactSettings(Settings):
    """`infembed index compact`: an index and the changes made to it since -> its next version."""

    index: str = place(description="the output directory of `infembed index`; or a version of it")
    factory: str | None = Field(
        None,
        description="of every shard from now on, as faiss.index_factory spells it; auto: chosen; null: as the index has it",
    )
    memory_gib: float | None = Field(
        None, gt=0, description="most memory of a shard's vectors from now on; null: as the index has it"
    )
    recall_floor: float | None = Field(
        None,
        ge=0,
        le=1,
        description="recall@10 below which nothing is published, from now on; null: as the index has it",
    )
    cpus_per_shard: float = place(1.0, gt=0, description="CPUs per task that builds a shard, and its threads")
    gpus_per_shard: float = place(0.0, ge=0, description="GPUs per task that builds a shard")


class ServeSettings(Settings):
    """`infembed serve`: checkpoint + index -> HTTP API on Ray Serve."""

    index: str = place(description="a published index")
    model: str | None = place(None, description="encoder; null: the one the index was built with")
    model_name: str | None = Field(
        None, description="the model's name in the API; null: its hub name, or its directory's name"
    )
    host: str = Field("127.0.0.1", description="address to bind; anything but loopback needs API keys")
    port: int = Field(8000, ge=1, le=65535, description="HTTP port")
    api_keys_env: str | None = Field(
        "INFEMBED_API_KEYS", description="environment variable with comma-separated API keys; unset: open"
    )
    api_keys_file: str | None = Field(
        None, description="file of hashed API keys, as `infembed key` writes it; read again when it changes"
    )
    ha_proxy: bool = Field(
        False, description="HAProxy before the ingress: several times the throughput; it listens on all interfaces"
    )
    ingress_replicas: int = Field(1, ge=1, description="replicas of the HTTP API")
    encoder_replicas: int = Field(1, ge=1, description="replicas of the encoder")
    max_encoder_replicas: int | None = Field(
        None, ge=1, description="as many when there is much to do, encoder_replicas when there is little; null: fixed"
    )
    shard_replicas: int = Field(1, ge=1, description="replicas of every shard")
    gpus_per_encoder: float = Field(0.0, ge=0, description="GPUs per encoder replica")
    cpus_per_encoder: float = Field(1.0, gt=0, description="CPUs per encoder replica, and its threads")
    gpus_per_shard: float = Field(0.0, ge=0, description="GPUs per shard replica, to search on (faiss-gpu)")
    cpus_per_shard: float = Field(0.1, gt=0, description="CPUs per shard replica; at least one thread each")
    runtime: Literal["auto", "torch", "onnx"] = Field(
        "auto", description="what runs the encoder; auto: ONNX Runtime on CPUs where it is equal and faster"
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the encoder's weights and activations")
    prefix_cache_mib: int = Field(
        256, ge=0, description="memory of an encoder replica for encoded instructions, of causal backbones; 0: none"
    )
    batch_tokens: int = Field(4096, ge=64, description="most tokens of an encoding batch; fewer where that is as fast")
    max_queue: int = Field(512, ge=1, description="texts waiting per encoder replica before 429")
    request_timeout_s: float = Field(30.0, gt=0, description="after which a request is answered 504")
    max_body_mib: float = Field(8.0, gt=0, description="of a request; more is answered 413")
    writable: bool = Field(True, description="may documents be put and deleted through the API?")
    config_file: str | None = place(
        None, description="write a config file for `serve deploy` there and start nothing; null: serve"
    )
    wait: bool = place(True, description="stay in the foreground until interrupted; false: leave it running and return")


class PlannedCollection(Settings):
    """What an index is planned for."""

    passages: int = Field(1_000_000, ge=1, description="passages of the corpus")
    passage_tokens: int = Field(75, ge=1, description="the model's tokens of a passage, mean")
    passage_bytes: int = Field(400, ge=1, description="bytes of a passage's text and metadata, mean")
    matryoshka: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), description="fewer dimensions that the model was trained to be cut to; []: none, so none is chosen"
    )
    node: str | None = Field(None, description="a CPU node of planning/hardware.yaml; null: whichever is cheapest")
    tokens_per_s: float | None = Field(
        None, gt=0, description="that a GPU was measured to encode; null: an assumed share of its peak"
    )


class PlanIndexSettings(PlannedCollection, IndexSettings):
    """`infembed plan index`: an index' own settings, and how much it is to hold."""

    corpus: str = place("", description="the index'")
    output: str = place("", description="the index'")
    shards: int = Field(0, ge=0, description="of the index; 0: as few as fit")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="that the encoder computes in")
    hardware: Hardware = Field(Hardware(), description="GPUs that are to encode the corpus")


class PlanServeSettings(PlannedCollection, ServeSettings):
    """`infembed plan serve`: the API's own settings, and what it is to bear."""

    index: str = place("", description="one that is there already is planned for as it is, instead of `passages`")
    shards: int = Field(0, ge=0, description="of the index; 0: as few as fit, or more where that is faster")
    dimensions: int | None = Field(None, ge=1, description="of the index; null: the model's, or one of `matryoshka`")
    factory: str | None = Field(None, description="of every shard, as faiss.index_factory spells it; null: any")
    recall_floor: float = Field(0.95, ge=0, le=1, description="least recall@10 against exact search")
    qps: float = Field(50.0, gt=0, description="searches a second, at the busiest hour")
    p99_ms: float = Field(250.0, gt=0, description="milliseconds within which 99 of 100 searches are answered")
    query_tokens: int = Field(59, ge=1, description="the model's tokens of an instruction with its query, mean")
    least_replicas: int = Field(2, ge=1, description="of everything, so that one may fail")
    device: str = Field("l40s-48g", description="a GPU of planning/hardware.yaml, where GPUs are considered")


# -------------------------------------------------------------------------------------------------- analysis


class AnalyzeSettings(Settings):
    """`infembed analyze`: records -> quality report, beside other sets (paper, section 4.2)."""

    records: str = place(description="a published synthesis output, or a file of InF-IR records")
    output: str = place(description="directory for the published report")
    label: str = Field("records", description="what the records are called beside other sets")
    compare: dict[str, str] = place(
        {}, description="label -> another set: InF-IR records, or a file with instructions, queries or passages"
    )
    compare_columns: dict[str, str] = Field(
        {}, description="instruction, query or passage -> the column of the other sets that holds it"
    )
    encoder: str | None = place(
        None, description="checkpoint or hub name that embeds the texts; null: no pairwise similarity, no coverage"
    )
    batch_tokens: int = place(4096, ge=64, description="padded tokens per encoding batch")
    sample: int = Field(10_000, ge=2, description="texts of a kind that are drawn from each set for its diversity")
    seed: int = Field(0, description="seed of the samples, the bootstrap and the annotators' items")
    agreement: tuple[str, ...] = place(
        (), description="files of answers to the same items: item_id, and a column for each annotator or judge"
    )
    bootstrap: int = Field(2000, ge=100, description="resamples for the interval of an agreement")
    annotate: int = Field(0, ge=0, description="write a sheet of N random items for annotators; 0: none")
    evaluations: dict[str, str] = place(
        {}, description="label -> a file of texts of an evaluation that must not be in the records"
    )
    ngram: int = Field(13, ge=2, description="words that a record's text and an evaluation's must share in a row")
