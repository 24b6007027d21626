"""`infembed train`: check all input, let the workers train, publish the model.

The launcher decides where the workers run:

    ray         Ray Train places them on the cluster and restarts them after failures (`distributed`)
    torchrun    torchrun runs the command itself, once per worker; Ray is not used
    process     this process is the only worker, for debugging

All three give the same records, metrics and model.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from infembed_ray import telemetry
from infembed_ray.config.training import TEMPERATURES, TrainSettings
from infembed_ray.errors import InputError, check_all, in_one_line
from infembed_ray.modeling import hub, model_card
from infembed_ray.modeling.checkpoint import describe, locate
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.progress import counted, say, track
from infembed_ray.records.tuples import TrainingRecord
from infembed_ray.storage.places import Place, address
from infembed_ray.storage.steps import STATES, Published, Staging, Step
from infembed_ray.training import deepspeed_config, overlap, sources
from infembed_ray.training.backbone import load_encoder
from infembed_ray.training.checkpoints.manager import CheckpointManager
from infembed_ray.training.collectives import from_first
from infembed_ray.training.dataset import RECORDS, Dataset
from infembed_ray.training.losses import MOST_JOINT_TEXTS, NCE, Objective
from infembed_ray.training.node_files import UPLOAD_S, fetch, node_directory
from infembed_ray.training.observability import report, trackers
from infembed_ray.training.observability.events import EVENTS, read_events
from infembed_ray.training.observability.metrics import METRICS, read_metrics, read_metrics_from
from infembed_ray.training.sampler import Sampler
from infembed_ray.training.validation import EXPORTED, held_out_files

POLL_S = 0.5
Fit = Callable[[TrainSettings, Sequence[TrainingRecord], Path], None]
"""Let all workers train to the end: settings, records, output that all of them see."""


def run(settings: TrainSettings) -> Published:
    """Train and publish a model; if the same records, model and settings were trained before, return that model.

    Under torchrun it returns in the first process only; the others exit by SystemExit.

    Raises:
        InputError: the settings, the records or the model cannot work (before any work), or training stopped.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if by_torchrun and settings.launcher != "torchrun":
        raise InputError(f"launcher={settings.launcher}: torchrun started this process; set launcher=torchrun")
    if settings.launcher == "torchrun" and not by_torchrun:
        raise InputError("launcher=torchrun: torchrun did not start this process; torchrun --no-python infembed train")
    if settings.launcher == "ray":
        from infembed_ray.training.distributed import fit

        return _run(settings, fit)
    return _run(settings, _train_here) if settings.launcher == "process" else _run_under_torchrun(settings)


def _run(settings: TrainSettings, fit: Fit) -> Published:
    """Resolve the input, check it, train, and publish."""
    inputs, step = prepare(settings)
    hub.create_repository(settings)
    if finished := step.finished():
        return hub.upload(settings, finished)
    encoder = check_model(inputs.settings)
    with step.publish() as staging:
        output = {"output": staging.remote.uri} if staging.remote is not None else {}
        resolved = inputs.settings.model_copy(update=output)
        rows, sampler, steps = lay_out(settings, inputs, encoder, staging.path / STATES)
        done = CheckpointManager(staging.path / STATES, resolved, sampler).require_resumable()
        deepspeed_config.write(settings, staging.path)
        _announce(settings, sampler, len(rows), steps)
        shared = rows if staging.remote is None else rows.uploaded(staging.remote / STATES)
        try:
            with _progress(staging, steps, done):
                fit(resolved, shared, staging.path)
        finally:  # also of a run that failed, whose output directory stays
            fetch(staging.remote, staging.path)
            _report(staging.path, settings, len(rows), steps)
        _describe(staging, step, inputs, settings, rows)
        (staging.path / STATES / RECORDS).unlink()
        if staging.remote is not None:
            (staging.remote / STATES).delete(RECORDS)
    return hub.upload(settings, step.published())


# ---------------------------------------------------------------------------------------------------------- resolving


@dataclass(frozen=True)
class Inputs:
    """What a run reads: files and hub names by setting, and the settings with resolved paths and URIs.

    The paths are absolute, because workers have other working directories.
    """

    settings: TrainSettings
    files: dict[str, Place]
    names: dict[str, str]


