"""Evaluation of a large corpus on a cluster that loses a node, and its encoding throughput.

    python benchmarks/evaluation_encode.py [--passages N] [--words N] [--layers N] [--data DIRECTORY]

The corpus consists of real passages, then of their sentences in new combinations. It has no duplicates and is the same in
every run. `infembed evaluate` runs with MiniLM on a simulated cluster of a head and three worker nodes: once undisturbed,
and once with a node killed when half of the corpus is encoded. Both start with an empty store. SentenceTransformer.encode
encodes a sample of the corpus before, between and after, on the same cores and at the fastest batch size.

The last line is one JSON object:
    equal                       all embeddings of the disturbed run equal those of the undisturbed run, bit for bit
    max_difference              largest difference of a component between the two runs
    figures_equal               the published figures are equal, too
    driver_growth_mb            anonymous memory of the driver at the end of encoding minus that at one tenth
    driver_mb                   anonymous memory at one tenth, two tenths, ... of the corpus, for both runs
    vs_sentence_transformers    our passages per second, from the first tenth to the last / those of SentenceTransformer.encode
    again_s                     seconds of the undisturbed run repeated with its store: it encodes nothing
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import material
import numpy as np

NODES = 3
QUERIES = 200
BATCH_SIZES = (8, 16, 32, 64)
TENTHS = [n / 10 for n in range(1, 11)]
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def real_passages(data: Path) -> list[str]:
    """Read the passages of MS MARCO and of the InF-IR records, and Cranfield's abstracts."""
    passages = [json.loads(line)["passage"] for line in (data / "msmarco_seeds" / "seeds.jsonl").open(encoding="utf-8")]
    for name in ("train", "dev"):
        for line in (data / "infir_mini" / f"{name}.jsonl").open(encoding="utf-8"):
            record = json.loads(line)
            passages += [v for k, v in record.items() if "document" in k and isinstance(v, str)]
    cranfield = (data / "cranfield" / "cran.all.1400.xml").read_text(encoding="utf-8")
    passages += [" ".join(text.split()) for text in re.findall(r"<text>(.*?)</text>", cranfield, re.DOTALL)]
    return list(dict.fromkeys(passage for passage in passages if passage))


def corpus(data: Path, count: int, words: int) -> list[str]:
    """Make `count` distinct passages; a new one is complete once it has this many words."""
    real = real_passages(data)
    sentences = sorted({s for passage in real for s in _SENTENCE.split(passage) if 4 <= len(s.split()) <= 60})
    lengths = [len(passage.split()) for passage in real]
    rng = random.Random(0)
    made = dict.fromkeys(real[:count])
    while len(made) < count:
        enough, parts = min(words, rng.choice(lengths)), []
        while not parts or sum(len(part.split()) for part in parts) < enough:
            parts.append(rng.choice(sentences))
        made.setdefault(" ".join(parts))
    return list(made)


def write_task(directory: Path, passages: list[str], data: Path) -> None:
    """Write a BEIR directory: the first queries of MS MARCO, each with its passage as the answer."""
    seeds = [json.loads(line) for line in (data / "msmarco_seeds" / "seeds.jsonl").open(encoding="utf-8")]
    row_of = {passage: row for row, passage in enumerate(passages)}
    asked = [seed for seed in seeds if seed["passage"] in row_of][:QUERIES]
    (directory / "qrels").mkdir(parents=True)
    with (directory / "corpus.jsonl").open("w", encoding="utf-8") as out:
        for row, passage in enumerate(passages):
            out.write(json.dumps({"_id": f"p{row}", "title": "", "text": passage}) + "\n")
    with (directory / "queries.jsonl").open("w", encoding="utf-8") as out:
        for number, seed in enumerate(asked):
            out.write(json.dumps({"_id": f"q{number}", "text": seed["query"]}) + "\n")
    lines = [f"q{number}\tp{row_of[seed['passage']]}\t1" for number, seed in enumerate(asked)]
    (directory / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(lines) + "\n")


