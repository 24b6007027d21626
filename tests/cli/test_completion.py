"""The completion script, in a real Bash."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from infembed_ray.cli.main import VERBS, main

COMPLETE = """
source {script}
COMP_WORDS=({words})
COMP_CWORD={last}
_infembed
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def complete(script: Path, *words: str) -> set[str]:
    """Press Tab after the last word; return what is offered."""
    program = COMPLETE.format(script=script, words=" ".join(map(shlex.quote, words)), last=len(words) - 1)
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.fixture
def bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    return script


def test_verbs_complete(bash: Path) -> None:
    assert complete(bash, "infembed", "tra") == {"train"}
    assert set(VERBS) | {"help", "plan", "completion"} <= complete(bash, "infembed", "")


def test_names_of_settings_complete(bash: Path) -> None:
    assert complete(bash, "infembed", "train", "lora.r") == {"lora.rank="}
    assert complete(bash, "infembed", "train", "records=x", "lora.r") == {"lora.rank="}
    assert complete(bash, "infembed", "plan", "train", "hardware.no") == {"hardware.nodes="}
    assert complete(bash, "infembed", "check", "synth") == {"synthesize"}
    assert complete(bash, "infembed", "check", "synthesize", "limits.b") == {"limits.budget_usd="}
    assert complete(bash, "infembed", "index", "comp") == {"compact"}
    assert complete(bash, "infembed", "index", "recall") == {"recall_floor="}


def test_values_are_left_to_file_names(bash: Path) -> None:
    assert complete(bash, "infembed", "train", "records", "=") == set()
    assert complete(bash, "infembed", "train", "records", "=", "ru") == set()


def test_zsh_reads_the_same_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    bash = capsys.readouterr().out
    assert main(["completion", "zsh"]) == 0
    zsh = capsys.readouterr().out
    assert zsh.endswith(bash)
    assert "bashcompinit" in zsh.removesuffix(bash)
