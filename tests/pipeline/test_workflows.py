"""The same stages as files of workflow engines: the commands in them give the settings of the pipeline's stages."""

import ast
import shlex

import jinja2
import pytest
import yaml

from infembed_ray.cli.main import VERBS, main
from infembed_ray.config.pipeline import PipelineSettings
from infembed_ray.pipeline import stages, workflows
from tests.pipeline.test_stages import ALL


@pytest.fixture
def settings():
    return PipelineSettings.from_mapping(
        ALL | {"train": {"model": 'it\'s a "model"', "objective": "uni{P}", "seed": 7}}
    )


def test_a_command_loads_the_settings_of_its_stage(settings):
    for stage, command in workflows.commands(settings).items():
        head, words = shlex.split(command)[:6], shlex.split(command)[6:]
        assert head == ["ray", "job", "submit", "--", "infembed", stage]
        loaded = VERBS[stage].settings.load(None, words)
        assert loaded.model_dump() == stages.section(settings, stage, {}).model_dump()


def test_an_engine_finds_nothing_to_render_in_a_command():
    texts = ["{{ds}}", "{{{query}}}", "{% raw %}", "{# {{inputs.parameters.command}} #}"]
    given = {"model": "/m", "sources": {text: {"path": "/r"} for text in texts}}
    settings = PipelineSettings.from_mapping(ALL | {"train": given})
    command = workflows.commands(settings)["train"]
    assert "{{" not in command
    assert jinja2.Template(command).render() == command
    assert list(VERBS["train"].settings.load(None, shlex.split(command)[6:]).sources) == texts


def test_a_model_is_uploaded_after_the_gates_by_the_finished_training_again():
    settings = PipelineSettings.from_mapping(ALL | {"train": {"model": "/m", "push_to_hub": "org/made"}})
    commands = workflows.commands(settings)
    assert list(commands) == [*settings.stages[:-1], "upload", "serve"]
    loaded = [VERBS["train"].settings.load(None, shlex.split(commands[task])[6:]) for task in ("train", "upload")]
    assert [each.push_to_hub for each in loaded] == [None, "org/made"]
    assert loaded[0].model_dump() == loaded[1].model_copy(update={"push_to_hub": None}).model_dump()


def test_an_argo_workflow_runs_the_commands_one_after_the_other(settings):
    workflow = yaml.safe_load(workflows.as_argo(settings))
    pipeline, job = workflow["spec"]["templates"]
    steps = {step["name"]: step["arguments"]["parameters"][0]["value"] for (step,) in pipeline["steps"]}
    assert steps == workflows.commands(settings)
    assert job["container"]["args"] == ["{{inputs.parameters.command}}"]


def test_an_argo_workflow_reaches_a_cluster_with_or_without_a_token(settings):
    spec = yaml.safe_load(workflows.as_argo(settings))["spec"]
    assert {"name": "auth", "value": "token"} in spec["arguments"]["parameters"]
    environment = {entry["name"]: entry.get("value") for entry in spec["templates"][1]["container"]["env"]}
    assert environment["RAY_AUTH_MODE"] == "{{workflow.parameters.auth}}"


def test_an_airflow_dag_has_the_commands_in_order(settings):
    tree = ast.parse(workflows.as_airflow(settings))
    (jobs,) = (node.value for node in tree.body if isinstance(node, ast.Assign))
    assert list(ast.literal_eval(jobs).items()) == list(workflows.commands(settings).items())


def test_the_command_prints_the_file_and_runs_nothing(tmp_path, capsys):
    seeds = tmp_path / "seeds.jsonl"
    seeds.write_text("")
    assert main(["pipeline", "--workflow", "argo", f"output={tmp_path / 'out'}", f"synthesize.seeds={seeds}"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["kind"] == "Workflow"
    assert not (tmp_path / "out").exists()
