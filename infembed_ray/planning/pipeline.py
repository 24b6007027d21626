"""`infembed plan pipeline`: hours, cost and first bottleneck of every stage, by the planners of the single stages.

Each stage is planned for what the one before it makes: training for the records that the synthesis keeps, index and API for
the trained model, and the index in the layout that answers the API's load. Stages run one after another.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infembed_ray.config.planning import (
    Mix,
    PlanIndexSettings,
    PlannedCollection,
    PlannedServing,
    PlannedSynthesis,
    PlannedTraining,
    PlanPipelineSettings,
)
from infembed_ray.errors import InputError
from infembed_ray.llm import prices
from infembed_ray.planning import cost, index, serve, train
from infembed_ray.planning.backbones import TOKENS_PER_WORD
from infembed_ray.planning.shard_estimate import BUILD_THREADS
from infembed_ray.planning.tables import as_json as as_json
from infembed_ray.planning.tables import table, usd
from infembed_ray.progress import counted
from infembed_ray.records.tables import Seed
from infembed_ray.storage.steps import resolve_input
from infembed_ray.synthesis import estimate
from infembed_ray.synthesis.pipeline import model_of, steps_of
from infembed_ray.synthesis.preflight import Job
from infembed_ray.synthesis.sources import SeedSurvey

_COLLECTION = (*PlannedCollection.model_fields, "shards", "dimensions", "factory", "recall_floor")
"""Settings of the index that the API's plan takes from it, `tokens_per_s` excepted: it is of another GPU."""
_WRITTEN = {"instruction": "instruction", "query": "query", "hard": "passage"}
"""First word of a generated column -> the field of `Mix` with its tokens."""


@dataclass(frozen=True)
class StagePlan:
    """One stage.

    Attributes:
        work: what it makes of what.
        layout: settings, or nodes, that the figures are of.
        hours: None for the API, which stays.
        usd: in all, of the API per month; None: unknown.
        bottleneck: what limits it first.
        obstacles: why it cannot run; empty if it can.
    """

    name: str
    work: str
    layout: str
    hours: float | None
    usd: float | None
    bottleneck: str
    obstacles: tuple[str, ...] = ()


@dataclass(frozen=True)
class PipelinePlan:
    """The stages that have a planner, on each number of GPU nodes.

    Attributes:
        nodes: the settings' own number; `gpus`: of a node.
        stages: number of GPU nodes -> stages in order.
        unplanned: stages of the pipeline without a planner.
        sources: where the figures come from.
    """

    nodes: int
    gpus: str
    stages: dict[int, tuple[StagePlan, ...]]
    unplanned: tuple[str, ...]
    sources: tuple[str, ...]


def plan(settings: PlanPipelineSettings) -> PipelinePlan:
    """Plan every stage; nothing is run.

    Raises:
        InputError: the settings do not fit each other or a model, or no stage has a planner.
    """
    planned = [stage for stage in settings.stages if stage in ("synthesize", "train", "index", "serve")]
    if not planned:
        raise InputError(
            f"no stage with a planner: {', '.join(settings.stages)}; add synthesize, train, index or serve"
        )
    own = settings.hardware.nodes
    records: int | None = None
    first: list[StagePlan] = []
    last: list[StagePlan] = []
    if settings.synthesize is not None:
        records, written = _synthesis(settings.synthesize, settings.train.mix if settings.train else Mix())
        first.append(written)
    served: serve.ServeOption | None = None
    if settings.serve is not None:
        served, answering = _api(settings, settings.serve)
        last.append(answering)
    stages: dict[int, tuple[StagePlan, ...]] = {}
    for nodes in sorted({own, *settings.nodes}):
        try:
            middle = list(_on_gpus(settings, nodes, records, served))
        except InputError as error:
            if nodes == own:
                raise
            middle = [StagePlan("train, index", "", "", None, None, "", tuple(error.args))]
        stages[nodes] = (*first, *middle, *last)
    return PipelinePlan(
        own,
        f"{settings.hardware.gpus_per_node} x {settings.hardware.device}",
        stages,
        tuple(stage for stage in settings.stages if stage not in planned),
        tuple(_sources(settings)),
    )


