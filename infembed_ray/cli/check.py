"""`infembed check VERB`: what a run would do, and every mistake that can be found without Ray and without a paid request.

Each function checks one verb with the functions that its run calls before it starts Ray, so check and run agree. It yields
the plan line by line, and raises InputError with all mistakes that were found together.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from infembed_ray.cli.check_outputs import gib, no_new_directories, require_space, require_space_of_workers, state
from infembed_ray.config.analysis import AnalyzeSettings
from infembed_ray.config.base import Settings, nearest
from infembed_ray.config.evaluation import EvaluateSettings, ReportSettings
from infembed_ray.config.mining import MineSettings
from infembed_ray.config.pipeline import PipelineSettings
from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.config.serving import ServeSettings
from infembed_ray.config.sweeps import SweepSettings
from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.config.training import ExportSettings, TrainSettings
from infembed_ray.errors import Fault, InputError, check_all
from infembed_ray.progress import counted
from infembed_ray.storage.places import address, listing
from infembed_ray.storage.steps import STATES

if TYPE_CHECKING:
    from infembed_ray.evaluation.inputs import Inputs
    from infembed_ray.planning.memory import ModelSize
    from infembed_ray.sweeps.trials import Trial
    from infembed_ray.training.sources import Tally

_STATE_BYTES = 12
"""Bytes per trained parameter in a state: the fp32 weight and Adam's two moments."""
_WEIGHT_BYTES = 4
_LISTED = 20
"""Most models of an endpoint that an error may list."""


def check(verb: str, settings: Settings, endpoint: bool) -> Iterator[str]:
    """Yield the plan of a verb; leave no empty directory behind.

    Args:
        verb: one of `VERBS`.
        endpoint: whether to ask the LLM endpoints for their models.

    Raises:
        InputError: mistakes were found, after the lines that could be made.
    """
    faults: dict[str, Fault | str] = {}
    with no_new_directories(settings):
        checks: list[Callable[..., Iterator[str]]] = [VERBS[verb], *[_endpoints] * endpoint]
        for lines in checks:
            try:
                yield from lines(settings)
            except InputError as error:
                faults |= {str(fault): fault for fault in error.args}
    if faults:
        raise InputError(*faults.values())


# ------------------------------------------------------------------------------------------------------- synthesize


def _endpoints(settings: SynthesizeSettings) -> Iterator[str]:
    """Ask every endpoint for its models, and say which ones of the settings it lacks."""
    from infembed_ray.llm.chat import RunFailure
    from infembed_ray.llm.endpoint import list_models
    from infembed_ray.synthesis.pipeline import model_of, steps_of
    from infembed_ray.synthesis.preflight import endpoints

    asked = dict(reversed([model_of(settings, step) for step in steps_of(settings)]))
    faults = []
    for name, endpoint in endpoints(settings).items():
        if endpoint.serve is not None:
            yield f"{name}: the run starts {endpoint.serve.model} on {counted(endpoint.serve.gpus, 'GPU')}"
            continue
        try:
            models = list_models(endpoint, name)
        except RunFailure as failure:
            faults.append(str(failure))
            continue
        if models is None:
            yield f"{name} {endpoint.base_url} answers; it does not list its models"
            continue
        yield f"{name} {endpoint.base_url} answers, with {counted(len(models), 'model')}"
        for setting, model in asked.items():
            if not models & {model.model, f"{model.model}:latest"}:  # Ollama answers without its tag, too
                hint = nearest(model.model, models) if len(models) <= _LISTED else "correct the name"
                faults.append(f"{setting}.model={model.model}: {name} {endpoint.base_url} does not list it: {hint}")
    if faults:
        raise InputError(*faults)


