"""`infembed train`: check all input, let the workers train, publish. Where they run is the launcher's business.

    ray         Ray Train places the workers on the cluster and restarts them after failures (`distributed`)
    torchrun    the command is itself run by torchrun, once a worker; there is no Ray
    process     this process is the only worker, for debugging

The three give the same records, metrics and checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from infembed_ray import records as tables
from infembed_ray.config import TEMPERATURES, TrainSettings
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.modeling import model_card
from infembed_ray.modeling.checkpoint import describe, locate
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.progress import say, track
from infembed_ray.storage import STATES, Published, Step, existing, fingerprint
from infembed_ray.training import deepspeed_config, report, trackers
from infembed_ray.training.backbone import load_encoder
from infembed_ray.training.collectives import from_first
from infembed_ray.training.dataset import RECORDS, Dataset
from infembed_ray.training.events import read_events
from infembed_ray.training.metrics import lines_from, read_metrics
from infembed_ray.training.objectives import MOST_JOINT_TEXTS, NCE, Objective
from infembed_ray.training.sampler import Sampler
from infembed_ray.training.states import States
from infembed_ray.training.tuples import token_counts
from infembed_ray.training.validation import EXPORTED, held_out, held_out_files, overlapping

POLL_S = 0.5
Fit = Callable[[TrainSettings, Sequence[tables.Record], Path], None]
"""Lets all workers train to the end, on some records, in a directory that all of them see."""


def run(settings: TrainSettings) -> Published:
    """Train a checkpoint; nothing to do if the same records, model and settings were trained before.

    It returns in the first of torchrun's processes only; the others end here, by SystemExit.

    Raises:
        InputError: before any work, for anything wrong with the settings, the records or the model.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if by_torchrun and settings.launcher != "torchrun":
        raise InputError(f"launcher={settings.launcher}: torchrun has started this process; set launcher=torchrun")
    if settings.launcher == "torchrun" and not by_torchrun:
        raise InputError(
            "launcher=torchrun: torchrun has not started this process; torchrun --no-python infembed train"
        )
    if settings.launcher == "ray":
        from infembed_ray.training.distributed import fit

        return _run(settings, fit)
    return _run(settings, _train_here) if settings.launcher == "process" else _under_torchrun(settings)


