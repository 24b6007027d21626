"""`infembed train`: check all input, let the workers train, publish the model.

With `launcher=ray`, Ray Train places the workers on the cluster and restarts them after failures (`distributed`); with
`process`, this process is the only worker. Both give the same records, metrics and model.
"""

import json
import math
import os
import shutil
import threading
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from infembed_ray import telemetry
from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError, check_all
from infembed_ray.modeling import model_card
from infembed_ray.modeling.checkpoint import describe, locate
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.progress import counted, in_thread, say, track
from infembed_ray.records.files import BAD_ROWS_FILE
from infembed_ray.storage import durable
from infembed_ray.storage.places import Place, address
from infembed_ray.storage.steps import STATES, Published, Staging, Step, find_input
from infembed_ray.training import deepspeed_config, sources
from infembed_ray.training.backbone import load_encoder
from infembed_ray.training.checkpoints.manager import CheckpointManager
from infembed_ray.training.dataset import RECORDS, Dataset
from infembed_ray.training.losses import MOST_JOINT_TEXTS, Objective
from infembed_ray.training.node_files import UPLOAD_S, fetch, node_directory
from infembed_ray.training.observability import trackers
from infembed_ray.training.observability.logs import EVENTS, METRICS, read_events, read_lines, read_metrics
from infembed_ray.training.sampler import Sampler
from infembed_ray.training.validation import EXPORTED

POLL_S = 0.5


def run(settings: TrainSettings) -> Published:
    """Train and publish a model; if the same records, model and settings were trained before, return that model.

    Raises:
        InputError: the settings, the records or the model cannot work (before any work), or training stopped.
    """
    inputs, step = prepare(settings)
    if finished := step.finished():
        return finished
    check_model(inputs.settings)
    with step.publish() as staging:
        output = {"output": staging.remote.uri} if staging.remote is not None else {}
        resolved = inputs.settings.model_copy(update=output)
        rows, sampler = lay_out(settings, inputs, staging.path / STATES, {})
        if (left_out := staging.path / STATES / BAD_ROWS_FILE).exists():
            shutil.copy(left_out, staging.path)
        done = CheckpointManager(staging.path / STATES, resolved, sampler).require_resumable()
        durable.replace_json(staging.path / deepspeed_config.FILE, deepspeed_config.deepspeed_config(settings))
        work = f"{counted(len(rows), 'record')}, {counted(sampler.steps, 'step')}"
        say(f"train: {settings.objective}, {work} on {counted(settings.workers, 'worker')}")
        shared = rows if staging.remote is None else rows.uploaded(staging.remote / STATES)
        try:
            with in_thread(partial(_follow, staging, sampler.steps, done)):
                _fit(resolved, shared, staging.path)
        finally:  # also of a run that failed, whose output directory stays
            fetch(staging.remote, staging.path)
        _describe(staging, step, inputs, settings, rows)
        (staging.path / STATES / RECORDS).unlink()
        if staging.remote is not None:
            (staging.remote / STATES).delete(RECORDS)
    return step.published()


@dataclass(frozen=True)
class Inputs:
    """What a run reads: files and hub names by setting, and the settings with absolute paths and URIs."""

    settings: TrainSettings
    files: dict[str, Place]
    names: dict[str, str]


def prepare(settings: TrainSettings) -> tuple[Inputs, Step]:
    """Check the settings, locate everything that they name, and identify the run; InputError if one of these fails."""
    inputs: Inputs
    _, inputs = check_all(lambda: _check_settings(settings), lambda: _locate(settings))
    return inputs, Step("train", settings, settings.output, inputs.files, inputs.names)


def _locate(settings: TrainSettings) -> Inputs:
    validation = settings.validation
    records, held, model = check_all(
        lambda: sources.locate(settings),
        lambda: None if validation is None else find_input(validation.records, "validation.records"),
        lambda: locate(settings.model, "model"),
    )
    files: dict[str, Place] = {**records, **model.inputs}
    resolved: dict[str, Any] = {"model": model.path}
    if validation is not None:
        resolved["validation"] = validation.model_copy(update={"records": address(held)})
        files["validation.records"] = held
    return Inputs(settings.model_copy(update=resolved), files, model.names)


def lay_out(
    settings: TrainSettings, inputs: Inputs, directory: Path, tallies: dict[str, sources.Tally]
) -> tuple[Dataset, Sampler]:
    """Write the checked records to a directory; return them and the order of the data; InputError if they are not valid.

    `tallies` is filled with the numbers of each source, unless an interrupted attempt wrote the records.
    """
    rows = sources.write(settings, inputs.files, directory / RECORDS, tallies)
    return rows, Sampler.from_settings(settings, rows)


def _check_settings(settings: TrainSettings) -> None:
    """Check that the settings fit each other; InputError otherwise."""
    checks = (
        deepspeed_config.check,
        _check_workers,
        trackers.check,
        Objective.from_settings,
        _check_quantization,
    )
    check_all(*(partial(check, settings) for check in checks))


