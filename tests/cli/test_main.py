"""The command line by itself, before a verb's own modules are imported."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from infembed_ray import __version__
from infembed_ray.cli.main import COMMANDS, GROUPS, main, parse
from infembed_ray.cli.tools import TOOLS, Tool
from infembed_ray.config.analysis import AnalyzeSettings
from infembed_ray.config.verbs import MAINTENANCE, PLANS, VERBS, load
from infembed_ray.storage.steps import Step

MISSING = {
    "synthesize seeds=/nope output=o": "seeds=/nope: no such file",
    f"synthesize seeds={__file__} replay=[/nope] output=o": "replay=/nope: no such file",
    f"analyze records={__file__} compare.theirs=nope output=o": "compare.theirs=nope: no such file",
    "train records=nope model=org/model output=o": "records=nope: no such file",
    f"analyze records={__file__} agreement.files=[/nope] output=o": "agreement.files=/nope: no such file",
    f"evaluate records={__file__} models.b.model=/nope output=o": "models.b.model=/nope: no such file",
    "report results.ours=nope output=o": "results.ours=nope: no such file",
    "index corpus=nope model=org/model output=o": "corpus=nope: no such file",
    "index compact index=nope": "index=nope: no such file",
    f"sweep train.records=nope evaluate.records={__file__} models.a=org/model output=o": "train.records=nope: no such file",
    "train records=s3://bucket/nope model=./nope output=o": "model=./nope: no such file",
}


@pytest.mark.integration
def test_a_missing_input_of_every_verb_is_rejected_without_importing_torch_or_ray():
    program = f"""
import sys
from infembed_ray.cli.main import main
for command in {list(MISSING)!r}:
    assert main(command.split()) == 2, command
    assert not {{"torch", "ray", "transformers"}} & set(sys.modules), command
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(MISSING)
    for line, said in zip(lines, MISSING.values(), strict=True):
        assert said in line


@pytest.mark.parametrize("name", ["org/model", "bm25", "org"])
def test_a_model_name_that_is_not_a_path_is_left_to_the_verb(name, capsys):
    assert main(["evaluate", "records=/nope", f"models.a={name}", "output=o"]) == 2
    assert "records=/nope" in capsys.readouterr().err


def test_the_version_is_printed_without_importing_a_settings_class():
    program = "import sys; sys.argv[1:] = ['--version']; import infembed_ray.cli.main as c\ntry: c.main()\nfinally: print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [f"infembed_ray {__version__}", "False"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("trian model=m", "infembed: unknown verb trian: did you mean train?"),
        ("plan trian", "infembed: unknown verb plan trian: did you mean plan train?"),
    ],
)
def test_an_unknown_verb_gets_a_suggestion(command, said, capsys):
    with pytest.raises(SystemExit) as exit:
        main(command.split())
    assert exit.value.code == 2
    assert capsys.readouterr().err.splitlines() == [said]


@pytest.mark.parametrize("command", [*VERBS, *MAINTENANCE, *PLANS])
def test_help_lists_every_setting_with_its_default_as_yaml(command, capsys):
    shown = help_of(command, capsys)
    settings = COMMANDS[command].settings
    assert all(re.search(rf"^ *{name}:? +", shown, re.MULTILINE) for name in settings.model_fields)
    assert not re.search(r"default (None|True|False|\(\)|\w*Settings\()", shown)
    if command not in PLANS:
        assert "--dry-run" in shown
        verb = COMMANDS[command]
        assert callable(load(verb.dry_run or f"{verb.function.partition(':')[0]}:describe"))


def help_of(command, capsys):
    with pytest.raises(SystemExit) as exit:
        main([*command.split(), "--help"])
    assert exit.value.code == 0
    return capsys.readouterr().out


def test_help_has_required_settings_first_and_sections_last(capsys):
    shown = help_of("train", capsys)
    parts = ["required settings:", "  output ", "other settings:", "  epochs ", "\nlora "]
    assert sorted(parts, key=shown.index) == parts
    assert re.search(r"^  lora\.rank  .*default 16, minimum 1\)$", shown, re.MULTILINE)
    assert re.search(r"^  warmup_fraction  .*minimum 0, below 1\)$", shown, re.MULTILINE)


def test_the_overview_has_every_verb_in_a_group_with_a_command_that_parses(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert len({name for names in GROUPS.values() for name in names}) <= 18
    for command in re.findall(r"^ {14}infembed (.+)$", shown, re.MULTILINE):
        if "--help" not in command:
            parse(command.split())


@pytest.mark.parametrize("command", TOOLS)
def test_a_command_without_settings_has_help_and_a_function_that_takes_its_arguments(command, capsys):
    tool = COMMANDS[command]
    assert isinstance(tool, Tool)
    assert tool.help.split()[0] in help_of(command, capsys)
    names = [names[-1].lstrip("-").replace("-", "_") for names, _ in tool.arguments]
    inspect.signature(load(tool.function)).bind(**dict.fromkeys([*names, *tool.values]))


def test_mistakes_that_are_found_together_are_lines_of_their_own(capsys):
    assert main(["sweep", "train.records=/a", "evaluate.records=/b", "models.a=org/model", "output=o"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["train.records=/a", "evaluate.records=/b"]


@pytest.mark.parametrize(
    "words", ["--help", "train --help", "serve --print-config index=i", "runs {}", "runs {} --json"]
)
def test_a_reader_that_ends_early_gets_no_traceback(words, tmp_path):
    with Step("train", AnalyzeSettings(records="", output="o"), str(tmp_path), {}).publish():
        pass
    command = f"{sys.executable} -m infembed_ray.cli {words.format(tmp_path)}"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command} | true"], capture_output=True, text=True)
    assert done.stderr == ""


def test_a_pipe_other_than_the_output_that_breaks_is_a_failure(monkeypatch, capsys):
    def broken(_):
        raise BrokenPipeError("of a server")

    monkeypatch.setattr("infembed_ray.cli.main._run", broken)
    assert main(["doctor"]) == 1
    assert "BrokenPipeError" in capsys.readouterr().err


def test_settings_may_follow_an_option(capsys):
    assert main(["train", "records=a", "--print-config", "model=b", "output=c"]) == 0
    shown = capsys.readouterr().out
    assert "records: a\nmodel: b\noutput: c\n" in shown
    with pytest.raises(SystemExit):
        main(["train", "records=a", "--no-such-option", "model=b"])
    assert "unrecognized arguments: --no-such-option" in capsys.readouterr().err


def test_a_dry_run_of_manifests_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parents[2])
    given = ["--config", "jobs/configs/manifests.yaml", "stages.serve=null", f"output={tmp_path / 'out'}"]
    assert main(["manifests", *given, "--dry-run"]) == 0
    assert "manifests: jobs/train.yaml: pods 1 of gpu" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
