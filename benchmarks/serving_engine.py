"""The encoder's serving engine against infinity-emb under concurrent single texts, and the gain of a cached instruction.

    python benchmarks/serving_engine.py [--infinity-python PATH] [--texts N] [--rounds N]

64 clients in one process send one text each and wait for its vector, in a closed loop. Texts are alternating queries and
passages of MS MARCO, if they are beside this checkout, or else the quickstart's seeds. All engines use MiniLM in fp32 and the
same number of threads. Ours is `EncodingEngine`. infinity-emb 0.0.78 runs its `AsyncEmbeddingEngine` on torch and on ONNX
Runtime, with batches of at most 32 texts (its default) and of 8 (it sorts by length only across batches), each in a process.
All alternate; figures are medians of the rounds. Embeddings must agree to a cosine of 0.999, or the run fails.

For the cached instruction, a random Qwen2 with 6 layers, tiny (width 256) and as wide as the 0.5B model (896), encodes
queries with one thread and client. Instructions have 64 tokens; new and cached ones alternate.

The last line is one JSON object:
    vs_infinity             texts per second, ours / infinity's faster engine
    prefix_cold_over_warm   median latency of a query, instruction new / cached, of the tiny model; `prefixes` has both
    failed                  error of each failed part; such a part has no figures, and the exit status is 1
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import material
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2Model

from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import in_one_line
from infembed_ray.serving.encoder.engine import EncodingEngine

T = TypeVar("T")
SEEDS = Path(__file__).parents[2] / "shared" / "data" / "msmarco_seeds" / "seeds.jsonl"
SAMPLE = Path(__file__).parents[1] / "infembed_ray" / "quickstart" / "sample" / "seeds.jsonl"
PEER = Path(__file__).parent / "peers" / "infinity_engine.py"
CLIENTS = 64
BATCH_SIZES = (32, 8)
INSTRUCTION_TOKENS = 64
DECODERS: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4},
    "0.5B wide": {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14},
}
"""Shapes of the models, with 6 layers and two key-value heads."""


class Ours:
    """`EncodingEngine` in this process."""

    def __init__(self, model: str, **settings: Any) -> None:
        settings = {"dtype": "float32"} | settings
        self.engine = EncodingEngine.load(model, ServeSettings(index="none", **settings))
        self._loop = asyncio.new_event_loop()

    def run(self, texts: list[str], clients: int) -> dict[str, Any]:
        return self._loop.run_until_complete(self._run(texts, clients))

    async def _run(self, texts: list[str], clients: int) -> dict[str, Any]:
        left = iter(texts)
        latencies: list[float] = []

        async def client() -> None:
            for text in left:
                began = time.perf_counter()
                await self.engine.embed([text], None, 60.0)
                latencies.append(time.perf_counter() - began)

        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*[client() for _ in range(clients)])
        return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu, "latencies": latencies}

    def query(self, query: str, instruction: str) -> float:
        """Measure the seconds until a query has its vector."""
        began = time.perf_counter()
        self._loop.run_until_complete(self.engine.embed([query], [instruction], 60.0))
        return time.perf_counter() - began

    def vectors(self, texts: list[str]) -> np.ndarray:
        return self._loop.run_until_complete(self.engine.embed(texts, None)).vectors


class Infinity:
    """infinity-emb's engine in a process of its environment."""

    def __init__(self, python: str, kind: str, batch_size: int, model: str, threads: int) -> None:
        self._cache = tempfile.TemporaryDirectory()  # infinity's cache of optimised graphs
        settings = {"DO_NOT_TRACK": "1", "OMP_NUM_THREADS": str(threads), "HF_HUB_CACHE": self._cache.name}
        self._process = subprocess.Popen(
            [python, str(PEER), kind, model, str(threads), str(batch_size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | settings,
        )
        self._answer()

    def run(self, texts: list[str], clients: int) -> dict[str, Any]:
        return self._ask({"texts": texts, "clients": clients})

    def vectors(self, texts: list[str]) -> np.ndarray:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "vectors.npy")
            self._ask({"texts": texts, "vectors": file})
            return np.load(file)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        assert self._process.stderr is not None
        raise RuntimeError(self._process.stderr.read().strip().splitlines()[-1])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._cache.cleanup()


def real_rows() -> tuple[list[dict[str, str]], str]:
    """Return queries with a passage each, in random order, and the name of their source."""
    source = SEEDS if SEEDS.is_file() else SAMPLE
    with source.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    random.Random(0).shuffle(rows)
    return rows, source.parent.name


def real_texts(count: int) -> tuple[list[str], str]:
    """Return alternating queries and passages of different rows, and the name of their source."""
    rows, source = real_rows()
    pairs = zip(rows[::2], rows[1::2], strict=False)
    texts = [text for one, other in pairs for text in (one["query"], other["passage"])]
    return list(itertools.islice(itertools.cycle(texts), count)), source


def random_qwen2(path: Path, texts: list[str], shape: dict[str, int]) -> str:
    """Write a random Qwen2 with a tokenizer trained on these texts."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", model_max_length=512
    )
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=len(tokenizer) + 1, num_hidden_layers=6, num_key_value_heads=2, **shape)
    Qwen2Model(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def prefix_latencies(texts: list[str], shape: dict[str, int], trials: int, threads: int) -> dict[str, float]:
    """Measure the median milliseconds of a query under a new and under a cached instruction."""
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(random_qwen2(Path(folder), texts, shape), cpus_per_encoder=threads)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rng = random.Random(0)
        words = sorted({word for text in texts for word in text.split()})

        def instruction() -> str:
            """Make an instruction of random words with 64 tokens."""
            ids = tokenizer(" ".join(rng.choices(words, k=INSTRUCTION_TOKENS)))["input_ids"][:INSTRUCTION_TOKENS]
            return str(tokenizer.decode(ids))

        queries = [text for text in texts if len(text) < 80]
        known = instruction()
        ours.query(queries[0], known)
        taken: dict[str, list[float]] = {"cold": [], "warm": []}
        for trial in range(trials):
            query = queries[trial % len(queries)]
            taken["cold"].append(ours.query(query, instruction()))
            taken["warm"].append(ours.query(query, known))
        assert (ours.engine.prefixes.hits, ours.engine.prefixes.misses) == (trials, trials + 1)
    return {f"{which}_ms": round(1e3 * statistics.median(every), 2) for which, every in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--infinity-python", help="Python of an environment with infinity-emb[torch,optimum]==0.0.78")
    parser.add_argument("--texts", type=int, default=512, help="texts of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=100, help="queries with cached instructions")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()

    failed: dict[str, str] = {}

    def attempt(part: str, call: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """Return the result of a call; record a failure and return None if it raises."""
        try:
            return call(*args, **kwargs)
        except Exception as error:
            failed[part] = in_one_line(error)
            print(f"{part} failed: {failed[part]}", flush=True)
            return None

    texts, source = real_texts(options.texts)
    model = material.minilm()
    ours = Ours(model, cpus_per_encoder=options.threads)
    runs: dict[str, Any] = {"ours": ours}
    for name, setting in (("ours_float32", {"dtype": "float32"}), ("ours_bf16", {"dtype": "bfloat16"})):
        if run := attempt(name, Ours, model, cpus_per_encoder=options.threads, **setting):
            runs[name] = run
    absent: dict[str, str] = {}
    for kind, batch_size in itertools.product(("torch", "optimum"), BATCH_SIZES):
        name = f"infinity_{kind}_{batch_size}"
        if options.infinity_python is None:
            absent[name] = "give --infinity-python"
            continue
        try:
            runs[name] = Infinity(options.infinity_python, kind, batch_size, model, options.threads)
        except (OSError, RuntimeError) as error:
            absent[name] = str(error)
    started = dict(runs)
    reference = ours.vectors(texts[:CLIENTS])
    cosines: dict[str, float] = {}
    for name, run in started.items():
        vectors = attempt(name, run.vectors, texts[:CLIENTS])
        if vectors is None:
            del runs[name]
        else:
            cosines[name] = float((reference * vectors).sum(axis=1).min())
    assert min(cosines.values()) >= 0.999, cosines

    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for number in range(options.rounds):
        for name, run in list(runs.items()):
            measured = attempt(name, run.run, texts, CLIENTS)
            if measured is None:
                del runs[name], taken[name]
            else:
                taken[name].append(measured)
        rates = {name: round(len(texts) / measured[-1]["seconds"], 1) for name, measured in taken.items()}
        print(f"round {number + 1}, texts a second:", rates, flush=True)
    alone: dict[str, float] = {}
    for name, run in runs.items():
        if measured := attempt(f"{name}, one client", run.run, texts[:64], 1):
            alone[name] = statistics.median(measured["latencies"])
    for name, run in started.items():
        if isinstance(run, Infinity):
            attempt(f"{name}, close", run.close)
    prefixes: dict[str, dict[str, float]] = {}
    for name, shape in DECODERS.items():
        if medians := attempt(f"prefixes, {name}", prefix_latencies, texts, shape, options.trials, threads=1):
            prefixes[name] = medians | {"ratio": round(medians["cold_ms"] / medians["warm_ms"], 3)}

    rates = {name: len(texts) / statistics.median(r["seconds"] for r in measured) for name, measured in taken.items()}
    peers = [rate for name, rate in rates.items() if name.startswith("infinity")]

    def latency(name: str, percentile: int) -> float:
        every = [seconds for measured in taken[name] for seconds in measured["latencies"]]
        return round(1e3 * float(np.percentile(every, percentile)), 1)

    summary = {
        "vs_infinity": round(rates["ours"] / max(peers), 3) if peers and "ours" in rates else None,
        "prefix_cold_over_warm": prefixes["tiny"]["ratio"] if "tiny" in prefixes else None,
        "prefixes": prefixes,
        "texts_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "cpu_seconds": {
            name: round(statistics.median(r["cpu"] for r in measured), 2) for name, measured in taken.items()
        },
        "p50_ms": {name: latency(name, 50) for name in runs},
        "p99_ms": {name: latency(name, 99) for name in runs},
        "one_client_p50_ms": {name: round(1e3 * seconds, 2) for name, seconds in alone.items()},
        "runtime": ours.engine.dtype,
        "least_cosine": {name: round(cosine, 6) for name, cosine in cosines.items()},
        "absent": absent,
        "failed": failed,
        "clients": CLIENTS,
        "texts": len(texts),
        "of": source,
        "threads": options.threads,
        "machine": f"{os.cpu_count()} vCPU, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}",
        "date": date.today().isoformat(),
    }
    print(json.dumps(summary))
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
