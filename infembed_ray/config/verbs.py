"""The verbs that take settings: their help, their function and their class of settings.

Modules are imported only when a verb needs them.
"""

from __future__ import annotations

import importlib
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

    @property
    def settings(self) -> type[Settings]:
        loaded: type[Settings] = load(f"config.{self.settings_class}")
        return loaded

    def run(self, settings: Settings, **more: Any) -> Any:
        return load(self.function)(settings, **more)


VERBS = {
    "synthesize": Verb("seeds -> InF-IR records", "synthesis.distributed:run", "synthesis:SynthesizeSettings"),
    "analyze": Verb(
        "records -> quality report, and the records that stay", "analysis.analyze:run", "analysis:AnalyzeSettings"
    ),
    "mine": Verb("tuples + index -> tuples with hard negatives", "mining.distributed:run", "mining:MineSettings"),
    "train": Verb("records + backbone -> checkpoint", "training.launch:run", "training:TrainSettings"),
    "export": Verb("checkpoint -> ONNX graph", "modeling.onnx:run", "training:ExportSettings"),
    "evaluate": Verb("checkpoints + records -> tables", "evaluation.distributed:run", "evaluation:EvaluateSettings"),
    "sweep": Verb("objectives x backbones x seeds -> one table", "sweeps.distributed:run", "sweeps:SweepSettings"),
    "report": Verb(
        "results -> the paper's tables and figures", "evaluation.paper.report:run", "evaluation:ReportSettings"
    ),
    "index": Verb("checkpoint + corpus -> FAISS shards", "retrieval.distributed:run", "retrieval:IndexSettings"),
    "serve": Verb("checkpoint + index -> HTTP API", "serving.distributed:run", "serving:ServeSettings"),
    "pipeline": Verb(
        "several stages, with gates, to a served release", "pipeline.stages:run", "pipeline:PipelineSettings"
    ),
}
"""Stages. Each has a script and a settings file in jobs/, and a check in module `check`."""

MAINTENANCE = {
    "index compact": Verb(
        "index + its document changes -> next version", "retrieval.distributed:compact", "retrieval:CompactSettings"
    ),
    "manifests": Verb(
        "settings of the verbs -> Kubernetes manifests", "manifests.render:run", "manifests:ManifestsSettings"
    ),
}
"""Verbs that are no stages: they have no job script and no check of their own."""

PLANS = {
    "train": Verb("memory, time and cost of a training", "planning.train:plan", "planning:PlanTrainSettings"),
    "index": Verb(
        "types, memory, disk, time and cost of an index", "planning.index:plan", "planning:PlanIndexSettings"
    ),
}
"""What `infembed plan` estimates. A plan prints; it runs and writes nothing."""
