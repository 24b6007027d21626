"""Prove the GPU path on one GPU, without Ray and without a model hub, in a given number of minutes.

    python -m benchmarks.gpu --minutes 8                        # everything that this machine's packages allow
    python -m benchmarks.gpu --cases varlen trees --minutes 2
    python -m benchmarks.gpu --device cpu --tiny --minutes 2    # a test of the suite itself

Models have random weights in the shapes of Qwen2.5 (0.5B, 1.5B, 3B, 7B). Each case runs in a process of its own and gets a
share of the time that is left, so a crash, an out-of-memory error or a time-out ends only that case. A case whose packages
are missing is skipped and says which; `machine`, `varlen`, `trees`, `bf16` and `grad_cache` need torch, transformers and rich
only. Every result is written when it is measured:

    RESULTS/DATE-gpu-DEVICE.jsonl    one JSON object a line: the machine, then results
    RESULTS/DATE-gpu-DEVICE.md       the same as tables

A result has figures and checks. A check passes if its value is at most its bound. The last line of the output is one JSON
object; the exit status is 1 if a check or a case failed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.gpu import suite


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="time of the whole run")
    parser.add_argument("--cases", nargs="+", choices=suite.CASES, default=list(suite.CASES), metavar="CASE")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of some thousand parameters, to test the suite")
    parser.add_argument("--results", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--list", action="store_true", help="name the cases and what each shows, and stop")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name:16}{case.shows}" for name, case in suite.CASES.items()))
        return 0
    return suite.run(options.cases, options.minutes, options.results, options.device, options.tiny)


if __name__ == "__main__":
    raise SystemExit(main())
