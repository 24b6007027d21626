"""Results with random values: an evaluation on the benchmarks, and sweeps."""

import zlib

import numpy as np

from infembed_ray.evaluation.results import Results, TaskSummary
from infembed_ray.evaluation.tasks.catalogue import BENCHMARKS
from infembed_ray.evaluation.tasks.infir import FIGURES
from infembed_ray.evaluation.tasks.task import Figure

QUERIES = [f"q{n}" for n in range(20)]
PAIRED = {query: f"group {n // 2}" for n, query in enumerate(QUERIES)}


def random(*what):
    return np.random.default_rng(zlib.crc32(repr(what).encode()))


def scores(tasks, model, better):
    """Draw the values of one model; a better model has larger ones."""
    return {
        task: {
            figure.name: {
                query: float(np.clip(random("query", task, figure.name, query).normal(0.25, 0.2), -0.9, 0.9))
                + better * (0.5 if figure.measure == "p-MRR" else 0.3)
                + float(random(model, task, figure.name, query).normal(0, 0.08))
                for query in QUERIES
            }
            for figure in asked.figures
        }
        for task, asked in tasks.items()
    }


def benchmarks(*names):
    """Return the tasks of benchmarks, with the figures that their averages need."""
    summaries = {}
    for name in names:
        benchmark = BENCHMARKS[name]
        for entry in benchmark.tasks:
            shown = dict.fromkeys(
                of_task[entry.name] for of_task in benchmark.averages.values() if entry.name in of_task
            )
            summaries[entry.name] = TaskSummary(tuple(Figure(f, f) for f in shown), {}, {"queries": len(QUERIES)})
    return summaries


def evaluation(tasks, models):
    """Make results of `infembed evaluate` from label -> (model name, quality)."""
    return Results(
        tasks=tasks,
        models={label: {"model": name, "identity": f"{name}, {better}"} for label, (name, better) in models.items()},
        scores={label: scores(tasks, name, better) for label, (name, better) in models.items()},
        depth=1000,
    )


def records():
    return {"records": TaskSummary(FIGURES, PAIRED, {"queries": len(QUERIES), "passages": 40})}


def sweep(tasks, backbones, rows, seeds, salt=""):
    """Make results of `infembed sweep` from row -> (quality, training settings)."""
    about, values = {}, {}
    for backbone in backbones:
        about[f"base, {backbone}"] = {
            "row": "base",
            "backbone": backbone,
            "seed": None,
            "train": None,
            "model": "hub/name",
        }
        values[f"base, {backbone}"] = scores(tasks, backbone, 0.0)
        for row, (better, train) in rows.items():
            for seed in seeds:
                label = f"{row}, {backbone}, seed {seed}"
                about[label] = {"row": row, "backbone": backbone, "seed": seed, "train": train, "model": f"runs/{seed}"}
                about[label]["identity"] = f"{salt}{label}"
                values[label] = scores(tasks, f"{salt}{label}", better)
    return Results(tasks, about, values, 1000)
