"""Seeds, settings and runs of batches. Without Ray, so that processes of the tests start quickly."""

import asyncio
from pathlib import Path
from typing import Any

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm.journal import Journal
from infembed_ray.records.tables import Seed
from infembed_ray.synthesis.batch_api import BatchReport, answer_in_batches
from tests.support.stand_in_llm import StandIn

MISTAKEN = 0.2
SEEDS = [
    Seed(
        f"{plant}-{use}",
        f"{plant} used for {use}",
        f"People have turned to {plant} for {use} since villages were founded near rivers, although those who gather "
        f"it nowadays mostly sell {use} from {plant} to neighbours.",
    )
    for plant in ("maple", "willow", "juniper", "bramble")
    for use in ("honey", "timber", "baskets", "medicine", "fodder")
]
POOL = [seed.passage for seed in SEEDS]


def settings(server: StandIn | str, **values: Any) -> SynthesizeSettings:
    url = server if isinstance(server, str) else server.url
    endpoint = {"base_url": url, "api_key_env": None, "timeout_s": 10, "max_retries": 3, **values.pop("endpoint", {})}
    batches = {"poll_s": 0.05, **values.pop("batches", {})}
    generator = {"model": "gpt-4o-mini", "max_tokens": 400}
    judge = {"model": "o4-mini", "max_tokens": 400}
    return SynthesizeSettings.from_mapping(
        {"seeds": "", "output": "", "endpoint": endpoint, "batches": batches, "generator": generator, "judge": judge}
        | values
    )


def fill(given: SynthesizeSettings, directory: Path, spent_usd: float = 0.0) -> BatchReport:
    journal = Journal(directory)
    try:
        return asyncio.run(answer_in_batches(SEEDS, POOL, given, journal, directory / "batches", spent_usd))
    finally:
        journal.close()
