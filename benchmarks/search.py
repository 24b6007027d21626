"""Search in one of our shards against bare FAISS, with the same vectors, parameters and threads.

    python benchmarks/search.py [--passages N] [--threads N] [--directory DIR]

MiniLM embeds both collections. `cranfield` has 1,400 abstracts (random texts without the development data). `large` has N
vectors between some thousand real embeddings and their neighbours, with noise, so they cluster like embeddings of text; its
texts have the length of passages. Queries are embeddings of real queries that played no part in the calibration. The type
of the index is the one that `infembed index` chooses, built and calibrated in the same way.

Bare is FAISS's `index.search` of the same file in memory, which returns row numbers and scores. `Shard.search_rows` returns the
same, with exact scores and ties in order; `Shard.search` also reads ids and texts of the ten hits. They alternate block by block; figures are medians of the ratios of neighbouring
blocks. `--directory` keeps embeddings and indexes for another run.

The last line is one JSON object:
    recall_at_10    of the chosen type against exact search; the lower of both collections
    vs_faiss        queries per second, rows and scores: ours / bare FAISS; the lowest of both collections and all batch sizes
    vs_faiss_texts  the same, ours with ids and texts
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import faiss
import material
import numpy as np
import torch

from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.records import tables
from infembed_ray.retrieval.shard_files import ShardFacts
from infembed_ray.retrieval.shards import Shard
from tests.support.shards import write_shard

SHARED = material.REAL.parents[1]
K = 10
BATCHES = (1, 32, 256)
QUERIES = 1024
"""Size passages of the large collection."""
NOISE = 0.35
"""Length of the noise; a vector has length 1."""


def texts() -> tuple[list[str], list[str], list[str], str]:
    """Return passages, sentences, queries, and the name of their source."""
    if not (SHARED / "cranfield").is_dir():
        made, source = material.records(1000)
        passages = [text for r in made for text in (r.document_positive, r.hard_negative_document_1)]
        return passages[:1400], passages[1400:], [r.query_positive for r in made], source
    root = ElementTree.fromstring("<all>" + (SHARED / "cranfield" / "cran.all.1400.xml").read_text() + "</all>")
    passages = [
        " ".join((doc.findtext(".//text") or doc.findtext(".//title") or "none").split()) for doc in root.iter("doc")
    ]
    found = ElementTree.fromstring((SHARED / "cranfield" / "cran.qry.xml").read_text())
    queries = [" ".join((top.findtext("title") or "").split()) for top in found.iter("top")]
    seeds = tables.read(SHARED / "msmarco_seeds" / "seeds.jsonl", tables.Seed, "seeds")
    queries += [seed.query for seed in seeds]
    sentences = [s for text in [*passages, *(seed.passage for seed in seeds)] for s in re.split(r"(?<=[.!?]) +", text)]
    sentences = sorted({s for s in sentences if len(s) > 30})
    return passages, random.Random(0).sample(sentences, min(6000, len(sentences))), queries, "cranfield, msmarco_seeds"


def embeddings(directory: Path) -> dict[str, np.ndarray]:
    file = directory / "embeddings.npz"
    if not file.is_file():
        encoder = InstructionEncoder.from_pretrained(material.minilm())
        passages, sentences, queries, _ = texts()
        encoded = {"passages": encoder.encode_passages(passages), "sentences": encoder.encode_passages(sentences)}
        np.savez(file, **encoded, queries=encoder.encode_queries(queries))
    return dict(np.load(file))


def between(real: np.ndarray, count: int) -> np.ndarray:
    """Make (count, d) unit vectors: each between a real one and one of its nearest neighbours, with noise."""
    rng = np.random.default_rng(0)
    _, near = faiss.knn(real, real, 11, faiss.METRIC_INNER_PRODUCT)
    first = rng.integers(len(real), size=count)
    second = near[first, rng.integers(1, 11, size=count)]
    share = rng.random((count, 1), dtype=np.float32) / 2
    noise = rng.standard_normal((count, real.shape[1]), dtype=np.float32) * NOISE / np.sqrt(real.shape[1])
    made = real[first] * (1 - share) + real[second] * share + noise
    return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)


def shard(directory: Path, name: str, passages: list[str], vectors: np.ndarray) -> ShardFacts:
    saved = directory / f"{name}.json"
    if not saved.is_file():
        began = time.perf_counter()
        ids = [f"{name}-{row:07d}" for row in range(len(vectors))]
        facts = write_shard(directory / name, ids, passages, vectors.astype(np.float16))
        print(f"{name}: {facts.factory} built in {time.perf_counter() - began:.0f} s", flush=True)
        saved.write_text(json.dumps(asdict(facts)))
    return ShardFacts.from_json(json.loads(saved.read_text()))


def recall(opened: Shard, vectors: np.ndarray, queries: np.ndarray) -> float:
    scores, _ = opened.search_rows(queries, K)
    exact, _ = faiss.knn(queries, vectors, K, faiss.METRIC_INNER_PRODUCT)
    return round(float((scores >= exact[:, -1:] - 1e-6).mean()), 4)


def seconds(run: Callable[[np.ndarray], Any], blocks: list[np.ndarray]) -> float:
    began = time.perf_counter()
    for block in blocks:
        run(block)
    return time.perf_counter() - began


def beside(
    ours: Callable[[np.ndarray], Any], bare: Any, queries: np.ndarray, batch: int, rounds: int
) -> dict[str, float]:
    """Return queries per second of both, and the median ratio of neighbouring blocks."""
    blocks = [queries[start : start + batch] for start in range(0, len(queries) - batch + 1, batch)]
    runs: dict[str, Callable[[np.ndarray], Any]] = {"ours": ours, "bare": lambda q: bare.search(q, K)}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for part in range(0, len(blocks), max(1, len(blocks) // 8)):
            some = blocks[part : part + max(1, len(blocks) // 8)]
            for name in sorted(runs, reverse=bool(number % 2)):
                taken[name].append(seconds(runs[name], some) / (len(some) * batch))
    rates = {name: round(1 / statistics.median(values), 1) for name, values in taken.items()}
    return {**rates, "ratio": round(statistics.median(np.divide(taken["bare"], taken["ours"]).tolist()), 3)}


def least(kind: str, collections: dict[str, Any]) -> float:
    return min(found["ratio"] for of in collections.values() for found in of[kind].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=200_000, help="passages of the large collection")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--directory", type=Path, help="directory for embeddings and indexes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    faiss.omp_set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        real = embeddings(directory)
        passages, _, _, source = texts()
        vectors = {
            "cranfield": real["passages"],
            "large": between(np.concatenate([real["passages"], real["sentences"]]), options.passages),
        }
        of_row = {
            "cranfield": passages,
            "large": [passages[row % len(passages)][:500] for row in range(options.passages)],
        }
        vectors = {name: of.astype(np.float16).astype(np.float32) for name, of in vectors.items()}  # as they are stored
        collections: dict[str, Any] = {}
        for name in vectors:
            facts = shard(directory, name, of_row[name], vectors[name])
            opened = Shard.open(directory, facts)
            bare = faiss.read_index(str(directory / name / "index.faiss"))
            if "efSearch" in facts.search:
                bare.hnsw.efSearch = facts.search["efSearch"]
            queries = real["queries"][:QUERIES]
            runs = {"rows": partial(opened.search_rows, k=K), "texts": partial(opened.search, k=K)}
            collections[name] = {
                "passages": facts.passages,
                "factory": facts.factory,
                "search": facts.search,
                "recall_at_10_of_itself": facts.recall_at_10,
                "recall_at_10": recall(opened, vectors[name], queries),
                **{
                    kind: {batch: beside(run, bare, queries, batch, options.rounds) for batch in BATCHES}
                    for kind, run in runs.items()
                },
            }
            print(name, collections[name], flush=True)
    summary = {
        "recall_at_10": min(found["recall_at_10"] for found in collections.values()),
        "vs_faiss": least("rows", collections),
        "vs_faiss_texts": least("texts", collections),
        "collections": collections,
        "of": source,
        "threads": options.threads,
        "machine": f"{os.cpu_count()} vCPU, {platform.system()}, Python {platform.python_version()}, faiss {faiss.__version__}",
        "date": date.today().isoformat(),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