def _on_gpus(
    settings: PlanPipelineSettings, nodes: int, records: int | None, served: serve.ServeOption | None
) -> Iterator[StagePlan]:
    """Plan the stages that the number of GPU nodes changes."""
    if settings.train is not None:
        yield _training(settings, settings.train, nodes, records)
    if settings.index is not None:
        yield _indexing(settings, nodes, served)


def _synthesis(settings: PlannedSynthesis, mix: Mix) -> tuple[int, StagePlan]:
    """Return the records that are kept, and the stage: `infembed check synthesize` with answers of their usual lengths."""
    count, limits = settings.seed_count, settings.limits
    if settings.measured is not None:
        share, calls, tokens, usd_all, hours = _measured(settings)
    else:
        made = _estimate(settings, mix)
        share, calls, usd_all = cost.assumed("kept_share"), made.calls, made.usd
        tokens = made.prompt_tokens + (made.answer_tokens or 0)
        hours = None
        if settings.endpoint.serve is not None:
            raise InputError(
                "synthesize.endpoint.serve: the speed of a served model is only known by measurement; run a canary "
                "(canary.stop=true) and set synthesize.measured to its forecast.json"
            )
    seconds = {
        "limits.requests_per_minute": 60 * calls / (limits.requests_per_minute or math.inf),
        "limits.tokens_per_minute": 60 * tokens / (limits.tokens_per_minute or math.inf),
        "the driver's CPU": calls * 1e-3 * cost.assumed("driver_ms"),
        "the actors' CPUs": calls * 1e-3 * cost.assumed("actor_ms") / settings.actors,
    }
    slots = limits.in_flight or settings.actors * settings.in_flight
    if settings.batches is not None:
        waves = max(len(steps_of(settings)), tokens / (settings.batches.enqueued_tokens or math.inf))
        seconds = {"the Batch API's window": 3600 * waves * cost.assumed("batch_h")}
    elif hours is not None:
        seconds["latency, as measured"] = 3600 * hours
    else:
        answer = cost.assumed("llm_token_s") * (made.answer_tokens or 0)
        seconds[f"latency with {slots:,} requests in flight"] = (
            calls * cost.assumed("llm_first_token_s") + answer
        ) / slots
    slowest = max(seconds, key=lambda limit: seconds[limit])
    if (served := settings.endpoint.serve) is not None:
        price = served.usd_per_gpu_hour
        usd_all = None if price is None else seconds[slowest] / 3600 * served.gpus * price
    over = limits.budget_usd is not None and usd_all is not None and usd_all > limits.budget_usd
    kept = max(1, round(share * count))
    return kept, StagePlan(
        "synthesize",
        f"{count:,} seeds -> {kept:,} records, {calls:,.0f} calls, {tokens / 1e6:,.0f} M tokens",
        f"actors={settings.actors} in_flight={settings.in_flight}",
        seconds[slowest] / 3600,
        usd_all,
        slowest,
        (f"limits.budget_usd={limits.budget_usd:g} ends it earlier",) if over else (),
    )


