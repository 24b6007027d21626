"""infinity-emb's engine on the same texts; run with the Python of an environment that has it.

    python infinity_engine.py torch|optimum MODEL THREADS BATCH_SIZE

Reads one JSON object a line and answers each with one: {"texts", "clients"} -> {"seconds", "cpu", "latencies"}, and with
{"texts", "vectors": path} it writes their vectors there. Its other lines are its log.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
from infinity_emb import AsyncEmbeddingEngine, EngineArgs


async def rounds(engine: AsyncEmbeddingEngine) -> None:
    async with engine:
        print(json.dumps({"ready": True}), flush=True)
        while line := await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
            print(json.dumps(await answer(engine, json.loads(line))), flush=True)


async def answer(engine: AsyncEmbeddingEngine, asked: dict[str, Any]) -> dict[str, Any]:
    if "vectors" in asked:
        np.save(asked["vectors"], np.stack((await engine.embed(sentences=asked["texts"]))[0]))
        return {}
    texts = iter(asked["texts"])
    latencies: list[float] = []

    async def client() -> None:
        for text in texts:
            began = time.perf_counter()
            await engine.embed(sentences=[text])
            latencies.append(time.perf_counter() - began)

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*[client() for _ in range(asked["clients"])])
    return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu, "latencies": latencies}


def exported(model: str, into: str) -> str:
    """The model with the graph that optimum makes of it, which its engine optimises further."""
    from optimum.exporters.onnx import main_export

    shutil.copytree(model, into, dirs_exist_ok=True)
    main_export(model, output=into, task="feature-extraction", library_name="transformers")
    os.chdir(into)  # optimum-onnx 0.1 takes the name that infinity gives it only if it is a file's here
    return "."


if __name__ == "__main__":
    kind, model, threads, batch_size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        if kind == "optimum":
            model = exported(model, folder)
        options = {"engine": kind, "device": "cpu", "dtype": "float32", "pooling_method": "mean"}
        options |= {"batch_size": batch_size}
        asyncio.run(rounds(AsyncEmbeddingEngine.from_args(EngineArgs(model_name_or_path=model, **options))))