def _synthesize(settings: SynthesizeSettings) -> Iterator[str]:
    from infembed_ray.llm import budget, prices
    from infembed_ray.llm.chat import RunFailure
    from infembed_ray.synthesis import preflight
    from infembed_ray.synthesis.estimate import estimate

    try:
        seeds, table, step = preflight.prepare(settings)
    except InputError as error:
        check_all(partial(_raise, error), lambda: preflight.check_settings(settings, prices.load(settings.prices)))
        raise
    if (yield from state(step)):
        return
    job = preflight.resolve(settings, seeds, table)
    yield f"seeds: {job.survey.seeds:,} of {seeds.path}" + (
        f"; {sum(job.survey.left_out.values()):,} rows are left out" if job.survey.left_out else ""
    )
    try:
        made = estimate(job)
    except RunFailure as failure:
        raise InputError(str(failure)) from failure
    sample = "" if made.rehearsed == made.seeds else f" (estimated from {made.rehearsed:,} of the seeds)"
    if not made.calls:
        yield f"calls: none, the journals answer all of them{sample}"
    else:
        yield f"calls: {made.calls:,.0f} at most, if every record is kept and no answer is malformed{sample}"
        unbound = [f"{name}.max_tokens" for name, model in preflight.models(settings).items() if not model.max_tokens]
        bound = (
            f"no bound for answers; set {' and '.join(unbound)}"
            if made.answer_tokens is None
            else f"at most {made.answer_tokens:,.0f} for answers"
        )
        yield f"tokens: about {made.prompt_tokens:,.0f} for prompts, {bound}"
        if made.usd is not None:
            yield f"price: about {made.usd:,.2f} USD at most, at list prices of {table.as_of}"
        elif made.answer_tokens is not None:
            yield "price: unknown, because a model has no list price; give its prices in a file and set prices=FILE"
    if made.calls:
        probed = [name for name, endpoint in job.endpoints.items() if endpoint.probe]
        models = preflight.probes(settings)
        yield (
            f"pre-flight: {counted(len(models), 'short request')} to {' and '.join(probed)}, to find out which parameters "
            f"{' and '.join(models)} take{'s' if len(models) == 1 else ''}"
            if probed
            else "pre-flight: none (endpoint.probe=false); parameters are sent as set"
        )
    preflight.check(job)
    if settings.limits.budget_usd is not None:
        spent = budget.spent_usd(job.journal, table)
        yield f"budget: {settings.limits.budget_usd:,.2f} USD, of which this journal has used {spent:,.2f}"


def _raise(error: InputError) -> None:
    raise error


# ---------------------------------------------------------------------------------------------------------- analyze


def _analyze(settings: AnalyzeSettings) -> Iterator[str]:
    from infembed_ray.analysis import analyze

    files, step = analyze.prepare(settings)
    if (yield from state(step)):
        return
    given = analyze.read(settings, files)
    records = given.records
    yield f"records: {len(records.kept):,} kept, {len(records.rejected):,} rejected, {len(records.dead_letter):,} dead letters"
    if given.compared or given.evaluations:
        others, evaluations = (
            counted(len(given.compared), "other set"),
            counted(len(given.evaluations), "evaluation set"),
        )
        yield f"compared with {others} and {evaluations}"
    if given.references:
        yield f"agreement: {counted(len(given.references), 'reference rater')}"
    if given.rating is not None:
        calls = len(given.rating.items) * len(settings.agreement.raters)
        yield f"calls: {calls:,} at most, if no answer is malformed or journaled"


# ----------------------------------------------------------------------------------------- mine, train and export


def _mine(settings: MineSettings) -> Iterator[str]:
    from infembed_ray.mining import distributed
    from infembed_ray.mining.miner import read

    inputs, step = distributed.prepare(settings)
    if (yield from state(step)):
        return
    index = inputs.index
    yield f"tuples: {sum(1 for _ in read(settings, inputs.records)):,} of {inputs.records}"
    yield f"index {index.version}: {index.facts.passages:,} passages, model {index.facts.model}"
    judge = "the index's encoder" if inputs.teacher is None else getattr(inputs.teacher, "model", inputs.teacher.kind)
    yield f"negatives: {settings.negatives} of {settings.depth} passages per tuple, judged by {judge}"


def _train(settings: TrainSettings) -> Iterator[str]:
    from infembed_ray.planning.memory import ModelSize
    from infembed_ray.planning.train import peak_memory
    from infembed_ray.training import launch
    from infembed_ray.training.checkpoints.manager import CheckpointManager

    inputs, step = launch.prepare(settings)
    if (yield from state(step)):
        return
    encoder = launch.check_model(inputs.settings)
    with tempfile.TemporaryDirectory(dir=step.root) as directory:  # a copy of the records, as the run makes it
        tallies: dict[str, Tally] = {}
        rows, sampler, steps = launch.lay_out(settings, inputs, encoder, Path(directory), tallies)
        output = {"output": step.remote.uri} if step.remote else {}
        resumed = inputs.settings.model_copy(update=output)
        done = CheckpointManager(step.partial / STATES, resumed, sampler).require_resumable()
        for name, tally in tallies.items():
            yield f"{name.removesuffix('.path')}: {tally.describe(inputs.files[name])}"
        yield (
            f"steps: {-(-steps // settings.epochs):,} per epoch, {steps:,} in {counted(settings.epochs, 'epoch')}, on "
            f"{counted(settings.workers, 'worker')}" + (f"; {done:,} are done" if done else "")
        )
        memory = peak_memory(inputs.settings, encoder, rows)
    weights = ModelSize.of(encoder, settings)
    yield f"model: {weights.parameters / 1e6:,.1f} M parameters, {weights.trained / 1e6:,.1f} M trained"
    without = "" if settings.teacher is None else ", without the teacher"
    yield f"memory: about {gib(memory.total)} {_of_worker(settings)} at the peak of a step{without}"
    yield require_space_of_workers(step, _disk(settings, weights))


