"""The verbs that take settings: their help, their function and their class of settings.

Modules are imported only when a verb needs them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infembed_ray.config.base import Settings


def project_files() -> Path:
    """Return the directory with jobs/, cluster.yaml and constraints.txt: in a wheel the package's copy, else the checkout."""
    package = Path(__file__).parents[1]
    return package / "files" if (package / "files").is_dir() else package.parent


def load(path: str) -> Any:
    """Import `module:name` below infembed_ray."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"infembed_ray.{module}"), name)


@dataclass(frozen=True)
class Verb:
    """A command that takes settings."""

    help: str
    function: str
    """`module:name` of the function of the settings, below infembed_ray."""
    settings_class: str
    """`module:name` of the settings, below infembed_ray.config."""
    example: str = ""
    """One command that works, without `infembed`."""
    dry_run: str = ""
    """`module:name` of the function of the settings that yields what a run would do, line by line; default: `describe` in the
    module of `function`. It calls the stage's own checks, and writes, probes and starts nothing."""

    @property
    def settings(self) -> type[Settings]:
        return load(f"config.{self.settings_class}")

    def run(self, settings: Settings, **more: Any) -> Any:
        return load(self.function)(settings, **more)

    def describe(self, settings: Settings, **more: Any) -> Iterator[str]:
        """Yield what a run would do; InputError for every mistake that is found together."""
        return load(self.dry_run or f"{self.function.partition(':')[0]}:describe")(settings, **more)


VERBS = {
    "synthesize": Verb(
        "make InF-IR records from seeds with LLMs",
        "synthesis.distributed:run",
        "synthesis:SynthesizeSettings",
        "synthesize seeds=seeds.jsonl output=runs/records limits.budget_usd=50",
        "synthesis.preflight:describe",
    ),
    "analyze": Verb(
        "report the quality of records, and keep the good ones",
        "analysis.analyze:run",
        "analysis:AnalyzeSettings",
        "analyze records=runs/records output=runs/analysis",
    ),
    "mine": Verb(
        "add hard negatives to tuples from an index",
        "mining.distributed:run",
        "mining:MineSettings",
        "mine records=runs/records index=runs/index output=runs/mined",
    ),
    "train": Verb(
        "train an encoder on records",
        "training.launch:run",
        "training:TrainSettings",
        "train records=runs/records model=intfloat/e5-base-v2 output=runs/model",
        "planning.train:describe",
    ),
    "export": Verb(
        "write a checkpoint as an ONNX graph",
        "modeling.onnx:run",
        "training:ExportSettings",
        "export model=runs/model output=runs/onnx",
    ),
    "evaluate": Verb(
        "measure models and baselines on tasks",
        "evaluation.distributed:run",
        "evaluation:EvaluateSettings",
        "evaluate models.trained=runs/model models.words=bm25 records=runs/records split=test output=runs/scores",
        "evaluation.inputs:describe",
    ),
    "sweep": Verb(
        "train and evaluate objectives x backbones x seeds",
        "sweeps.distributed:run",
        "sweeps:SweepSettings",
        "sweep --config jobs/configs/sweep.yaml",
    ),
    "report": Verb(
        "show results next to the paper's tables and figures",
        "evaluation.paper.results_report:run",
        "evaluation:ReportSettings",
        "report results.ours=runs/scores output=runs/report",
    ),
    "index": Verb(
        "encode a corpus and build its index",
        "retrieval.distributed:run",
        "retrieval:IndexSettings",
        "index corpus=corpus.jsonl model=runs/model output=runs/index",
        "planning.index:describe",
    ),
    "serve": Verb(
        "serve an index as an HTTP API",
        "serving.distributed:run",
        "serving:ServeSettings",
        "serve index=runs/index",
    ),
    "pipeline": Verb(
        "run several stages, with gates, up to a served release",
        "pipeline.stages:run",
        "pipeline:PipelineSettings",
        "pipeline --config jobs/configs/pipeline.yaml",
    ),
}
"""Stages. Each has a script and a settings file in jobs/."""

MAINTENANCE = {
    "index compact": Verb(
        "fold an index's document changes into its next version",
        "retrieval.distributed:compact",
        "retrieval:CompactSettings",
        "index compact index=runs/index",
        "retrieval.compaction:describe",
    ),
    "manifests": Verb(
        "write Kubernetes manifests for settings files",
        "manifests.render:run",
        "manifests:ManifestsSettings",
        "manifests --config jobs/configs/manifests.yaml",
    ),
}
"""Verbs that are no stages: they have no job script."""

PLANS = {
    "plan train": Verb(
        "estimate memory and time of a training",
        "planning.train:plan",
        "planning:PlanTrainSettings",
        "plan train model=Qwen/Qwen2.5-7B precision=bf16 workers=8",
    ),
    "plan index": Verb(
        "estimate types, memory and disk of an index",
        "planning.index:plan",
        "planning:PlanIndexSettings",
        "plan index model=Qwen/Qwen2.5-7B passages=1000000",
    ),
}
"""Plans. A plan prints; it runs and writes nothing."""
