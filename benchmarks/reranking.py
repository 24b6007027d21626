"""Re-ranking of MiniLM's rankings: late interaction with the same MiniLM, and a cross-encoder, at several weights.

    python benchmarks/reranking.py --data DATA [--cross-encoder DIRECTORY] [--depth 50] [--weights 0.25 0.5 1]
        [--tasks dev dev_reworded cranfield]

The dense rankings of dev.jsonl and dev_reworded.jsonl of DATA/infir_mini (77 records, 1,000 distractors) and of 40 queries of
Cranfield, over their judged abstracts and 300 others, are re-ranked to --depth, as `infembed serve` does it: the weight is that
of the reranker against the retrieval's cosine, both standardised per query; 1 is the reranker alone. DIRECTORY is a model of
`infembed train head=score`. One thread.

The last line is one JSON object: task -> scorer and weight -> figures x100: nDCG@10 of the three kinds of query, p-MRR,
violation@2; nDCG@10 for Cranfield; and ms of CPU per re-ranked query.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import material
import numpy as np
import torch
from evaluation_table import cranfield

from infembed_ray.config.evaluation import RetrieverSettings
from infembed_ray.evaluation.obedience import AS_GIVEN, Controls
from infembed_ray.evaluation.search import exact_search
from infembed_ray.evaluation.tasks import catalogue
from infembed_ray.evaluation.tasks.infir import instruction_following
from infembed_ray.evaluation.tasks.task import Task, means, score
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.late_interaction import LateInteraction
from infembed_ray.modeling.rerankers import Classifier, PairScorer
from infembed_ray.records.tables import Passage, Record, read

Run = dict[str, dict[str, float]]
TASKS = ["dev", "dev_reworded", "cranfield"]
CACHE_BYTES = 2**31


def load(data: Path, name: str) -> Task:
    """Return one of `TASKS`."""
    if name != "cranfield":
        others = read(data / "msmarco_seeds" / "seeds.jsonl", Passage, "distractors")
        return instruction_following(read(data / "infir_mini" / f"{name}.jsonl", Record, "records"), others, 1000)
    with tempfile.TemporaryDirectory() as directory:
        whole = catalogue.load(str(cranfield(data / "cranfield", Path(directory))))
        queries = whole.queries[:40]
        judged = {document for query in queries for document in whole.qrels[query.id]}
        ids = whole.corpus["id"].to_pylist()
        wanted = judged.union([id for id in ids if id not in judged][:300])
        kept = whole.corpus.take([row for row, id in enumerate(ids) if id in wanted])
        qrels = {query.id: whole.qrels[query.id] for query in queries}
        return replace(whole, corpus=kept.combine_chunks(), queries=queries, qrels=qrels)


def dense(encoder: InstructionEncoder, task: Task) -> Run:
    """Rank every passage for every query of a task by cosine."""
    passages = encoder.encode_passages(task.corpus["text"].to_pylist(), batch_tokens=1024)
    queries = encoder.encode_queries([q.query for q in task.queries], [q.instruction for q in task.queries], 1024)
    rankings = exact_search(queries, passages, task.corpus["id"].to_pylist())
    return {query.id: ranking for query, ranking in zip(task.queries, rankings, strict=True)}


def scored(scorer: PairScorer, task: Task, run: Run, depth: int) -> tuple[dict[str, np.ndarray], float]:
    """Score the first documents of every ranking: query id -> scores, and ms of CPU per query."""
    texts = dict(zip(task.corpus["id"].to_pylist(), task.corpus["text"].to_pylist(), strict=True))
    began = time.process_time()
    found = {
        query.id: scorer.score([(query, texts[id]) for id in list(run[query.id])[:depth]]) for query in task.queries
    }
    return found, 1e3 * (time.process_time() - began) / len(task.queries)


def reranked(run: Run, scores: dict[str, np.ndarray]) -> Run:
    """Re-order the scored documents, before all others; the scores are minus the ranks."""
    reranked: Run = {}
    for query, ranking in run.items():
        ids, first = list(ranking), len(scores[query])
        order = [ids[place] for place in np.argsort(-scores[query], kind="stable")] + ids[first:]
        reranked[query] = {id: -float(rank) for rank, id in enumerate(order)}
    return reranked


def figures(task: Task, run: Run) -> dict[str, float]:
    """Return the means of a task's figures x100."""
    found = {name: value for name, value in means(score(task, run)).items() if name.startswith(("p-MRR", "nDCG@10"))}
    if controls := Controls.from_task(task):
        found |= {"violation@2": fmean(controls.measure(task, run)[AS_GIVEN]["violation@2"].values())}
    return {name: round(100 * value, 1) for name, value in found.items() if value is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="directory with infir_mini/, msmarco_seeds/, cranfield/"
    )
    parser.add_argument("--cross-encoder", type=Path, help="a sequence classifier over pairs")
    parser.add_argument("--no-late", action="store_true", help="leave late interaction out")
    parser.add_argument("--depth", type=int, default=50)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tasks = {name: load(arguments.data, name) for name in arguments.tasks}
    encoder = InstructionEncoder.from_pretrained(material.minilm())
    scorers: dict[str, PairScorer] = {} if arguments.no_late else {"late": LateInteraction(encoder, CACHE_BYTES, 1024)}
    if arguments.cross_encoder:
        settings = RetrieverSettings(
            kind="classifier", model=str(arguments.cross_encoder), instructed_query="{instruction} {query}",
            plain_query="{query}", pair_length=256,
        )  # fmt: skip
        scorers["cross"] = Classifier(settings, "cpu", 1024)
    results: dict[str, dict[str, Any]] = {}
    for name, task in tasks.items():
        run = dense(encoder, task)
        results[name] = {"dense": figures(task, run)}
        for label, scorer in scorers.items():
            scores, milliseconds = scored(scorer, task, run, arguments.depth)
            results[name][label] = figures(task, reranked(run, scores)) | {"cpu_ms": round(milliseconds, 1)}
        print(name, json.dumps(results[name], indent=1), flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
