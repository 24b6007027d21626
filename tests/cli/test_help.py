"""Help, YAML and JSON Schema of settings."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from infembed_ray.cli import help
from infembed_ray.cli.main import MAINTENANCE, PLANS, VERBS, main
from infembed_ray.config.synthesis import SynthesizeSettings

CONFIGS = Path(__file__).parents[2] / "jobs" / "configs"
JOBS = [*sorted(CONFIGS.glob("*.yaml")), *sorted((CONFIGS / "paper").glob("*.yaml"))]


def verb_of(file: Path) -> str:
    return file.stem if file.parent == CONFIGS else "sweep" if file.stem.startswith("table") else "train"


@pytest.mark.parametrize("file", JOBS, ids=lambda file: file.stem)
def test_a_printed_config_gives_the_same_settings(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (VERBS | MAINTENANCE)[verb_of(file)].settings
    assert main([verb_of(file), "--config", str(file), "--print-config"]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert settings.load(str(printed)) == settings.load(str(file))
    assert set(yaml.safe_load(printed.read_text())) == set(settings.model_fields)


def test_the_schema_of_an_evaluation_accepts_every_form_of_a_retriever(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "evaluate"]) == 0
    models = {
        "name": "bm25",
        "encoder": {"model": "runs/train"},
        "kind": {"kind": "bm25"},
        "over": {"baseline": "bm25"},
    }
    jsonschema.validate({"models": models}, json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("verb", VERBS)
def test_a_schema_accepts_the_job_files_and_rejects_unknown_keys(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", verb]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for file in JOBS:
        if verb_of(file) == verb:
            validator.validate(yaml.safe_load(file.read_text()))
    assert not validator.is_valid({"no_such_setting": 1})
    described = schema["properties"]
    assert {name: value["description"] for name, value in described.items()} == {
        name: field.description for name, field in VERBS[verb].settings.model_fields.items()
    }


def test_the_help_of_a_section_has_type_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "train", "lora"]) == 0
    shown = capsys.readouterr().out
    assert "lora.rank: whole number, default 16\n      rank of the update of a weight matrix" in shown
    assert "lora.target_modules: list of text, default []" in shown
    assert main(["help", "plan", "train", "hardware.nodes"]) == 0
    assert capsys.readouterr().out.startswith("hardware.nodes: whole number, default 1\n")


def test_the_help_shows_the_default_that_a_nested_key_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "synthesize", "judge"]) == 0
    assert "judge.model: text, default o4-mini" in capsys.readouterr().out
    assert main(["help", "synthesize", "generator.model"]) == 0
    assert capsys.readouterr().out.startswith("generator.model: text, default gpt-4o-mini\n")
    lines = {line.split()[0]: line for line in help.overview(SynthesizeSettings)}
    assert lines["generator.model"].endswith("(default gpt-4o-mini)")
    assert lines["steps.LABEL.model"].endswith("(required)")


def test_the_help_of_a_mapping_describes_all_that_it_can_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "evaluate", "models"]) == 0
    shown = capsys.readouterr().out
    assert "models.LABEL.bm25: Bm25" in shown
    assert "models.LABEL.pair: text" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train lroa", "lroa: `infembed train` has no such setting: did you mean lora?"),
        ("train lora.rnak", "lora.rnak: `infembed train` has no such setting: did you mean rank?"),
        ("train seed.x", "seed.x: `infembed train` has no such setting: seed is one value"),
    ],
)
def test_an_unknown_section_gets_a_suggestion(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", *words.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", ["", "train", "index compact", "plan serve", "journal"])
def test_help_of_a_verb_is_its_help_option(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for arguments in (["help", *words.split()], [*words.split(), "--help"]):
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


def test_the_names_of_settings_are_those_that_overrides_take() -> None:
    found = list(help.names(PLANS["train"].settings))
    assert {"records", "lora.rank", "hardware.nodes", "validation.every"} <= set(found)
    assert len(found) == len(set(found))
