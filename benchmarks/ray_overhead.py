"""Overhead of Ray Train per training step, against the same training in one process.

    python benchmarks/ray_overhead.py [--steps N] [--rounds N] [--zero-stage N]

Both use the same records, MiniLM, DeepSpeed and seed; only the launchers differ. Their losses must be equal, or the run
fails. They alternate, and each goes first in half of the rounds. The time of a step is `seconds` of metrics.jsonl: from
sampling the records to writing the metrics. It is the median over the steps of a run after the first ten, then over rounds.

The last line is one JSON object:
    vs_process      a step under Ray / in one process
    start_s         seconds from the command to its first step: processes, imports, cluster, model
    whole_s         seconds from the command to the published checkpoint
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import material

from infembed_ray.training.observability.logs import read_metrics

WARM_UP = 10
"""Warm-up steps, which are not counted."""
RECORDS = 200
"""Steps of an epoch; the number of epochs follows from --steps."""


@dataclass(frozen=True)
class Run:
    """Timings of a run in seconds."""

    step: float
    start: float
    whole: float
    losses: list[float]


def train(launcher: str, options: argparse.Namespace, records: Path, output: Path) -> Run:
    """Run `infembed train` once, from the command line."""
    command = [sys.executable, "-m", "infembed_ray.cli", "train"]
    settings = {
        "records": records,
        "model": material.minilm(),
        "output": output,
        "launcher": launcher,
        "workers": 1,
        "records_per_step": options.records,
        "instruction_negatives": 2,
        "epochs": -(-options.steps * options.records // RECORDS),
        "zero_stage": options.zero_stage,
        "checkpoint_every": 10**6,
    }
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    began_at, began = time.time(), time.perf_counter()
    ran = subprocess.run(
        [*command, *(f"{k}={v}" for k, v in settings.items())], env=environment, capture_output=True, text=True
    )
    whole = time.perf_counter() - began
    if ran.returncode:
        raise SystemExit(f"{launcher}: {ran.stdout[-2000:]}{ran.stderr[-4000:]}")
    (published,) = (path.parent for path in output.glob("*/manifest.json"))
    steps = read_metrics(published)
    return Run(
        step=statistics.median(step["seconds"] for step in steps[WARM_UP:]),
        start=steps[0]["time"] - steps[0]["seconds"] - began_at,
        whole=whole,
        losses=[step["loss"] for step in steps],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--records", type=int, default=4, help="records per step over all workers, three tuples each")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--zero-stage", type=int, choices=[0, 1, 2, 3], default=2)
    options = parser.parse_args()
    assert options.steps > WARM_UP
    runs: dict[str, list[Run]] = {"ray": [], "process": []}
    with tempfile.TemporaryDirectory() as directory:
        records = Path(directory, "records.jsonl")
        chosen, source = material.records(RECORDS)
        records.write_text("".join(json.dumps(vars(record)) + "\n" for record in chosen), encoding="utf-8")
        for number in range(options.rounds):
            for launcher in list(runs)[:: -1 if number % 2 else 1]:
                run = train(launcher, options, records, Path(directory, f"{launcher}-{number}"))
                runs[launcher].append(run)
                print(f"round {number + 1} {launcher}: {run.step:.4f} s a step, {run.start:.0f} s to start", flush=True)
    curves = {tuple(run.losses) for of_launcher in runs.values() for run in of_launcher}
    assert len(curves) == 1, "the launchers trained different models"

    def median(figure: str) -> dict[str, float]:
        return {name: round(statistics.median(getattr(r, figure) for r in each), 4) for name, each in runs.items()}

    steps = median("step")
    print(
        json.dumps(
            {
                "vs_process": round(steps["ray"] / steps["process"], 4),
                "step_s": steps,
                "start_s": median("start"),
                "whole_s": median("whole"),
                "steps": options.steps,
                "rounds": options.rounds,
                "records_per_step": options.records,
                "zero_stage": options.zero_stage,
                "of": source,
                "machine": f"{os.cpu_count()} vCPU, {platform.system()}, Python {platform.python_version()}",
                "date": date.today().isoformat(),
            }
        )
    )


if __name__ == "__main__":
    main()
