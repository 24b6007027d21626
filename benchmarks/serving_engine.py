"""Concurrent single embeds through the serving engine, beside infinity-emb's, and what a cached instruction spares.

    python benchmarks/serving_engine.py [--infinity-python PATH] [--texts N] [--rounds N]

64 clients in one process, each sending one text after the other and waiting for its vector: queries and passages of MS
MARCO in turn where they lie beside this checkout (or the quickstart's seeds), MiniLM in fp32, as many threads for all. Ours
is `EncodingEngine`, infinity-emb 0.0.78 its `AsyncEmbeddingEngine` on torch and on ONNX Runtime, in batches of at most 32
texts (its default) and of 8 (it sorts by length only what is more than one batch), each in a process of its own. All take
turns; medians of the rounds. Its embeddings and ours must agree to a cosine of 0.999 in every text, or there is no figure.

A cached instruction: a random Qwen2 of 6 layers, tiny (256 wide) and as wide as the 0.5B one (896), one thread and client, queries
under an instruction of 64 tokens: one that comes for the first time, and one that is cached, in turn.

The last line is one JSON object:
    vs_infinity             texts a second of ours / of infinity's faster engine
    prefix_cold_over_warm   median latency of a query, instruction new / cached, of the tiny one; `prefixes` has both
    failed                  error of each part that failed; that part has no figures, and the exit status is 1
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
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2Model

from infembed_ray.config import ServeSettings
from infembed_ray.errors import in_one_line
from infembed_ray.serving.encoding import EncodingEngine

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
"""Of 6 layers with two key-value heads."""


class Ours:
    """`EncodingEngine` in this process."""

    def __init__(self, model: str, **settings: Any) -> None:
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
                await self.engine.embed([text], "passage", None, 60.0)
                latencies.append(time.perf_counter() - began)

        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*[client() for _ in range(clients)])
        return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu, "latencies": latencies}

    def query(self, query: str, instruction: str) -> float:
        """Seconds until a query under an instruction has its vector."""
        began = time.perf_counter()
        self._loop.run_until_complete(self.engine.embed_queries([query], [instruction], 60.0))
        return time.perf_counter() - began

    def vectors(self, texts: list[str]) -> np.ndarray:
        return self._loop.run_until_complete(self.engine.embed(texts, "passage")).vectors


class Infinity:
    """Its engine in a process of its environment."""

    def __init__(self, python: str, kind: str, batch_size: int, model: str, threads: int) -> None:
        self._cache = tempfile.TemporaryDirectory()  # of graphs it optimised
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
    """Queries, each with a passage, in random order, and where they come from."""
    source = SEEDS if SEEDS.is_file() else SAMPLE
    with source.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    random.Random(0).shuffle(rows)
    return rows, source.parent.name


def real_texts(count: int) -> tuple[list[str], str]:
    """Queries and passages in turn, of different rows, and where they come from."""
    rows, source = real_rows()
    pairs = zip(rows[::2], rows[1::2], strict=False)
    texts = [text for one, other in pairs for text in (one["query"], other["passage"])]
    return list(itertools.islice(itertools.cycle(texts), count)), source


def random_qwen2(path: Path, texts: list[str], shape: dict[str, int]) -> str:
    """A random Qwen2 with a tokenizer of these texts."""
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
    """Milliseconds of a query under an instruction that is new, and under one that is cached: medians."""
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(random_qwen2(Path(folder), texts, shape), cpus_per_encoder=threads, runtime="torch")
        tokenizer = ours.engine.tokenizer
        rng = random.Random(0)
        words = sorted({word for text in texts for word in text.split()})

        def instruction() -> str:
            """Random words, as many as make 64 tokens."""
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
        assert (ours.engine.facts.prefix_hits, ours.engine.facts.prefix_misses) == (trials, trials + 1)
    return {f"{which}_ms": round(1e3 * statistics.median(every), 2) for which, every in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--infinity-python", help="of an environment with infinity-emb[torch,optimum]==0.0.78")
    parser.add_argument("--texts", type=int, default=512, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=100, help="of cached instructions")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()

    failed: dict[str, str] = {}

    def attempt(part: str, call: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """The result of a call; None if it fails, which makes the part a failed one."""
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
    for name, setting in (("ours_torch", {"runtime": "torch"}), ("ours_bf16", {"dtype": "bfloat16"})):
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
        "runtime": ours.engine.facts.runtime,
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
