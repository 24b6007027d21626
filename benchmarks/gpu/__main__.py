"""Prove the GPU path on one GPU, without Ray and without a model hub, in a given number of minutes.

    python -m benchmarks.gpu --minutes 8                        # everything that this machine's packages allow
    python -m benchmarks.gpu --cases varlen trees --minutes 2
    python -m benchmarks.gpu --device cpu --tiny --minutes 2    # a test of the suite itself

Models have random weights in the shapes of Qwen2.5 (0.5B, 1.5B, 3B, 7B). Each case runs in its own process, so a crash, an
out-of-memory error or a time-out ends only that case. A case starts only if the time that it needs is left; else the results
say "not run". The cases stand in the order of their weight; `--list` shows the seconds and the packages that each needs. A
case whose packages are missing is skipped and names the package. Results are written as they come:

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
    parser.add_argument("--profile", action="store_true", help="also divide the host's time of a step (step-0.5b)")
    parser.add_argument(
        "--results", "--out", type=Path, metavar="DIRECTORY", default=Path(__file__).parents[1] / "results"
    )
    parser.add_argument("--list", action="store_true", help="name the cases, their seconds, what each shows and needs")
    options = parser.parse_args()
    if options.list:
        print(f"every case: {', '.join(suite.BASE)}")
        for name, case in suite.CASES.items():
            print(f"{name:16}{case.seconds:3.0f} s  {case.shows}{'; needs ' * bool(case.needs)}{', '.join(case.needs)}")
        return 0
    return suite.run(options.cases, options.minutes, options.results, options.device, options.tiny, options.profile)


if __name__ == "__main__":
    raise SystemExit(main())