def _run(settings: TrainSettings, fit: Fit) -> Published:
    deepspeed_config.check(settings)
    _check_place(settings)
    trackers.check(settings)
    Objective.of(settings)  # fits the other settings
    low, high = TEMPERATURES
    if settings.temperature_learned and not low < settings.temperature < high:
        raise InputError(
            f"temperature={settings.temperature}: learned temperatures lie between {low} and {high}; start within, "
            "or set temperature_learned=false"
        )
    quantized = settings.lora is not None and settings.lora.quantized
    if quantized and (not settings.gpus_per_worker or settings.zero_stage == 3):
        raise InputError(
            "lora.quantized=true: needs gpus_per_worker=1 and zero_stage 0 to 2; or set lora.quantized=false"
        )
    if settings.tokens_per_step is None:
        _check_batches(settings)
    if settings.keep_best and settings.validation is None:
        raise InputError(
            f"keep_best={settings.keep_best}: without validation no state is the best; set validation, or 0"
        )
    path = existing(settings.records, "records")
    model = locate(settings.model, "model")
    found: dict[str, Any] = {"model": model.path}
    inputs, names = {"records": path} | model.inputs, dict(model.names)
    if settings.teacher is not None:
        teacher = locate(settings.teacher, "teacher")
        found["teacher"] = teacher.path
        inputs |= teacher.inputs
        names |= teacher.names
    if settings.validation is not None:
        files = held_out_files(settings.validation)
        found["validation"] = settings.validation.model_copy(update={name: str(f) for name, f in files.items()})
        inputs |= {f"validation.{name}": file for name, file in files.items()}
    step = Step("train", settings, settings.output, inputs, names, uris=True)
    if finished := step.finished():
        return finished
    encoder = _check_model(settings.model_copy(update=found))
    with step.publish() as staging:
        rows = _records(settings, path, encoder, staging.path / STATES / RECORDS)
        if staging.remote is not None:
            found["output"] = staging.remote.uri
        sampler = Sampler.of(settings, rows, encoder)
        _require_affordable(settings, encoder, sampler)
        done = States(staging.path / STATES, settings.model_copy(update=found), sampler).require_resumable()
        steps = -(-sampler.steps // settings.accumulation)
        deepspeed_config.write(settings, staging.path)
        say(f"train: {settings.objective}, {len(rows)} records, {steps} steps on {settings.workers} workers")
        if repeated := sampler.repeated:
            say(
                f"train: unique_texts: {repeated} of the {sampler.epoch_size} records of an epoch still stand in a batch "
                "with one of the same text: there are too few batches to part them"
            )
        try:
            with _progress(staging.path, steps, done):
                # The paths that were found here, not as they were written: workers have other working directories.
                fit(settings.model_copy(update=found), rows, staging.path)
        finally:  # of a run that failed too: its directory stays
            _report(staging.path, settings, len(rows), steps)
        exported = json.loads((staging.path / EXPORTED).read_text(encoding="utf-8"))
        lines = read_metrics(staging.path)
        last = next((line for line in lines if line["step"] == exported["step"]), {})  # a full disk may have cost it
        staging.counts |= {"records": len(rows), "steps": lines[-1]["step"] if lines else exported["step"]}
        staging.facts |= {"records": rows.fingerprint, "exported": exported, "final_metrics": last}
        model_card.write(
            staging.path,
            describe(str(staging.path)),
            model.path,
            model_card.TrainingData(path, fingerprint(path), [row.source for row in rows]),
            settings.identity(),
            last,
        )
        rows.path.unlink()
    return step.published()


def _records(settings: TrainSettings, path: Path, encoder: InstructionEncoder, file: Path) -> Dataset:
    """The records, checked, in the file that the workers open, and compared with the held-out ones."""
    file.parent.mkdir(exist_ok=True)
    count = None if settings.tokens_per_step is None else partial(token_counts, encoder)
    if file.exists():  # of this run, interrupted: its identity is that of the records and of what is counted
        rows = Dataset(file)
    else:
        rows = Dataset.write(file, tables.stream(path, tables.Record, "records", split=settings.split), count)
    if settings.validation is not None:
        held, _ = held_out(settings.validation)
        if known := overlapping(rows, held):
            say(
                f"train: warning: {known} of the {len(held)} records of validation.records share their id, query or "
                "right passage with a record that is trained on"
            )
    return rows


def _report(directory: Path, settings: TrainSettings, records: int, steps: int) -> None:
    """Write the report; what became of the run matters more than what becomes of that."""
    try:
        report.write(directory, settings, records, steps)
    except Exception as error:
        say(f"train: warning: {report.REPORT} cannot be written ({in_one_line(error)})")


def _check_batches(settings: TrainSettings) -> None:
    """Do the records of a step divide into batches with a record for every worker?"""
    per_batch, over = divmod(settings.records_per_step, settings.accumulation)
    if over:
        raise InputError(
            f"records_per_step={settings.records_per_step}: does not divide into accumulation={settings.accumulation} "
            "batches; set a multiple"
        )
    if per_batch < settings.workers:
        raise InputError(
            f"records_per_step={settings.records_per_step}: accumulation={settings.accumulation} batches of "
            f"{per_batch} leave some of workers={settings.workers} without a record; set records_per_step="
            f"{settings.workers * settings.accumulation} or more, or fewer workers"
        )


def _check_place(settings: TrainSettings) -> None:
    """Are there as many processes as workers? Ray starts them, the other launchers find them."""
    if settings.launcher == "ray":
        return
    started = int(os.environ.get("WORLD_SIZE", 1)) if settings.launcher == "torchrun" else 1
    if settings.workers != started:
        raise InputError(
            f"workers={settings.workers}: launcher={settings.launcher} has {started} processes; set workers={started}"
        )
    if settings.gpus_per_worker not in (0, 1):
        raise InputError(
            f"gpus_per_worker={settings.gpus_per_worker}: launcher={settings.launcher} knows whole GPUs; set 1 or 0"
        )


def _check_model(settings: TrainSettings) -> InstructionEncoder:
    """Do the settings fit the model? Looked at here, without weights: on a worker it would cost a start each."""
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
                f"matryoshka={dimensions}: embeddings of {settings.model} have {encoder.dimension}; give fewer"
            )
    if encoder.interaction is not None and settings.template is not None:
        raise InputError(f"template={settings.template}: cross_attention has no joint text; leave it out")
    return encoder


