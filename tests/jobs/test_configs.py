"""The settings files of jobs/configs load, and use the shared file system of cluster.yaml."""

from pathlib import Path

import pytest

from infembed_ray.config.training import TrainSettings
from infembed_ray.config.verbs import VERBS

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
