"""Index types side by side: memory, recall, queries per second and build time, on the large collection of benchmarks/search.py.

    python benchmarks/index_types.py [--factories TYPE TYPE ...] [--passages N] [--directory DIR]

Each type is built and calibrated as `infembed index` does it. Types that do not store the vectors rank their candidates again
with those of a mapped float16 file. Queries are embeddings of real queries; none took part in the calibration. One thread.

The last line is one JSON object, by type:
    bytes           of the index in memory, per vector
    recall_at_10    against exact search over the stored vectors
    per_s           queries per second, by number of queries at once
    build_s         training and adding
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import faiss
import numpy as np
from search import QUERIES, K, between, embeddings

from infembed_ray.retrieval import faiss_index as factories
from infembed_ray.retrieval.faiss_index import Searcher, calibrate

BATCHES = (1, 32)


def rate(searcher: Searcher, queries: np.ndarray, batch: int, rounds: int) -> float:
    """Queries per second, the median of some rounds over all queries."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        for start in range(0, len(queries), batch):
            searcher.search(queries[start : start + batch], K)
        taken.append(time.perf_counter() - began)
    return round(len(queries) / float(np.median(taken)))


def main() -> None:
    """Measure, and print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factories", nargs="+", help="FAISS types; without: the candidates of `infembed index`")
    parser.add_argument("--passages", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="directory for embeddings and indexes")
    options = parser.parse_args()
    faiss.omp_set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary)
        real = embeddings(directory)
        if not (file := directory / f"vectors-{options.passages}.npy").is_file():
            np.save(
                file,
                between(np.concatenate([real["passages"], real["sentences"]]), options.passages).astype(np.float16),
            )
        vectors, queries = np.load(file, mmap_mode="r"), real["queries"][:QUERIES]
        exact, _ = faiss.knn(queries, vectors.astype(np.float32), K, faiss.METRIC_INNER_PRODUCT)
        print("| type | bytes a vector | recall@10 | parameters | queries/s, 1 at once | 32 at once | build s |")
        print("|---|---:|---:|---|---:|---:|---:|")
        for name in options.factories or factories.candidates(len(vectors)):
            file = directory / f"{name.replace(',', '-')}.faiss"
            began, build_s = time.perf_counter(), None
            if not file.is_file():
                faiss.write_index(factories.build(name, vectors), str(file))
                build_s = round(time.perf_counter() - began)
            searcher = Searcher(faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC), vectors)
            parameters, _ = calibrate(searcher)
            scores, _ = searcher.search(queries, K)
            of: dict[str, Any] = {
                "bytes": round(file.stat().st_size / len(vectors)),
                "recall_at_10": round(float((scores >= exact[:, -1:] - 1e-6).mean()), 4),
                "parameters": parameters,
                "per_s": {batch: rate(searcher, queries, batch, options.rounds) for batch in BATCHES},
                "build_s": build_s,
            }
            found[name] = of
            shown = ", ".join(f"{key} {value}" for key, value in parameters.items())
            print(
                f"| {name} | {of['bytes']} | {of['recall_at_10']:.3f} | {shown} | "
                + " | ".join(f"{value}" for value in of["per_s"].values())
                + f" | {build_s} |",
                flush=True,
            )
    machine = f"{os.cpu_count()} vCPU, {platform.system()}, faiss {faiss.__version__}"
    print(json.dumps({"types": found, "machine": machine, "date": date.today().isoformat()}))


if __name__ == "__main__":
    main()
