"""Runs whose endpoint stops answering for good: they stop, publish nothing, and resume where they stopped."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from infembed_ray.errors import InputError
from infembed_ray.storage.steps import resolve
from infembed_ray.synthesis import distributed
from infembed_ray.synthesis.distributed import run
from tests.support.files import write_jsonl
from tests.support.stand_in_llm import stand_in, stand_in_process
from tests.support.waiting import wait_until
from tests.synthesis.runs import REPOSITORY, ROWS, rows_of, settings

pytestmark = pytest.mark.ray

SEEDS = 60


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("seeds") / "seeds.jsonl", ROWS)


@pytest.fixture(autouse=True)
def no_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let actors use Ray's idle workers; an actor that drains costs a new process (see test_driver_watch)."""
    monkeypatch.setattr(distributed, "this_process", lambda: None)


def ended(counts: dict[str, int]) -> int:
    return counts["kept"] + counts["rejected"] + counts["dead_letter"]


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


@pytest.mark.slow
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
    manifest = json.loads((resolve(output) / "manifest.json").read_text())
    assert ended(manifest["counts"]) == SEEDS
    assert manifest["counts"]["dead_letter"] == 0
    # A kill closes connections with answers in them: those had not arrived.
    assert sum((first & second).values()) <= 32
    assert len(first) >= 200


def test_too_many_dead_letters_publish_nothing_until_the_share_is_raised(
    ray_cluster: None, seeds: Path, tmp_path: Path
) -> None:
    with stand_in(bad_request=0.05) as server:
        with pytest.raises(InputError) as stopped:
            run(settings(seeds, tmp_path, server, limit=SEEDS))
        said = str(stopped.value)
        assert re.match(r"max_dead_letters=0.1: \d+ of 60 seeds \(\d+\.\d%\) are dead letters", said)
        assert re.search(r"\d+ x \w+: HTTP 400: This request is not acceptable\.", said)
        assert not (tmp_path / "latest").exists()
        answered = len(server.log("answered"))
        published = run(settings(seeds, tmp_path, server, limit=SEEDS, max_dead_letters=0.9))
        assert len(server.log("answered")) == answered
    counts = published.manifest["counts"]
    assert counts["dead_letter"] == len(rows_of(published)[2]) > 6
    assert ended(counts) == SEEDS