def _check_quantization(settings: TrainSettings) -> None:
    quantized = settings.lora is not None and settings.lora.quantized
    if quantized and (not settings.gpus_per_worker or settings.zero_stage == 3):
        remedy = "or set lora.quantized=false"
        raise InputError.of("lora.quantized", "true", "needs gpus_per_worker=1 and zero_stage 0 to 2", remedy)


def _check_workers(settings: TrainSettings) -> None:
    """Check that every worker has a record in each step, and that a single process is the only worker."""
    if settings.launcher == "process" and settings.workers != 1:
        raise InputError.of("workers", settings.workers, "launcher=process has one worker", "set workers=1")
    if settings.launcher == "process" and settings.gpus_per_worker not in (0, 1):
        fault = "launcher=process supports whole GPUs only"
        raise InputError.of("gpus_per_worker", settings.gpus_per_worker, fault, "set 1 or 0")
    if settings.records_per_step < settings.workers:
        fault = f"leaves some of workers={settings.workers} without a record"
        remedy = f"set records_per_step={settings.workers} or more, or fewer workers"
        raise InputError.of("records_per_step", settings.records_per_step, fault, remedy)


def check_model(settings: TrainSettings) -> InstructionEncoder:
    """Check the settings against the model, without weights; on a worker the check would cost a start."""
    encoder = load_encoder(settings, "meta")
    if settings.activation_checkpointing and not encoder.backbone.supports_gradient_checkpointing:
        fault = f"{type(encoder.backbone).__name__} does not support it"
        raise InputError.of("activation_checkpointing", "true", fault, "set false")
    for dimensions in settings.matryoshka:
        if dimensions >= encoder.dimension:
            fault = f"embeddings of {settings.model} have {encoder.dimension}"
            raise InputError.of("matryoshka", dimensions, fault, "set fewer")
    if encoder.interaction is not None and settings.template is not None:
        raise InputError.of("template", settings.template, "cross_attention has no joint text", "leave it out")
    shares_prefixes = encoder.causal or encoder.interaction is not None
    contrasted = "I" in Objective.from_settings(settings).variables
    if settings.instruction_negatives is None and contrasted and not shares_prefixes:
        joint = 6 * math.ceil(settings.records_per_step / settings.workers) ** 2
        if joint > MOST_JOINT_TEXTS:
            most = f"up to {joint} joint texts per worker and step, more than the limit of {MOST_JOINT_TEXTS}"
            fault = f"{most}, and this backbone cannot share their prefixes"
            raise InputError.of("instruction_negatives", "null", fault, "set a number")
    return encoder


def _fit(settings: TrainSettings, rows: Dataset, directory: Path) -> None:
    """Let all workers train to the end; they see all records, and the output unless it is in an object store."""
    if settings.launcher == "ray":
        from infembed_ray.training.distributed import fit

        fit(settings, rows, directory)
        return
    if settings.gpus_per_worker == 0:
        torch.set_num_threads(max(1, int(settings.cpus_per_worker)))
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed takes a GPU if there is one, or warns
    from infembed_ray.training.loop import train_worker  # late: DeepSpeed probes for accelerators on import

    device = torch.device("cuda", 0) if settings.gpus_per_worker else torch.device("cpu")
    train_worker(settings, rows, node_directory(settings, directory), device)


def _follow(staging: Staging, steps: int, done: int, ended: threading.Event) -> None:
    """Show progress until the event is set, from the metrics that worker 0 writes, or uploads."""
    directory = staging.path
    fetch(staging.remote, directory, (METRICS, EVENTS))
    with track("train", steps, done) as advance:
        shown, (_, offset) = done, read_lines(directory / METRICS)  # these lines are older, or will be removed
        seen = set(read_events(directory))  # events of earlier attempts were shown by those
        events: Counter[str] = Counter()
        stopping = False
        while not stopping:
            stopping = ended.wait(POLL_S if staging.remote is None else UPLOAD_S)  # one last look after the end
            fetch(staging.remote, directory, (METRICS, EVENTS))
            for event in read_events(directory):
                if event not in seen:
                    seen.add(event)
                    events[event.kind] += 1
                    if event.action != "stop":  # the error that ends the run has that message
                        say(f"train: {event.message}")
            telemetry.report(training_events_total=events)
            lines, offset = read_lines(directory / METRICS, offset)
            if lines and (last := lines[-1])["step"] > shown:
                loss, norm = (math.nan if last[name] is None else last[name] for name in ("loss", "grad_norm"))
                figures = f"loss {loss:.3f}  |g| {norm:.2f}  {last['tokens_per_second']:,.0f} tokens/s"
                advance(last["step"] - shown, note=figures)
                shown = last["step"]
            elif shown == done:
                advance(0, note="starting workers")


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
