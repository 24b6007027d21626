"""Cost and quality of synthesis with and without a cheap judge.

    python benchmarks/synthesis_economy.py --seeds seeds.jsonl

Runs all seeds through the whole pipeline, once a case, against tests/support/stand_in_llm.py in another process:

    judge        the default: the judge (o4-mini) gives every verdict
    cheap judge  the cheap judge (gpt-4o-mini) first, the judge on doubt, 5 % audited
    rejects      the same with rejects=true: two equal wrong picks of the cheap judge reject the record
    cheap only   the cheap judge's model in place of the judge

The error rates are the script's assumptions, not a model's: a share of the generated passages misses its request (`--poor`),
and each judge gives a wrong verdict at a rate of its own (`--cheap-errors`, `--errors`): it rejects a good passage, or picks a
poor one. Of these mistakes the share `--stubborn` is the same in every order of the candidates. Tokens are words, and an answer
of o4-mini has `--reasoning` more. Prices are those of llm/prices.yaml.

The last line is one JSON object. `wrongly_kept`: kept records with a poor passage; `wrongly_rejected`: records without one that
a judge rejected; both are counted by the stand-in's mark, and not by any judge.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.support.stand_in_answers import POOR  # noqa: E402
from tests.support.stand_in_llm import stand_in_process  # noqa: E402

CHEAP, STRONG = "gpt-4o-mini", "o4-mini"
AUDIT = 0.05
CASES: dict[str, dict[str, Any]] = {
    "judge": {},
    "cheap judge": {"cheap_judge": {"model": CHEAP, "audit": AUDIT}},
    "rejects": {"cheap_judge": {"model": CHEAP, "audit": AUDIT, "rejects": True}},
    "cheap only": {"judge": {"model": CHEAP}},
}


def measure(options: argparse.Namespace, case: str, directory: Path) -> dict[str, Any]:
    """Run one case against a server of its own; return its figures."""
    from infembed_ray.config.synthesis import SynthesizeSettings
    from infembed_ray.records import tables
    from infembed_ray.synthesis.distributed import run

    behaviour = {
        "latency_s": 0.05,
        "mistaken_models": f"{CHEAP}={options.cheap_errors},{STRONG}={options.errors}",
        "stubborn": options.stubborn,
        "poor": options.poor,
        "reasoning_models": f"{STRONG}={options.reasoning}",
    }
    with stand_in_process(**behaviour) as server:
        given = {
            "seeds": str(options.seeds),
            "output": str(directory / case.replace(" ", "-")),
            "endpoint": {"base_url": server.url, "api_key_env": None},
            "in_flight": 64,
            **CASES[case],
        }
        began = time.perf_counter()
        published = run(SynthesizeSettings.from_mapping(given))
        seconds = time.perf_counter() - began
    manifest = published.manifest
    kept = tables.read_raw(published.path / tables.KEPT_FILE)
    rejected = tables.read_raw(published.path / tables.REJECTED_FILE)
    judged = [row for row in rejected if "judge_" in row["step"]]
    counts, tokens = manifest["counts"], {name: manifest[name] for name in ("tokens", "tokens_replayed")}
    return {
        **{name: counts[name] for name in ("seeds", "kept", "rejected", "dead_letter")},
        "calls_per_kept": (counts["calls"] + counts["replayed"]) / counts["kept"],
        "tokens_per_kept": sum(sum(each.values()) for each in tokens.values()) / counts["kept"],
        "usd_per_1000_kept": manifest["usd_per_1000_kept"],
        "wrongly_kept": sum(_poor(row) for row in kept),
        "wrongly_rejected": sum(not _poor(row) for row in judged),
        "cheap_judge": manifest["cheap_judge"],
        "seconds": seconds,
    }


def _poor(row: dict[str, Any]) -> bool:
    return any(POOR in row[f"hard_negative_document_{number}"] for number in (1, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=Path, required=True, help="seeds in a format that `infembed synthesize` reads")
    parser.add_argument(
        "--poor", type=float, default=0.15, help="share of the generated passages that miss their request"
    )
    parser.add_argument(
        "--cheap-errors", type=float, default=0.12, help="share of the cheap judge's verdicts that are wrong"
    )
    parser.add_argument("--errors", type=float, default=0.02, help="share of the judge's verdicts that are wrong")
    parser.add_argument(
        "--stubborn", type=float, default=0.5, help="share of the mistakes that are alike in every order"
    )
    parser.add_argument("--reasoning", type=int, default=300, help="reasoning tokens of the judge's answers")
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for case in CASES:
            figures[case] = measure(options, case, Path(directory))
            print(case, json.dumps(figures[case]), flush=True)
    assumed = {name: value for name, value in vars(options).items() if name != "seeds"}
    machine = f"{os.cpu_count()} vCPU, {platform.system()}, Python {platform.python_version()}"
    print(json.dumps({**figures, "assumed": assumed, "machine": machine, "date": date.today().isoformat()}))


if __name__ == "__main__":
    main()
