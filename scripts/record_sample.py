"""Write the sample's seeds and journal: python -m scripts.record_sample

Each seed goes through the pipeline's own steps; its completions come from the authored line instead of a model. Run
this again after a change of a prompt, because the journal's keys depend on the prompts.
"""

import asyncio
import json
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm.chat import Completion, Request
from infembed_ray.llm.journal import encode
from infembed_ray.progress import say
from infembed_ray.quickstart.sample import AUTHORED, JOURNAL, MODEL, SEEDS
from infembed_ray.records import tables
from infembed_ray.synthesis.judge import Pool
from infembed_ray.synthesis.pipeline import synthesize

TEST_TOPICS = {"coffee", "databases", "hypertension", "space-missions"}
"""Topics of the test split; all others are for training."""
SOURCE = "bundled-sample"
WRITTEN = datetime(2026, 11, 21, tzinfo=timezone.utc)

_DOCUMENTS = {
    "positive": "passage",
    "negative_instruction": "hard_negative_document_1",
    "negative_query": "hard_negative_document_2",
}
"""Candidate of the judge -> authored column."""


def record() -> tuple[bytes, bytes]:
    """Return seeds and journal as the bytes of their JSONL files."""
    authored = [json.loads(line) for line in AUTHORED.read_text(encoding="utf-8").splitlines()]
    seeds = [_seed(row) for row in authored]
    pool = Pool.of({seed.passage: [seed.query] for seed in seeds})
    settings = SynthesizeSettings(seeds=str(SEEDS), output="", generator=MODEL, judge=MODEL)
    journal: list[bytes] = []

    async def pass_through(seed: tables.Seed, row: Mapping[str, Any]) -> None:
        async def complete(request: Request) -> Completion:
            # No model wrote this, so there are no token counts.
            completion = Completion(_completion(request, row), "stop", MODEL.model, 0, 0)
            journal.append(encode(request, completion, WRITTEN))
            return completion

        await synthesize(seed, pool, settings, complete)

    async def pass_all_through() -> None:
        for seed, row in zip(seeds, authored, strict=True):
            await pass_through(seed, row)

    asyncio.run(pass_all_through())
    columns = [{name: value for name, value in vars(seed).items() if value} for seed in seeds]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in columns]
    return "".join(lines).encode(), b"".join(journal)


def _seed(row: Mapping[str, Any]) -> tables.Seed:
    split = "test" if row["topic"] in TEST_TOPICS else "train"
    return tables.Seed(row["id"], row["query"], row["passage"], SOURCE, row["topic"], split)


def _completion(request: Request, row: Mapping[str, Any]) -> str:
    """Return the authored text of a step, in the format that its prompt asks for."""
    if request.step.startswith("judge_"):
        return f"Answer: {_number(request, row['judge'][request.step.removeprefix('judge_')], row)}"
    label = {"instruction": "Instruction", "query": "Query", "hard": "Passage"}[request.step.split("_")[0]]
    return f"{label}: {row[request.step]}"


def _number(request: Request, verdict: str, row: Mapping[str, Any]) -> str:
    """Return the number of the authored verdict's candidate in the judge's prompt."""
    if verdict == "none":
        return verdict
    shown = request.messages[0]["content"]
    document = row[_DOCUMENTS[verdict]]
    return next(str(number) for number in range(1, 10) if f"[{number}] {document}" in shown)


if __name__ == "__main__":
    seeds_file, journal_file = record()
    SEEDS.write_bytes(seeds_file)
    JOURNAL.write_bytes(journal_file)
    say(f"{SEEDS}: {len(seeds_file.splitlines())} seeds")
    say(f"{JOURNAL}: {len(journal_file.splitlines())} completions")