def prepare(settings: TrainSettings) -> tuple[Inputs, Step]:
    """Check the settings, locate everything that they name, and identify the run.

    Raises:
        InputError: settings do not fit each other, an input does not exist, or the output cannot be written.
    """
    inputs = resolve(settings)
    return inputs, Step("train", settings, settings.output, inputs.files, inputs.names)


def resolve(settings: TrainSettings) -> Inputs:
    """Check the settings and locate everything that they name.

    Raises:
        InputError: settings do not fit each other, or an input does not exist.
    """
    return check_all(lambda: _check_settings(settings), lambda: _locate(settings))[1]


def _locate(settings: TrainSettings) -> Inputs:
    validation = settings.validation
    named = [("model", settings.model)] + ([("teacher", settings.teacher)] if settings.teacher is not None else [])
    records, held, *models = check_all(
        lambda: sources.locate(settings),
        lambda: {} if validation is None else held_out_files(validation),
        *(partial(locate, model, setting) for setting, model in named),
    )
    files: dict[str, Place] = dict(records)
    names: dict[str, str] = {}
    found: dict[str, Any] = {}
    for (setting, _), model in zip(named, models, strict=True):
        found[setting] = model.path
        files |= model.inputs
        names |= model.names
    if validation is not None:
        found["validation"] = validation.model_copy(update={name: address(file) for name, file in held.items()})
        files |= {f"validation.{name}": file for name, file in held.items()}
    return Inputs(settings.model_copy(update=found), files, names)


