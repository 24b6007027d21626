"""The recipes of jobs/configs/paper load, match their backbones, and state the memory that the planner computes."""

import re

import pytest
import torch

from infembed_ray.config.evaluation import EvaluateSettings, ReportSettings
from infembed_ray.config.planning import PlanTrainSettings
from infembed_ray.config.sweeps import SweepSettings
from infembed_ray.config.training import TrainSettings
from infembed_ray.evaluation.paper.sheets import COLUMNS, TABLES
from infembed_ray.evaluation.tasks import catalogue
from infembed_ray.planning.backbones import architectures, load
from infembed_ray.planning.train import plan
from infembed_ray.storage.steps import GIB
from infembed_ray.sweeps.distributed import rows
from infembed_ray.training.losses import Objective
from tests.jobs.test_configs import CONFIGS, SHARED_DIRECTORY

pytestmark = pytest.mark.integration  # building a backbone takes seconds, also without its weights

OTHERS = ("table", "evaluate", "report")
RECIPES = sorted(path for path in (CONFIGS / "paper").glob("*.yaml") if not path.stem.startswith(OTHERS))
SWEEPS = sorted((CONFIGS / "paper").glob("table*.yaml"))


def test_every_backbone_of_tables_2_and_5_has_a_recipe():
    others = {"Qwen/Qwen2.5-32B", "Qwen/Qwen3-Embedding-4B"}
    assert {TrainSettings.load(str(path)).model for path in RECIPES} == set(architectures()) - others


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_matches_its_backbone_and_its_header_the_plan(path):
    settings = TrainSettings.load(str(path))
    assert settings.output == f"{SHARED_DIRECTORY}checkpoints/{path.stem}"
    Objective.from_settings(settings)
    encoder = load(settings)
    assert encoder.device == torch.device("meta")
    assert encoder.pooling == settings.pooling
    published = architectures()[settings.model]
    parameters = sum(p.numel() for p in encoder.parameters())
    if published.get("with_head"):
        parameters += encoder.backbone.config.vocab_size * encoder.dimension
    # Published in billions, rounded or truncated to these digits.
    assert parameters / 1e9 == pytest.approx(published["parameters"], abs=1e-3 if published["parameters"] < 1 else 1e-2)
    (stated,) = re.findall(r"^# Memory of a GPU .*: ([\d.]+) GiB", path.read_text(), re.MULTILINE)
    made = plan(PlanTrainSettings.load(str(path)))
    assert made.fits
    assert float(stated) == pytest.approx(made.memory.total / GIB, rel=0.02)


def test_the_evaluation_has_every_recipe_under_the_label_of_its_row():
    models = EvaluateSettings.load(str(CONFIGS / "paper" / "evaluate.yaml")).models
    assert set(models) <= {row.name for row in TABLES["2"].rows} | {row.name for row in TABLES["5"].rows}
    outputs = {TrainSettings.load(str(path)).output for path in RECIPES}
    assert {model for label, model in models.items() if label.startswith("InF-Embed")} == outputs
    results = ReportSettings.load(str(CONFIGS / "paper" / "report.yaml")).results
    made = {SweepSettings.load(str(path)).output for path in SWEEPS}
    assert set(results.values()) == {EvaluateSettings.load(str(CONFIGS / "paper" / "evaluate.yaml")).output, *made}


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_sweep_has_the_rows_and_backbones_of_its_table(path):
    settings = SweepSettings.load(str(path))
    if path.stem == "table4":
        assert list(settings.models.values()) == ["Qwen/Qwen2.5-1.5B"]
        assert len(rows(settings)) == 4
    else:
        assert len(rows(settings)) == 11
        assert len(settings.models) == 7
    assert set(settings.models.values()) <= set(architectures())
    assert settings.train.workers * settings.train.gpus_per_worker == 8
    columns = TABLES[path.stem.removeprefix("table")].columns
    needed = {task for column in columns for task, _ in COLUMNS[column]}
    assert needed <= set(catalogue.expand(settings.evaluate.tasks))