def _require_affordable(settings: TrainSettings, encoder: InstructionEncoder, sampler: Sampler) -> None:
    """Are the joint texts of the largest batch not too many? A batch may be limited by its tokens, so that is looked up."""
    objective = Objective.of(settings)
    if objective == NCE and settings.tokens_per_step is not None:
        most = max(sum(map(len, shares)) for shares in sampler.rows())
        if (joint := (2 * most) ** 2) > MOST_JOINT_TEXTS:
            raise InputError(
                f"objective={objective}: tokens_per_step={settings.tokens_per_step} makes batches of up to {most} records "
                f"with {joint} joint texts; {MOST_JOINT_TEXTS} at most are affordable: lower tokens_per_step"
            )
    shared = encoder.causal or encoder.interaction is not None
    if settings.instruction_negatives is None and "I" in objective.variables and not shared:
        joint = 6 * max(len(share) for shares in sampler.rows() for share in shares) ** 2
        if joint > MOST_JOINT_TEXTS:
            raise InputError(
                f"instruction_negatives=null: up to {joint} joint texts a worker and step, of which this backbone shares "
                f"nothing, at most {MOST_JOINT_TEXTS} are affordable; set a number"
            )


def _train_here(settings: TrainSettings, rows: Sequence[tables.Record], directory: Path) -> None:
    """Be a worker in this process."""
    # Imported here, where there is work to do: DeepSpeed looks for accelerators and talks about them when it is imported.
    from infembed_ray.training.loop import train_worker

    if settings.gpus_per_worker == 0:
        torch.set_num_threads(max(1, int(settings.cpus_per_worker)))
    train_worker(settings, rows, directory, _device(settings))


def _device(settings: TrainSettings) -> torch.device:
    """This process's, on a machine that it may share with others of the run."""
    return (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if settings.gpus_per_worker else torch.device("cpu")
    )


def _under_torchrun(settings: TrainSettings) -> Published:
    """The first process does all that is done once, and hands the others their work, or the status to end with.

    They meet when there is something to say: until then the first works alone, as a driver does.
    """
    if int(os.environ["RANK"]) > 0:
        _meet(settings)
        work: Any = from_first(None)
        if isinstance(work, int):
            dist.destroy_process_group()
            raise SystemExit(work)
        _train_here(*work)
        raise SystemExit(0)
    status = 1
    met = False

    def fit(*work: Any) -> None:
        nonlocal met
        met = True
        _meet(settings)
        _train_here(*from_first(work))

    try:
        published = _run(settings, fit)
        status = 0
        return published
    except InputError:
        status = 2
        raise
    finally:
        if not met:
            _meet(settings)
            from_first(status)
            dist.destroy_process_group()  # its threads would now and then abort an exit that finds them running


def _meet(settings: TrainSettings) -> None:
    """Connect the processes that torchrun started."""
    if settings.gpus_per_worker:
        torch.cuda.set_device(_device(settings))
    dist.init_process_group(
        "nccl" if settings.gpus_per_worker else "gloo", timeout=timedelta(seconds=settings.collective_timeout_s)
    )


@contextmanager
def _progress(directory: Path, steps: int, done: int) -> Iterator[None]:
    """Show progress while the block runs, from the metrics that worker 0 writes."""
    stop = threading.Event()
    thread = threading.Thread(target=_follow, args=(directory, steps, done, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _follow(directory: Path, steps: int, done: int, stop: threading.Event) -> None:
    with track("train", steps, done) as advance:
        shown, (_, offset) = done, lines_from(directory, 0)  # what stands there now was done before, or will be cut
        told = set(read_events(directory))  # of earlier attempts, who told of them
        stopping = False
        while not stopping:
            stopping = stop.wait(POLL_S)  # one last look after the end
            for event in read_events(directory):
                if event not in told and event.action != "stop":  # the error that ends the run says that
                    told.add(event)
                    say(f"train: {event.message}")
            lines, offset = lines_from(directory, offset)
            if lines and lines[-1]["step"] > shown:
                advance(lines[-1]["step"] - shown, note=_note(lines[-1]))
                shown = lines[-1]["step"]
            elif shown == done:
                advance(0, note="starting workers")


def _note(line: Mapping[str, Any]) -> str:
    loss, norm = (math.nan if line[name] is None else line[name] for name in ("loss", "grad_norm"))
    return f"loss {loss:.3f}  |g| {norm:.2f}  {line['tokens_per_second']:,.0f} tokens/s"
