"""The tutorial's part with own rows: all its commands in one shell, in their order, in a copy of the checkout's files."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, install_commands
from tests.support.ports import free_port

PAGE = "docs/start/tutorial.md"
BLOCKS = [block for block in blocks() if block.page == PAGE and block.tested == "tests/docs/test_tutorial.py"]
SHOWN = [block.code for block in blocks() if block.page == PAGE and block.language == "text"]
SERVERS = ("python -m tests.support.stand_in_llm", "infembed serve")
HIT = re.compile(r"\d\.\d{3} +([\w.]+/\w+)")
FIRST = slice(None, None, 3)  # of the three hits of each search


def script(ports: dict[str, int]) -> str:
    """The page as one script: its servers run in the background, and its Python in one process."""
    lines = ["set -euo pipefail", "trap 'kill $(jobs -p)' EXIT"]
    for block in BLOCKS:
        if block.language != "bash" or "activate" in block.code:
            continue
        background = block.code.startswith(SERVERS)
        lines.append(f"{block.code.strip()} &" if background else block.code)
        if background:
            port = re.search(r"port[ =](\d+)", block.code)
            assert port is not None
            path = "v1/models" if "serve" in block.code else ""
            lines.append(f"until curl -s -o /dev/null 127.0.0.1:{port[1]}/{path}; do sleep 1; done")
    program = "\n".join(block.code for block in BLOCKS if block.language == "python")
    text = "\n".join([*lines, f"python - <<'EOF_PROGRAM'\n{program}\nEOF_PROGRAM"])
    return re.sub(r"\b(8000|8001)\b", lambda found: str(ports[found[1]]), text)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.integration
def test_the_commands_of_the_page_lead_from_rows_to_a_search(tmp_path: Path, minilm: str) -> None:
    for name in ("tests", "infembed_ray"):
        (tmp_path / name).symlink_to(ROOT / name)
    tools = tmp_path / "bin"
    install_commands(tools)
    done = subprocess.run(
        ["bash", "-c", script({"8000": free_port(), "8001": free_port()})],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    for line in ("60 seeds", "100% kept, 0 dead letters, 480 calls", "20/20", "serve: 180 passages"):
        assert line in output
    shown = [hit for code in SHOWN for hit in HIT.findall(code)]
    assert len(shown) == 6
    assert HIT.findall(done.stdout)[FIRST] == shown[FIRST] * 2  # of the API, and of the index in this process
