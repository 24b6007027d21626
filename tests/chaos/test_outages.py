"""A run whose endpoint stops answering for good stops, publishes nothing, and resumes where it stopped."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from infembed_ray.storage.steps import resolve
from tests.support.files import write_jsonl
from tests.support.stand_in_llm import stand_in_process
from tests.support.waiting import wait_until
from tests.synthesis.runs import REPOSITORY, ROWS

pytestmark = [pytest.mark.slow, pytest.mark.ray]

SEEDS = 60


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("seeds") / "seeds.jsonl", ROWS)


def command(seeds: Path, output: Path, url: str) -> subprocess.Popen[str]:
    arguments = [f"seeds={seeds}", f"output={output}", f"limit={SEEDS}", "in_flight=16", "actors=2"]
    arguments += [f"endpoint.base_url={url}", "endpoint.api_key_env=null", "endpoint.patience_s=3"]
    return subprocess.Popen(
        [sys.executable, "-m", "infembed_ray.cli", "synthesize", *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_server_that_is_killed_in_mid_run_stops_the_command_and_the_same_command_resumes(
    seeds: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with stand_in_process(latency_s=0.05) as server:
        url, port = server.url, int(server.url.split(":")[2].split("/")[0])
        driver = command(seeds, output, url)
        wait_until(lambda: server.answers() >= 200, seconds=300)
        assert server.kill is not None
        server.kill()
        said = driver.communicate(timeout=600)[1]
        first = server.usable_answers()
    assert driver.returncode == 2, said
    [line] = [line for line in said.splitlines() if "endpoint.base_url" in line]
    assert re.search(
        rf"endpoint.base_url={url}: no answer to .* in \d+ s \(connection failed.*mend it, or raise endpoint.patience_s",
        line,
    )
    assert re.search(r"\d+ of 60 seeds are left undone and nothing is published; .* the same command resumes", line)
    assert not (output / "latest").exists()
    with stand_in_process(port=port) as back:
        driver = command(seeds, output, url)
        assert driver.wait(timeout=600) == 0
        second = back.usable_answers()
    counts = json.loads((resolve(output) / "manifest.json").read_text())["counts"]
    assert counts["kept"] + counts["rejected"] == SEEDS
    assert counts["dead_letter"] == 0
    # A kill closes connections with answers in them: those had not arrived.
    assert sum((first & second).values()) <= 32
    assert len(first) >= 200