def _of_worker(settings: TrainSettings) -> str:
    return "of each GPU" if settings.gpus_per_worker else "of CPU memory for the tensors of each worker"


def _disk(settings: TrainSettings, weights: ModelSize) -> float:
    """Return the bytes that a training writes at most."""
    states = settings.keep_last + settings.keep_best + 1
    return _WEIGHT_BYTES * weights.parameters + states * _STATE_BYTES * weights.trained


def _export(settings: ExportSettings) -> Iterator[str]:
    from infembed_ray.modeling import onnx
    from infembed_ray.modeling.encoder import InstructionEncoder

    found, step = onnx.prepare(settings)
    if (yield from state(step)):
        return
    encoder = InstructionEncoder.from_pretrained(found.path, dimensions=settings.dimensions, device="meta")
    onnx.require_exportable(encoder, settings.model)
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    yield f"graphs: {len(encoder.backbones)}, {encoder.dimension} dimensions"
    yield require_space(step, _WEIGHT_BYTES * parameters)


# --------------------------------------------------------------------------------------------------------- evaluate


def _evaluate(settings: EvaluateSettings) -> Iterator[str]:
    from infembed_ray.evaluation import inputs

    found = inputs.resolve(settings, share_corpora=False)
    step = found.step(settings)
    if (yield from state(step)):
        return
    yield from _tasks(found)
    for model in found.models:
        yield f"model {model.label}: {getattr(model.retriever, 'model', model.retriever.kind)}"
    queries, passages = found.size
    pairs = f"{counted(len(found.tasks), 'task')} x {counted(len(found.models), 'model')}"
    yield f"{pairs}: {queries:,} queries and {passages:,} passages per model"


def _tasks(found: Inputs) -> Iterator[str]:
    for task in found.tasks:
        yield f"task {task.name}: {counted(len(task.queries), 'query', 'queries')}"


def _report(settings: ReportSettings) -> Iterator[str]:
    from infembed_ray.evaluation.paper import report

    paths, step = report.prepare(settings)
    if not (yield from state(step)):
        yield f"results: {report.compose(settings, paths).summary}"


# ---------------------------------------------------------------------------------------------------------- sweep


def _sweep(settings: SweepSettings) -> Iterator[str]:
    """Check one training per row and backbone, and the evaluation of the first trial: the others differ by seed or row."""
    from infembed_ray.evaluation import inputs
    from infembed_ray.sweeps.trials import prepare

    planned, step = prepare(settings)
    if (yield from state(step)):
        return
    designs = {(t.row, t.model): t for t in planned if t.train is not None and t.seed == settings.seeds[0]}
    seeds = len(settings.seeds)
    yield f"trials: {len(planned):,}, of which {len(designs) * seeds:,} train ({counted(seeds, 'seed')} per row and model)"
    first = planned[0]
    model = first.untrained or first.train.model  # type: ignore[union-attr]
    evaluation = first.evaluate.model_copy(update={"models": {first.row: model}})
    found, *needs = check_all(
        lambda: inputs.resolve(evaluation, share_corpora=False),
        *(partial(_design, trial, step.root) for trial in designs.values()),
    )
    if needs:
        steps, memory, disk = zip(*needs, strict=True)
        yield f"steps: {seeds * sum(steps):,} in all trainings"
        largest = f", of {max(zip(memory, designs, strict=True))[1][0]}" if len(designs) > 1 else ""
        yield f"memory: about {gib(max(memory))} {_of_worker(settings.train)} at the peak of a step{largest}"
        yield require_space_of_workers(step, seeds * sum(disk), step.root / "trials")
    yield from _tasks(found)
    yield "{:,} queries and {:,} passages per trial".format(*found.size)


def _design(trial: Trial, root: Path) -> tuple[int, float, float]:
    """Check a training; return its steps, the memory of a step's peak and its disk, in bytes; InputError with its row."""
    from infembed_ray.planning.memory import ModelSize
    from infembed_ray.planning.train import peak_memory
    from infembed_ray.training import launch

    assert trial.train is not None
    try:
        inputs = launch.resolve(trial.train)
        encoder = launch.check_model(inputs.settings)
        with tempfile.TemporaryDirectory(dir=root) as directory:
            rows, _, steps = launch.lay_out(trial.train, inputs, encoder, Path(directory))
            memory = peak_memory(inputs.settings, encoder, rows).total
    except InputError as error:
        raise error.within(f"row {trial.row}, {trial.model}: ") from error
    return steps, memory, _disk(trial.train, ModelSize.of(encoder, trial.train))


