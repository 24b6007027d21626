"""Share of the prompts that a prefix cache could hold: bytes that begin an earlier prompt of the same row too.

    python -m benchmarks.shared_prefix --seeds ../shared/data/msmarco_seeds/seeds.jsonl

Rows go through the pipeline one after another with the rule-based answers of the stand-in LLM; nothing is sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.llm.chat import Completion, Request
from infembed_ray.llm.endpoint import completion_of
from infembed_ray.records.tables import Seed
from infembed_ray.synthesis.pipeline import synthesize
from tests.support import stand_in_answers


def shared(prompt: bytes, earlier: Iterable[bytes]) -> int:
    """Return the length of the longest prefix that `prompt` has in common with one of the earlier prompts."""

    def common(other: bytes) -> int:
        pairs = zip(prompt, other, strict=False)
        return next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(prompt), len(other)))

    return max(map(common, earlier), default=0)


def measure(seeds: Sequence[Seed], shared_prefix: bool) -> dict[str, float]:
    """Return the share of shared bytes: of the generator's prompts, of the judge's, and of all."""
    settings = SynthesizeSettings(seeds="", output="", shared_prefix=shared_prefix)
    pool = sorted({seed.passage for seed in seeds})
    totals: Counter[str] = Counter()
    common: Counter[str] = Counter()

    async def row(seed: Seed) -> None:
        asked: list[bytes] = []

        async def complete(request: Request) -> Completion:
            prompt = request.messages[0]["content"].encode()
            model = "judge" if request.step.startswith("judge_") else "generator"
            for name in (model, "all"):
                totals[name] += len(prompt)
                common[name] += shared(prompt, asked)
            asked.append(prompt)
            return completion_of(stand_in_answers.completion(request.body))

        await synthesize(seed, pool, settings, complete)

    async def rows() -> None:
        for seed in seeds:
            await row(seed)

    asyncio.run(rows())
    return {name: common[name] / totals[name] for name in totals} | {"prompt bytes per row": totals["all"] / len(seeds)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Share of the prompts that a prefix cache could hold.")
    parser.add_argument("--seeds", type=Path, required=True, help="JSONL with id, query and passage")
    parser.add_argument("--limit", type=int, default=None, help="use only the first N seeds")
    options = parser.parse_args()
    with options.seeds.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in islice(lines, options.limit)]
    seeds = [Seed(row["id"], row["query"], row["passage"], "msmarco") for row in rows]
    for setting in (False, True):
        print(json.dumps({"shared_prefix": setting, "rows": len(seeds), **measure(seeds, setting)}))


if __name__ == "__main__":
    main()
