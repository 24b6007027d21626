"""Help and YAML of settings."""

import re
from pathlib import Path

import pytest
import yaml

from infembed_ray.cli.main import main
from infembed_ray.config.verbs import MAINTENANCE, VERBS

CONFIGS = Path(__file__).parents[2] / "jobs" / "configs"
JOBS = [*sorted(CONFIGS.glob("*.yaml")), *sorted((CONFIGS / "paper").glob("*.yaml"))]


def verb_of(file: Path) -> str:
    return (
        file.stem
        if file.parent == CONFIGS or file.stem in ("evaluate", "report")
        else "sweep"
        if file.stem.startswith("table")
        else "train"
    )


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


def shown(capsys: pytest.CaptureFixture[str], command: str) -> list[str]:
    assert main(command.split()) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("train --help lora", r"lora\.rank .* \(whole number, default 16, minimum 1\)"),
        ("train --help lora", r"lora\.target_modules .* \(list of text, default \[\]\)"),
        ("plan train --help epoch_records", r"epoch_records .* \(whole number, default 38759, minimum 1\)"),
        ("synthesize --help judge", r"judge\.model .* \(text, default o4-mini\)"),
        ("synthesize --help generator.model", r"generator\.model .* \(text, default gpt-4o-mini\)"),
        ("synthesize --help steps", r"steps\.LABEL\.model .* \(text, required\)"),
        ("evaluate --help models.mine", r"models\.LABEL\.bm25 .*\(Bm25.*"),
        ("evaluate --help models.mine.pair", r"models\.LABEL\.pair .*"),
    ],
)
def test_the_help_of_a_section_has_meaning_type_and_the_default_that_a_nested_key_keeps(
    command: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert any(re.fullmatch(line, each) for each in shown(capsys, command))


@pytest.mark.parametrize(
    ("words", "said"),
    [("train lroa", "did you mean lora?"), ("train lora.rnak", "did you mean lora.rank?"), ("train seed.x", "seed")],
)
def test_an_unknown_section_gets_a_suggestion(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    verb, section = words.split()
    assert main([verb, "--help", section]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"infembed {verb}: {section}: ")
    assert said in line