def minilm(directory: Path, layers: int) -> str:
    """Write MiniLM with its first layers only."""
    if layers == 6:
        return str(material.minilm())
    shutil.copytree(material.minilm(), directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    return str(directory)


@contextmanager
def cluster() -> Iterator[Any]:
    """Start a head and three nodes with one CPU each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 << 20})
    try:
        for _ in range(NODES):
            made.add_node(num_cpus=1, object_store_memory=80 << 20)
        yield made
    finally:
        made.shutdown()


class Driven:
    """A run of `infembed evaluate` in another process.

    Args:
        model: directory.
        root: directory of the output.
        store: directory of the embeddings.
        task: BEIR directory.
        chunks: number of chunks in the store at the end.
        kill: node to kill when half of the chunks are there; None kills none.
    """

    def __init__(
        self,
        model: str,
        root: Path,
        store: Path,
        task: Path,
        chunks: int,
        options: argparse.Namespace,
        kill: bool = False,
    ) -> None:
        self.root, self.store = root, store
        self.written: dict[str, float] = {}
        self.memory: dict[float, dict[str, float]] = {}
        self.killed_at: int | None = None
        settings = {
            "tasks": f"[{task}]",
            "models.minilm": model,
            "output": root,
            "embeddings": store,
            "actors": NODES,
            "batch_tokens": options.batch_tokens,
        }
        began = time.perf_counter()
        with cluster() as nodes:
            process = subprocess.Popen(
                [sys.executable, "-m", "infembed_ray.cli", "evaluate", *(f"{k}={v}" for k, v in settings.items())],
                env=os.environ | {"RAY_ADDRESS": nodes.address},
            )
            while process.poll() is None:
                time.sleep(0.2)
                self._look(process.pid, chunks)
                if kill and self.killed_at is None and len(self.written) >= chunks / 2:
                    self.killed_at = len(self.written)
                    print(f"killing a node: {self.killed_at} of {chunks} chunks are there", flush=True)
                    nodes.remove_node(sorted(nodes.worker_nodes, key=str)[0], allow_graceful=False)
        self.seconds = time.perf_counter() - began
        self.finished = process.returncode == 0

    def _look(self, pid: int, chunks: int) -> None:
        for file in self.files():
            self.written.setdefault(file.name, file.stat().st_mtime)
        for tenth in TENTHS:
            if len(self.written) >= tenth * chunks and tenth not in self.memory:
                self.memory[tenth] = memory_mb(pid)

    def files(self) -> list[Path]:
        """Return the arrays of the store."""
        return sorted(self.store.glob("*/??/*.npy"))

    def rate(self, passages: int) -> float:
        """Return passages per second between the first and the last tenth of the chunks."""
        times = sorted(self.written.values())
        first, last = len(times) // 10, len(times) - 1 - len(times) // 10
        return (last - first) / len(times) * passages / (times[last] - times[first])

    def figures(self) -> Any:
        """Return the published figures."""
        (manifest,) = self.root.glob("*/manifest.json")
        return json.loads(manifest.read_text())["figures"]


def memory_mb(pid: int) -> dict[str, float]:
    """Read `RssAnon` (private memory) and `VmRSS` (with the pages of mapped files) of a process."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return {name: round(int(status[name].split()[0]) / 1024, 1) for name in ("RssAnon", "VmRSS")}
    except (FileNotFoundError, KeyError):  # the process has just ended
        return {}


class Peer:
    """SentenceTransformer.encode on a sample of the corpus."""

    def __init__(self, model: str, passages: list[str], threads: int) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        self._model = SentenceTransformer(model, device="cpu")
        self._sample = passages
        tried = {size: self._seconds(passages[: len(passages) // 4], size) for size in BATCH_SIZES}
        self.batch_size = min(tried, key=tried.__getitem__)
        self.rates: list[float] = []

    def _seconds(self, passages: list[str], size: int) -> float:
        began = time.perf_counter()
        self._model.encode(passages, batch_size=size, normalize_embeddings=True)
        return time.perf_counter() - began

    def measure(self) -> None:
        """Take one more measurement."""
        self.rates.append(len(self._sample) / self._seconds(self._sample, self.batch_size))
        print(f"SentenceTransformer.encode, batch {self.batch_size}: {self.rates[-1]:.1f} passages/s", flush=True)


def compare(one: Driven, other: Driven) -> tuple[bool, float]:
    """Return whether all arrays of two stores are equal, and their largest difference."""
    files, others = one.files(), other.files()
    if [file.name for file in files] != [file.name for file in others]:
        return False, float("nan")
    equal, largest = True, 0.0
    for file, same in zip(files, others, strict=True):
        a, b = np.load(file), np.load(same)
        equal &= np.array_equal(a, b)
        largest = max(largest, float(np.abs(a - b).max()))
    return equal, largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=200_000)
    parser.add_argument("--words", type=int, default=1000, help="words at which a generated passage is complete")
    parser.add_argument("--data", type=Path, default=material.REAL.parents[1], help="directory of the texts")
    parser.add_argument("--layers", type=int, default=6, help="first layers of MiniLM to keep; fewer are faster")
    parser.add_argument("--sample", type=int, default=2000, help="passages per sample of SentenceTransformer")
    parser.add_argument("--batch-tokens", type=int, default=1024, help="of ours")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    from infembed_ray.evaluation.chunks import TEXTS

    passages = corpus(options.data, options.passages, options.words)
    chunks = -(-len(passages) // TEXTS) + 1
    absent: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        model = minilm(root / "model", options.layers)
        peer = None
        try:
            peer = Peer(model, random.Random(1).sample(passages, min(options.sample, len(passages))), options.threads)
        except ImportError as error:
            absent["sentence_transformers"] = str(error)
        os.environ["INFEMBED_SCRATCH"] = str(root / "scratch")
        write_task(root / "task", passages, options.data)
        runs: dict[str, Driven] = {}
        for name, kill in (("undisturbed", False), ("disturbed", True)):
            if peer is not None:
                peer.measure()
            runs[name] = Driven(model, root / name, root / f"{name} store", root / "task", chunks, options, kill)
            print(f"{name}: {runs[name].seconds:.0f} s, memory of the driver {runs[name].memory}", flush=True)
        if peer is not None:
            peer.measure()
        undisturbed, disturbed = runs.values()
        finished = undisturbed.finished and disturbed.finished
        equal, largest = compare(undisturbed, disturbed)
        figures_equal = finished and undisturbed.figures() == disturbed.figures()
        again = Driven(model, root / "again", undisturbed.store, root / "task", chunks, options)

    ours = undisturbed.rate(len(passages))
    theirs = statistics.median(peer.rates) if peer is not None else None
    grown = {name: run.memory[1.0]["RssAnon"] - run.memory[0.1]["RssAnon"] for name, run in runs.items()}
    summary: dict[str, Any] = {
        "finished": finished,
        "equal": equal,
        "max_difference": largest,
        "figures_equal": figures_equal,
        "driver_growth_mb": round(max(grown.values()), 1),
        "driver_mb": {name: [run.memory.get(tenth) for tenth in TENTHS] for name, run in runs.items()},
        "embeddings_mb": round(len(passages) * 384 * 4 / 2**20, 1),
        "vs_sentence_transformers": None if theirs is None else round(ours / theirs, 3),
        "passages_per_second": {
            "ours": round(ours, 1),
            "ours_disturbed": round(disturbed.rate(len(passages)), 1),
            "sentence_transformers": None if theirs is None else round(theirs, 1),
        },
        "seconds": {name: round(run.seconds, 1) for name, run in runs.items()},
        "again_s": round(again.seconds, 1),
        "killed_at_chunk": disturbed.killed_at,
        "chunks": chunks,
        "passages": len(passages),
        "words": options.words,
        "layers": options.layers,
        "sentence_transformers_batch_size": None if peer is None else peer.batch_size,
        "absent": absent,
        "threads": options.threads,
        "machine": f"{os.cpu_count()} vCPU, {platform.system()}, Python {platform.python_version()}",
        "date": date.today().isoformat(),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