# ---------------------------------------------------------------------------------------------------------- index


def _index(settings: IndexSettings) -> Iterator[str]:
    from infembed_ray.planning.index import estimate
    from infembed_ray.ray_cluster import on_a_cluster
    from infembed_ray.records.tables import data_files
    from infembed_ray.retrieval import factory, preflight
    from infembed_ray.retrieval.build import choose_build
    from infembed_ray.retrieval.index import compacted_from
    from infembed_ray.retrieval.stores.address import is_address
    from infembed_ray.retrieval.work import work_root

    if is_address(settings.output):
        yield from _index_in_engine(settings)
        return
    corpus, model, step = preflight.prepare(settings)
    work = work_root(step, settings)
    if newest := compacted_from(step)[:1]:
        yield f"output {address(newest[0])}: compacted from a build of this corpus, so there is nothing to do"
        return
    if (yield from state(step, work)):
        yield f"its files are not read; `infembed index verify {address(step.remote or step.path)}` does"
        return
    if settings.gpus_per_shard and not on_a_cluster():
        factory.require_gpu_faiss()
    (passages, more), encoder = check_all(
        lambda: preflight.count_passages(corpus, settings), lambda: preflight.check_model(settings, model)
    )
    yield f"passages: {'at least ' if more else ''}{passages:,} of {corpus}"
    each = math.ceil(passages / settings.shards)
    build = choose_build(settings, [each], encoder.dimension)
    yield f"shards: {settings.shards} of {build.factory}, {each:,} passages each on average, {encoder.dimension} dimensions"
    assert build.factory is not None  # it was chosen, or given
    text = sum(size for file in data_files(corpus, "corpus") for size in listing(file).values())
    shard = estimate(build.factory, encoder.dimension, each, -(-text // passages), precision=settings.vectors)
    encoded = passages * encoder.dimension * (2 if settings.vectors == "float16" else 4)
    if not more and isinstance(work, Path):
        yield require_space(step, settings.shards * shard.disk + encoded + 2 * text, work)


def _index_in_engine(settings: IndexSettings) -> Iterator[str]:
    from infembed_ray.retrieval import preflight

    engine, local = preflight.prepare_engine(settings)
    corpus, _, step = preflight.prepare(local)
    passages, more = preflight.count_passages(corpus, settings)
    yield f"passages: {'at least ' if more else ''}{passages:,} of {corpus}"
    there = any(version.id == step.identity for version in engine.versions())
    yield f"output {engine.address}: version {step.identity} {'exists already' if there else 'would be built'}"


# ---------------------------------------------------------------------------------------------------------- serve


def _serve(settings: ServeSettings) -> Iterator[str]:
    from infembed_ray.ray_cluster import on_a_cluster
    from infembed_ray.serving.address import require_free_port, served_fingerprint
    from infembed_ray.serving.distributed import require_cluster
    from infembed_ray.serving.plan import Plan

    plan = Plan.resolve(settings)
    for name, spec in plan.release.by_name.items():
        card, shards = spec.card, counted(len(spec.shards), "shard")
        what = "" if spec is plan.release else f"collection {name}: "
        yield f"{what}index {card.index_version}: {card.passages:,} passages in {shards}, model {card.id}"
    if len(plan.encoders) > 1:
        yield f"{len(plan.encoders)} encoders: the indexes were built by as many; each reserves resources of its own"
    for resource in ("CPU", "GPU"):
        needed = sum(replicas * each for kind, _, replicas, each in plan.reservations() if kind == resource)
        if needed:
            yield f"{resource}s: {needed:g} for all replicas together"
    if settings.config_file is not None:
        yield f"output {settings.config_file}: a config file for `serve deploy`; nothing would be started"
        return
    served = served_fingerprint(plan.url)
    if served == plan.release.fingerprint:
        yield f"API {plan.url}: serves this index with these settings, so there is nothing to do"
    else:
        require_cluster(settings, served is not None and not on_a_cluster())
        if served is None:
            require_free_port(settings.host, settings.port)
        yield f"API {plan.url}: {'new' if served is None else 'another release is served, and this one replaces it'}"


# --------------------------------------------------------------------------------------------------------- pipeline


def _pipeline(settings: PipelineSettings) -> Iterator[str]:
    from infembed_ray.pipeline.stages import check_stages

    yield from check_stages(settings, check)


VERBS: dict[str, Callable[..., Iterator[str]]] = {
    "synthesize": _synthesize,
    "analyze": _analyze,
    "mine": _mine,
    "train": _train,
    "export": _export,
    "evaluate": _evaluate,
    "sweep": _sweep,
    "report": _report,
    "index": _index,
    "serve": _serve,
    "pipeline": _pipeline,
}
"""Verb -> its check."""