def lay_out(
    settings: TrainSettings,
    inputs: Inputs,
    encoder: InstructionEncoder,
    directory: Path,
    tallies: dict[str, sources.Tally] | None = None,
) -> tuple[Dataset, Sampler, int]:
    """Write the checked records to a directory; return them, the order of the data, and the number of steps.

    `tallies` is filled with the numbers of each source, unless an interrupted attempt wrote the records.

    Raises:
        InputError: a record is invalid, or the records and the settings do not make steps.
    """
    rows = sources.write(settings, inputs.files, encoder, directory / RECORDS, tallies)
    sampler = Sampler.from_settings(settings, rows, encoder)
    _check_joint_texts(settings, encoder, sampler)
    return rows, sampler, -(-sampler.steps // settings.accumulation)


# ----------------------------------------------------------------------------------------------------------- checking


def _check_settings(settings: TrainSettings) -> None:
    """Check that the settings fit each other; InputError otherwise."""
    checks = (
        deepspeed_config.check,
        _check_processes,
        trackers.check,
        Objective.from_settings,
        overlap.check,
        _check_temperature,
        _check_quantization,
        _check_batches,
        _check_kept,
    )
    check_all(*(partial(check, settings) for check in checks))


def _check_temperature(settings: TrainSettings) -> None:
    low, high = TEMPERATURES
    if settings.temperature_learned and not low < settings.temperature < high:
        raise InputError(
            f"temperature={settings.temperature}: learned temperatures lie between {low} and {high}; set an initial value "
            "between them, or temperature_learned=false"
        )


def _check_quantization(settings: TrainSettings) -> None:
    quantized = settings.lora is not None and settings.lora.quantized
    if quantized and (not settings.gpus_per_worker or settings.zero_stage == 3):
        raise InputError(
            "lora.quantized=true: needs gpus_per_worker=1 and zero_stage 0 to 2; or set lora.quantized=false"
        )


def _check_kept(settings: TrainSettings) -> None:
    if settings.keep_best and settings.validation is None:
        raise InputError(
            f"keep_best={settings.keep_best}: without validation no checkpoint has a score; set validation, or keep_best=0"
        )


def _check_processes(settings: TrainSettings) -> None:
    """Check that there are as many processes as workers. Ray starts them; other launchers find them running."""
    if settings.launcher == "ray":
        return
    # A dry run starts without torchrun, so it cannot know the number of processes.
    started = int(os.environ.get("WORLD_SIZE", settings.workers)) if settings.launcher == "torchrun" else 1
    if settings.workers != started:
        raise InputError(
            f"workers={settings.workers}: launcher={settings.launcher} has {counted(started, 'process', 'processes')}; set workers={started}"
        )
    if settings.gpus_per_worker not in (0, 1):
        raise InputError(
            f"gpus_per_worker={settings.gpus_per_worker}: launcher={settings.launcher} supports whole GPUs only; set 1 or 0"
        )


def _check_batches(settings: TrainSettings) -> None:
    """Check that the records of a step divide into micro-batches with a record for every worker."""
    if settings.tokens_per_step is not None:
        return
    per_batch, rest = divmod(settings.records_per_step, settings.accumulation)
    if rest:
        raise InputError(
            f"records_per_step={settings.records_per_step}: does not divide into accumulation={settings.accumulation} "
            "micro-batches; set a multiple"
        )
    if per_batch < settings.workers:
        raise InputError(
            f"records_per_step={settings.records_per_step}: accumulation={settings.accumulation} micro-batches of "
            f"{per_batch} leave some of workers={settings.workers} without a record; set records_per_step="
            f"{settings.workers * settings.accumulation} or more, or fewer workers"
        )


def check_model(settings: TrainSettings) -> InstructionEncoder:
    """Check the settings against the model, without weights; on a worker the check would cost a start."""
    encoder = load_encoder(settings, "meta")
    if settings.activation_checkpointing and not encoder.backbone.supports_gradient_checkpointing:
        raise InputError(
            f"activation_checkpointing=true: {type(encoder.backbone).__name__} does not support it; set false"
        )
    if settings.teacher is not None:
        InstructionEncoder.from_pretrained(settings.teacher, device="meta")
    for dimensions in settings.matryoshka:
        if dimensions >= encoder.dimension:
            raise InputError(
                f"matryoshka={dimensions}: embeddings of {settings.model} have {encoder.dimension}; set fewer"
            )
    if encoder.interaction is not None and settings.template is not None:
        raise InputError(f"template={settings.template}: cross_attention has no joint text; leave it out")
    return encoder


def _check_joint_texts(settings: TrainSettings, encoder: InstructionEncoder, sampler: Sampler) -> None:
    """Check the number of joint texts of the largest micro-batch, which may be limited by tokens instead of records."""
    objective = Objective.from_settings(settings)
    if objective == NCE and settings.tokens_per_step is not None:
        most = max(sum(map(len, shares)) for shares in sampler.rows())
        if (joint := (2 * most) ** 2) > MOST_JOINT_TEXTS:
            raise InputError(
                f"objective={objective}: tokens_per_step={settings.tokens_per_step} makes batches of up to {most} records "
                f"with {joint} joint texts, more than the limit of {MOST_JOINT_TEXTS}; lower tokens_per_step"
            )
    shares_prefixes = encoder.causal or encoder.interaction is not None
    if settings.instruction_negatives is None and "I" in objective.variables and not shares_prefixes:
        joint = 6 * max(len(share) for shares in sampler.rows() for share in shares) ** 2
        if joint > MOST_JOINT_TEXTS:
            raise InputError(
                f"instruction_negatives=null: up to {joint} joint texts per worker and step, more than the limit of "
                f"{MOST_JOINT_TEXTS}, and this backbone cannot share their prefixes; set a number"
            )


# ----------------------------------------------------------------------------------------------------------- training


def _train_here(settings: TrainSettings, rows: Sequence[TrainingRecord], directory: Path) -> None:
    """Train as a worker in this process."""
    if settings.gpus_per_worker == 0:
        torch.set_num_threads(max(1, int(settings.cpus_per_worker)))
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed takes a GPU if there is one, or warns
    from infembed_ray.training.loop import train_worker  # late: DeepSpeed probes for accelerators on import

    train_worker(settings, rows, node_directory(settings, directory), _device(settings))


def _device(settings: TrainSettings) -> torch.device:
    """Return the device of this process, which may share a machine with other workers."""
    if settings.gpus_per_worker:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def _run_under_torchrun(settings: TrainSettings) -> Published:
    """Let the first process do everything that is done once; it sends the others their work, or an exit status.

    The processes connect only then: until there is work, the first one is alone, as a driver is.
    """
    if int(os.environ["RANK"]) > 0:
        _connect(settings)
        work: Any = from_first(None)
        if isinstance(work, int):
            dist.destroy_process_group()
            raise SystemExit(work)
        _train_here(*work)
        raise SystemExit(0)
    status = 1
    working = False

    def fit(*work: Any) -> None:
        nonlocal working
        working = True
        _connect(settings)
        _train_here(*from_first(work))

    try:
        published = _run(settings, fit)
        status = 0
        return published
    except InputError:
        status = 2
        raise
    finally:
        if not working:
            _connect(settings)
            from_first(status)
            dist.destroy_process_group()  # its threads sometimes abort an exit that finds them running


def _connect(settings: TrainSettings) -> None:
    """Connect the processes that torchrun started."""
    if settings.gpus_per_worker:
        torch.cuda.set_device(_device(settings))
    dist.init_process_group(
        "nccl" if settings.gpus_per_worker else "gloo", timeout=timedelta(seconds=settings.collective_timeout_s)
    )


# ---------------------------------------------------------------------------------------------------------- reporting


def _announce(settings: TrainSettings, sampler: Sampler, records: int, steps: int) -> None:
    what = f"{counted(records, 'record')}, {counted(steps, 'step')} on {counted(settings.workers, 'worker')}"
    say(f"train: {settings.objective}, {what}")
    if repeated := sampler.repeated:
        say(
            f"train: unique_texts: {repeated} of the {sampler.epoch_size} records of an epoch share a batch with a record "
            "of the same text, because there are too few batches"
        )


@contextmanager
def _progress(staging: Staging, steps: int, done: int) -> Iterator[None]:
    """Show progress while the block runs, from the metrics that worker 0 writes, or uploads."""
    stop = threading.Event()
    thread = threading.Thread(target=_follow, args=(staging, steps, done, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _follow(staging: Staging, steps: int, done: int, stop: threading.Event) -> None:
    directory = staging.path
    fetch(staging.remote, directory, (METRICS, EVENTS))
    with track("train", steps, done) as advance:
        shown, (_, offset) = done, read_metrics_from(directory, 0)  # these lines are older, or will be removed
        seen = set(read_events(directory))  # events of earlier attempts were shown by those
        events: Counter[str] = Counter()
        stopping = False
        while not stopping:
            stopping = stop.wait(POLL_S if staging.remote is None else UPLOAD_S)  # one last look after the end
            fetch(staging.remote, directory, (METRICS, EVENTS))
            for event in read_events(directory):
                if event not in seen:
                    seen.add(event)
                    events[event.kind] += 1
                    if event.action != "stop":  # the error that ends the run has that message
                        say(f"train: {event.message}")
            telemetry.report(training_events_total=events)
            lines, offset = read_metrics_from(directory, offset)
            if lines and lines[-1]["step"] > shown:
                advance(lines[-1]["step"] - shown, note=_note(lines[-1]))
                shown = lines[-1]["step"]
            elif shown == done:
                advance(0, note="starting workers")


def _note(line: Mapping[str, Any]) -> str:
    loss, norm = (math.nan if line[name] is None else line[name] for name in ("loss", "grad_norm"))
    return f"loss {loss:.3f}  |g| {norm:.2f}  {line['tokens_per_second']:,.0f} tokens/s"


def _report(directory: Path, settings: TrainSettings, records: int, steps: int) -> None:
    """Write the report. A failure is logged only, because the outcome of the run matters more."""
    try:
        report.write(directory, settings, records, steps)
    except Exception as error:
        say(f"train: warning: {report.REPORT} cannot be written ({in_one_line(error)})")


def _describe(staging: Staging, step: Step, inputs: Inputs, settings: TrainSettings, rows: Dataset) -> None:
    """Write the facts of the finished run into the manifest and the model card."""
    exported = json.loads((staging.path / EXPORTED).read_text(encoding="utf-8"))
    lines = read_metrics(staging.path)
    last = next((line for line in lines if line["step"] == exported["step"]), {})  # a full disk may have dropped it
    staging.counts |= {"records": len(rows), "steps": lines[-1]["step"] if lines else exported["step"]}
    staging.facts |= {"records": rows.fingerprint, "exported": exported, "final_metrics": last}
    model_card.write(
        staging.path,
        describe(str(staging.path)),
        inputs.settings.model,
        model_card.TrainingData(
            ", ".join(inputs.files[name].name for name in sources.named(settings)),
            " ".join(step.contents[name] for name in sources.named(settings)),
            [row.source for row in rows],
        ),
        settings.identity(),
        last,
    )
