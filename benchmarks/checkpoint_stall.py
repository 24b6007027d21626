"""How long a checkpoint stops training: written on the training thread, and from a snapshot in the background.

    python benchmarks/checkpoint_stall.py [--stage 2] [--layers 12] [--directory DIR]

Two gloo workers train a random Qwen2 on this machine's CPUs. The state is saved several times, each time while steps go
on. On a GPU the copy to pinned memory takes the place of the copy in memory.

The last line is one JSON object, seconds being medians of worker 0:
    state_gib           GiB of the files of all workers
    synchronous_s       snapshot, write, hash and sync before the next step
    blocked_s           snapshot only: what training waits for now
    stall               blocked_s / synchronous_s
    copy_gb_per_s       GB of this worker's state over blocked_s
    step_s, step_while_writing_s    a step without and during a write
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import planner
import torch
import torch.multiprocessing as mp

SAVES = 4
STEPS = 3


def write_model(path: Path, layers: int) -> None:
    from transformers import Qwen2Config, Qwen2Model

    planner.write_model(path)  # the tokenizer
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 4}
    Qwen2Model(
        Qwen2Config(vocab_size=512, num_hidden_layers=layers, max_position_embeddings=512, **sizes)
    ).save_pretrained(path)


def worker(rank: int, model: str, stage: int, directory: Path, results: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    from infembed_ray.training.backbone import load_encoder
    from infembed_ray.training.engine import Engine

    settings = planner.settings_of(model, f"zero_stage={stage}")
    engine = Engine(load_encoder(settings), settings)
    engine.train()

    def step(number: int) -> float:
        began = time.perf_counter()
        queries, passages = (engine.encode(planner.texts(2, number, side)) for side in ("query", "passage"))
        engine.backward((queries @ passages.T).logsumexp(1).mean())
        engine.update(1e-5)
        return time.perf_counter() - began

    step(0)
    blocked, synchronous, alone, while_writing = [], [], [], []
    for number in range(SAVES):
        alone += [step(n) for n in range(STEPS)]
        torch.distributed.barrier()
        began = time.perf_counter()
        writing = engine.save(directory, f"synchronous-{number}")
        blocked.append(time.perf_counter() - began)
        written = writing.result()
        synchronous.append(time.perf_counter() - began)
        torch.distributed.barrier()
        writing = engine.save(directory, f"background-{number}")
        for n in range(STEPS):
            seconds = step(n)
            if not writing.done():  # the whole step was beside the write
                while_writing.append(seconds)
        writing.result()
        torch.distributed.barrier()
    results[rank] = {
        "bytes": sum(file.size for file in written.files.values()),
        "blocked": statistics.median(blocked[1:]),  # the first allocates the memory
        "synchronous": statistics.median(synchronous[1:]),
        "step": statistics.median(alone),
        "step_while_writing": statistics.median(while_writing) if while_writing else None,
    }
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--directory", type=Path, help="where the checkpoints go; default: a temporary directory")
    arguments = parser.parse_args()
    os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(planner.free_port())}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory, mp.Manager() as manager:
        model, states = Path(directory) / "model", Path(directory) / "states"
        write_model(model, arguments.layers)
        results = manager.dict()
        mp.spawn(worker, args=(str(model), arguments.stage, states, results), nprocs=2)
        first = results[0]
        figures = {
            "state_gib": sum(results[rank]["bytes"] for rank in (0, 1)) / 2**30,
            "synchronous_s": first["synchronous"],
            "blocked_s": first["blocked"],
            "stall": first["blocked"] / first["synchronous"],
            "copy_gb_per_s": first["bytes"] / first["blocked"] / 1e9,
            "step_s": first["step"],
            "step_while_writing_s": first["step_while_writing"],
        }
    print(json.dumps({name: value and round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
