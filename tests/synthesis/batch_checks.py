"""Outcomes and states of batches, and runs that are killed."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm.chat import Completion, Request, RunFailure, Unjournaled
from infembed_ray.llm.endpoint import parse_completion
from infembed_ray.llm.journal import Journal, replaying
from infembed_ray.records.tables import Seed
from infembed_ray.synthesis.pipeline import Outcome, synthesize
from tests.support import stand_in_answers
from tests.support.stand_in_llm import StandIn
from tests.support.waiting import wait_until
from tests.synthesis.batches import MISTAKEN, POOL, SEEDS, fill, settings

REPOSITORY = Path(__file__).parents[2]
QUOTA = 4_000
"""Prompt tokens, of four bytes, that the endpoint enqueues; a wave has over 20,000."""


def outcomes(given: SynthesizeSettings, directory: Path) -> list[Outcome | None]:
    """Return the rows' outcomes from the journal; None where it lacks an answer."""
    complete = replaying(Journal(directory))

    async def of(seed: Seed) -> Outcome | None:
        try:
            return await synthesize(seed, POOL, given, complete)
        except Unjournaled:
            return None

    async def of_all() -> list[Outcome | None]:
        return [await of(seed) for seed in SEEDS]

    return asyncio.run(of_all())


@cache
def online() -> list[Outcome]:
    """Return the rows' outcomes with answers at list price, without batches and journals."""

    async def complete(request: Request) -> Completion:
        body = json.loads(json.dumps(request.body))
        return parse_completion(json.dumps(stand_in_answers.completion(body, None, MISTAKEN)).encode())

    async def all_rows() -> list[Outcome]:
        return [await synthesize(seed, POOL, settings("http://nowhere"), complete) for seed in SEEDS]

    return asyncio.run(all_rows())


def assert_same_rows(got: list[Outcome | None], expected: list[Outcome]) -> None:
    """Compare all but the price, which is half of the online run's."""
    for mine, theirs in zip(got, expected, strict=True):
        assert mine is not None
        assert mine.kind == theirs.kind
        provenance, theirs_provenance = dict(mine.row["provenance"]), dict(theirs.row["provenance"])
        assert provenance.pop("usd") == pytest.approx(theirs_provenance.pop("usd") / 2)
        assert {**mine.row, "provenance": provenance} == {**theirs.row, "provenance": theirs_provenance}


RUN = """
import asyncio, sys
from pathlib import Path
from tests.synthesis.batches import fill, settings
fill(settings(sys.argv[1]), Path(sys.argv[2]))
"""


def kill_when(server: StandIn, directory: Path, ready: Callable[[], bool]) -> None:
    """Run the batches in a process, hold the endpoint and kill the process once `ready()`."""
    command = [sys.executable, "-c", RUN, server.url, str(directory)]
    with subprocess.Popen(command, cwd=REPOSITORY) as process:
        wait_until(ready)
        server.hold()
        process.send_signal(signal.SIGKILL)
        process.wait()


def stages(directory: Path) -> list[str]:
    states = []
    for path in sorted((directory / "batches").glob("*.json")):
        with contextlib.suppress(FileNotFoundError):  # a batch that was collected meanwhile
            states.append(json.loads(path.read_text())["stage"])
    return states


def failure(given: SynthesizeSettings, directory: Path, spent_usd: float = 0.0) -> str:
    with pytest.raises(RunFailure) as error:
        fill(given, directory, spent_usd)
    assert "\n" not in str(error.value)
    return str(error.value)


def most_enqueued(server: StandIn) -> int:
    return max(entry["in_queue"] for entry in server.log("enqueued"))
