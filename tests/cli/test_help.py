"""Help and YAML of settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from infembed_ray.cli import help
from infembed_ray.cli.main import main
from infembed_ray.config.verbs import MAINTENANCE, VERBS

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


def test_the_help_of_a_section_has_type_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "lora"]) == 0
    shown = capsys.readouterr().out
    assert "lora.rank: whole number, default 16, minimum 1\n      rank of the update of a weight matrix" in shown
    assert "lora.target_modules: list of text, default []" in shown
    assert main(["plan", "train", "--help", "epoch_records"]) == 0
    assert capsys.readouterr().out.startswith("epoch_records: whole number, default 38759, minimum 1\n")


def test_the_help_shows_the_default_that_a_nested_key_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["synthesize", "--help", "judge"]) == 0
    assert "judge.model: text, default o4-mini" in capsys.readouterr().out
    assert main(["synthesize", "--help", "generator.model"]) == 0
    assert capsys.readouterr().out.startswith("generator.model: text, default gpt-4o-mini\n")
    shown = list(help.overview(VERBS["synthesize"], "synthesize"))
    assert any(re.match(r"  generator.model  .*\(default gpt-4o-mini\)$", line) for line in shown)
    assert any(re.match(r"  steps.LABEL.model .*\(required\)$", line) for line in shown)


def test_the_help_of_a_mapping_describes_all_that_it_can_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--help", "models"]) == 0
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
    verb, section = words.split()
    assert main([verb, "--help", section]) == 2
    assert said in capsys.readouterr().err