def _measured(settings: PlannedSynthesis) -> tuple[float, float, float, float | None, float | None]:
    """Return the share kept, calls, tokens, USD and hours of all seeds by a canary's forecast."""
    file = resolve_input(settings.measured or "", "synthesize.measured")
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
        scale = settings.seed_count / found["seeds"]
        share, calls, tokens = (found[name][0] for name in ("share_kept", "calls", "tokens"))
        spent, hours = (scale * found[name][0] if found[name] else None for name in ("usd", "hours"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(
            f"synthesize.measured={settings.measured}: no forecast; give OUTPUT/latest/canary/forecast.json"
        ) from error
    return share, scale * calls, scale * tokens, spent, hours


def _estimate(settings: PlannedSynthesis, mix: Mix) -> estimate.Estimate:
    """Estimate calls, tokens and price of seeds of the usual lengths; every row takes all steps."""

    def words(tokens: int) -> str:
        return " ".join(["words"] * round(tokens / TOKENS_PER_WORD))

    lengths = {}
    for step in steps_of(settings):
        kind = _WRITTEN.get(step.partition("_")[0])
        usual = getattr(mix, kind) if kind else round(cost.assumed("judge_tokens"))
        model = model_of(settings, step)[1]
        lengths[step] = model.model_copy(update={"max_tokens": min(usual, model.max_tokens or usual)})
    endpoint = settings.endpoint.model_copy(update={"api_key_env": None})  # a plan needs no key
    usual_answers = settings.model_copy(update={"steps": lengths, "endpoint": endpoint})
    seed, survey = Seed("0", words(mix.query), words(mix.passage)), SeedSurvey(settings.seed_count, (), {})
    with tempfile.TemporaryDirectory() as journal:
        return estimate.estimate(
            Job(usual_answers, [seed], survey, prices.load(settings.prices), Path(journal), settings.replay)
        )


def _training(settings: PlanPipelineSettings, own: PlannedTraining, nodes: int, records: int | None) -> StagePlan:
    changed: dict[str, Any] = {"hardware": _hardware(settings, own, nodes)}
    if records is not None and settings.maker("train", "records"):
        changed["mix"] = own.mix.model_copy(update={"records": records})
    made = train.plan(own.model_copy(update=changed))
    work = f"{made.work.steps:,} steps of {made.work.records * made.work.batches:,} records"
    if made.chosen is None:
        nearest = min((option.obstacles for option in made.plans), key=len)
        return StagePlan("train", work, "", None, None, "memory", nearest)
    best = made.plans[made.chosen]
    totals = made.totals(best)
    return StagePlan("train", work, best.overrides, totals["hours"], totals["usd"], best.bottleneck)


def _indexing(settings: PlanPipelineSettings, nodes: int, served: serve.ServeOption | None) -> StagePlan:
    own = settings.index
    assert own is not None
    changed: dict[str, Any] = {"hardware": _hardware(settings, own, nodes), **_of_model(settings, own)}
    if served is not None:
        shard = served.shard
        changed |= {"shards": served.shards, "dimensions": shard.dimension, "factory": shard.factory}
    made = index.plan(own.model_copy(update=changed))
    work = f"{made.passages:,} passages, {made.encoding['tokens'] / 1e9:,.1f} G tokens"
    number = made.asked if served is not None else made.chosen
    if number is None:
        reason = made.refusal or "no layout fits: infembed plan index names the nearest"
        return StagePlan("index", work, "", None, None, "memory", (reason,))
    option = made.options[number]
    if option.obstacles:
        return StagePlan("index", work, option.overrides, None, None, "memory", option.obstacles)
    (node,) = cost.nodes(option.node)
    at_once = option.nodes * max(1, node.vcpus // BUILD_THREADS)
    building = math.ceil(option.shards / at_once) * option.shard.build_hours
    encoding = made.encoding["hours"]
    return StagePlan(
        "index",
        work,
        option.overrides,
        encoding + building,
        made.encoding["usd"] + building * option.nodes * node.usd_per_hour,
        f"GPUs that encode, {encoding:,.1f} h"
        if encoding >= building
        else f"CPUs that build {option.shards} shards on {option.nodes} x {option.node}, {building:,.1f} h",
    )


def _api(settings: PlanPipelineSettings, own: PlannedServing) -> tuple[serve.ServeOption | None, StagePlan]:
    """Return the chosen option, and the stage; None if nothing is fast enough."""
    changed: dict[str, Any] = {}
    if settings.index is not None:
        changed = {name: getattr(settings.index, name) for name in _COLLECTION if name != "tokens_per_s"}
        changed = {name: value for name, value in changed.items() if name not in own.model_fields_set}
        changed |= {"model": own.model or settings.index.model or None}
    made = serve.plan(own.model_copy(update=changed | _of_model(settings, own.model_copy(update=changed))))
    work = f"{made.passages:,} passages, {made.qps:g} searches per second within {made.p99_ms:g} ms"
    if made.chosen is None:
        nearest = min(made.options, key=lambda option: (len(option.obstacles), option.p99))
        return None, StagePlan("serve", work, nearest.overrides, None, None, "", nearest.obstacles)
    best = made.options[made.chosen]
    busiest = max(best.tiers, key=lambda tier: tier.busy)
    where = f"{best.nodes} x {best.node}" + (f", {best.gpus} x {made.device}" if best.gpus else "")
    return best, StagePlan("serve", work, where, None, best.usd_month, f"{busiest.name}, {busiest.busy:.0%} busy")


def _of_model(settings: PlanPipelineSettings, own: PlanIndexSettings | PlannedServing) -> dict[str, Any]:
    """Return the settings that follow from the trained model."""
    if settings.train is None or own.model:
        return {}
    return {"model": settings.train.model, "matryoshka": own.matryoshka or settings.train.matryoshka}


def _hardware(settings: PlanPipelineSettings, own: PlannedTraining | PlanIndexSettings, nodes: int) -> Any:
    chosen = own.hardware if "hardware" in own.model_fields_set else settings.hardware
    return chosen.model_copy(update={"nodes": nodes})


def _sources(settings: PlanPipelineSettings) -> Iterator[str]:
    if (synthesis := settings.synthesize) is not None:
        yield f"prices of tokens: llm/prices.yaml, {prices.load(synthesis.prices).as_of}"
        yield (
            f"synthesis: measured by {synthesis.measured}"
            if synthesis.measured
            else "synthesis: share kept of the paper (section 4.1), lengths of its Table 1; reasoning and latency are assumed, "
            "2026-11-24; CPU per request was measured on 2026-11-23 (benchmarks/results/2026-11-23-synthesis_fanout.md)"
        )
    if settings.train is not None or settings.index is not None:
        measured = settings.train is not None and (settings.train.mfu or settings.train.measured)
        yield (
            "GPUs: peaks, links and list prices, general knowledge of 2026-11-21; "
            f"{'the MFU of the training is given or measured' if measured else 'kernels are assumed to reach 40 % of the peak'}"
        )
    if settings.index is not None or settings.serve is not None:
        yield (
            "index and API: searches and builds were measured on one thread of an AMD EPYC on 2026-11-22 and 2026-11-23; "
            "node prices are general knowledge of 2026-11-22"
        )


def as_text(made: PipelinePlan) -> str:
    """Format the plan for people: a table by stage, one by number of nodes."""
    rows = [
        {
            "stage": stage.name,
            "hours": _hours(stage.hours),
            "USD": usd(stage.usd) + " a month" * (stage.name == "serve" and stage.usd is not None),
            "first bottleneck": "; ".join(filter(None, (stage.bottleneck, *stage.obstacles))),
            "work": stage.work,
            "layout": stage.layout,
        }
        for stage in made.stages[made.nodes]
    ]
    lines = [f"On {counted(made.nodes, 'node')} of {made.gpus}:", "", *table(rows), ""]
    lines += [*table([_row(nodes, stages) for nodes, stages in made.stages.items()]), ""]
    if made.unplanned:
        lines.append(f"Not planned: {', '.join(made.unplanned)}.")
    return "\n".join([*lines, "Where the figures come from (planning/hardware.yaml has each of them):", *made.sources])


def _row(nodes: int, stages: tuple[StagePlan, ...]) -> dict[str, str]:
    """Cells of a number of nodes by their headings; the API, which stays, is left out."""
    built = {stage.name: stage for stage in stages if stage.name != "serve"}
    hours, spent = ([getattr(stage, unit) for stage in built.values()] for unit in ("hours", "usd"))
    slowest = max(built.values(), key=lambda stage: stage.hours or 0.0, default=None)
    obstacles = [
        f"{name}: {fault}" for name, stage in built.items() if name != "synthesize" for fault in stage.obstacles
    ]
    return {
        "nodes": str(nodes),
        **{f"{name} h": _hours(built[name].hours) if name in built else "-" for name in ("train", "index")},
        "all h": _hours(None if None in hours else math.fsum(hours)),
        "all USD": usd(None if None in spent else math.fsum(spent)),
        "first bottleneck": f"{slowest.name}: {slowest.bottleneck}" if slowest and None not in hours else "-",
        "fits": "; ".join(obstacles) or "yes",
    }


def _hours(hours: float | None) -> str:
    return "-" if hours is None else f"{hours:,.1f}"
