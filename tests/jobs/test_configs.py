"""The settings files of jobs/configs load, and use the shared file system of cluster.yaml."""

import re
from pathlib import Path

import pytest

from infembed_ray.config.planning import PlanTrainSettings
from infembed_ray.config.training import TrainSettings
from infembed_ray.config.verbs import VERBS
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.modeling.tokenizer import render
from infembed_ray.planning.backbones import architectures, load
from infembed_ray.planning.memory import GIB
from infembed_ray.planning.train import plan

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "jobs" / "configs"
SHARED_DIRECTORY = "/mnt/infembed/"


def test_every_verb_has_a_script_and_a_config():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*VERBS, "manifests"}
    assert {path.stem for path in (ROOT / "jobs").glob("*.py")} == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_inputs_and_outputs_lie_on_the_shared_file_system(verb):
    settings = VERBS[verb].settings.load(str(CONFIGS / f"{verb}.yaml")).model_dump()
    paths = (settings.get(name) for name in ("seeds", "records", "corpus", "index", "output"))
    places = [path for path in paths if isinstance(path, str)]  # seeds of a sweep are numbers
    assert places
    assert all(place.startswith(SHARED_DIRECTORY) for place in places)
    mounted = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
    assert SHARED_DIRECTORY.rstrip("/") in mounted


def test_the_recipe_of_obedience_loads():
    settings = TrainSettings.load(str(CONFIGS / "recipes" / "obedience.yaml"))
    assert {source.path.rpartition("/")[2] for source in settings.sources.values()} == {
        "train.jsonl",
        "train_reworded.jsonl",
        "train_more.jsonl",
    }
    assert settings.output.startswith(SHARED_DIRECTORY)


@pytest.mark.integration  # building a backbone takes seconds, also without its weights
def test_the_recipe_of_qwen3_embedding_fits_a_gpu_and_its_header_states_the_plan():
    path = CONFIGS / "recipes" / "qwen3-embedding-4b-lora.yaml"
    settings = TrainSettings.load(str(path))
    encoder, published = load(settings), architectures()[settings.model]
    trained = sum(p.numel() for p in encoder.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in encoder.parameters()) - trained
    assert whole == published["parameters"] * 1e9
    assert 0 < trained < 0.02 * whole
    baseline = baselines.resolve("x", "qwen3-embedding-4b")
    text = settings.template and render(settings.template, "{instruction}", "{query}")
    assert text == str(baseline.instructed_query).replace("Query:", "Query: ")  # the card has no space here
    made = plan(PlanTrainSettings.load(str(path)))
    assert made.fits
    stated = re.findall(r"^# .*: ([\d.]+) GiB and ([\d.]+) hours", path.read_text(), re.MULTILINE)
    assert [tuple(map(float, each)) for each in stated] == [
        pytest.approx((made.memory.total / GIB, made.hours), rel=0.02)
    ]
    commands = re.findall(r"^#   infembed (\w+)", path.read_text(), re.MULTILINE)
    assert commands == ["plan", "train", "evaluate", "report"]
