"""Accuracy of the planner: planned against measured peak memory of a step, for every ZeRO stage.

    python benchmarks/planner.py                              # all stages in fp32 and bf16, two workers on this machine
    python benchmarks/planner.py --runs zero_stage=2 zero_stage=3,precision=bf16
    python benchmarks/planner.py --table                      # the table of docs/guides/plan.md, without measurements
    python benchmarks/planner.py --recipes                    # the same for the recipes of jobs/configs/paper

A random Qwen2 of 38 M parameters takes two steps under DeepSpeed with two gloo workers on this machine's CPUs. The measure is
the peak sum of all live tensor storages, tracked from operator to operator with a TorchDispatchMode and weak references. On
a GPU this is `torch.cuda.max_memory_allocated`. Resident memory would include libraries and the allocator's caches, and miss
memory that is allocated but never touched. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

WORKERS = 2
TOKENS = 48
STEPS = 2
RECIPES = Path(__file__).parents[1] / "jobs" / "configs" / "paper"
RUNS = [f"zero_stage={s}" for s in range(4)] + [f"zero_stage={s},precision=bf16" for s in (1, 2, 3)]
RUNS += ["zero_stage=2,activation_checkpointing=true", "zero_stage=2,grad_cache_tokens=192", "zero_stage=2,lora={}"]
KEPT = "interpolation=0.5,validation={records: held-out}"
"""Settings with which the weights before the training stay in memory; the records are not read."""
RUNS += [f"zero_stage=2,{KEPT}", f"zero_stage=1,precision=bf16,{KEPT}"]
BUCKET = "deepspeed={zero_optimization: {reduce_bucket_size: 4000000}}"
"""Bucket size; DeepSpeed's default of 500 M elements would dominate the measurement."""


def settings_of(model: str, run: str) -> Any:
    from infembed_ray.config.planning import PlanTrainSettings

    return PlanTrainSettings.load(None, [f"model={model}", BUCKET, "workers=2", *run.split(",")])


def write_model(path: Path) -> None:
    """Write a random Llama, most of whose parameters are in its layers, with a tokenizer."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8}
    LlamaModel(
        LlamaConfig(vocab_size=512, num_key_value_heads=4, max_position_embeddings=512, **sizes)
    ).save_pretrained(path)
    words = {word: n for n, word in enumerate(("<pad>", "<eos>", "<unk>"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(path)


def texts(number: int, seed: int, side: str) -> list[Any]:
    """Make random texts without shared prefixes."""
    import random

    from infembed_ray.modeling.tokenizer import Tokens

    rng = random.Random(f"{seed}/{side}")
    return [Tokens([rng.randrange(3, 512) for _ in range(TOKENS)], side) for _ in range(number)]


def measure(model: str, run: str, number: int) -> int:
    """Measure the peak bytes of the steps in this worker."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from infembed_ray.training.backbone import load_encoder
    from infembed_ray.training.engine import Engine

    class Live(TorchDispatchMode):
        """Bytes of all live storages that operators returned."""

        def __init__(self) -> None:
            super().__init__()
            self.bytes = self.peak = 0
            self.known: dict[int, Any] = {}

        def add(self, value: Any) -> None:
            if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
                return
            storage = value.untyped_storage()
            if storage._cdata not in self.known:
                size, key = storage.nbytes(), storage._cdata
                self.known[key] = weakref.finalize(storage, self.drop, key, size)
                self.bytes += size
                self.peak = max(self.peak, self.bytes)

        def drop(self, key: int, size: int) -> None:
            self.bytes -= size
            del self.known[key]

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for value in tree_leaves(result):
                self.add(value)
            return result

    torch.set_num_threads(1)
    settings = settings_of(model, run)
    live = Live()
    with live:
        encoder = load_encoder(settings)
        for parameter in encoder.parameters():
            parameter.data = parameter.data.clone()  # in memory instead of mapped from the file
        engine = Engine(encoder, settings)
        engine.train()
        for step in range(STEPS):
            if step == STEPS - 1:
                live.peak = live.bytes
            queries, passages = (engine.encode(texts(number, step, side)) for side in ("query", "passage"))
            loss = (queries @ passages.T).logsumexp(1).mean()
            engine.backward(loss)
            del queries, passages, loss
            engine.update(1e-5)
        if settings.validation is not None:
            with engine.published_weights():
                engine.embed(texts(number, STEPS, "passage"))
    engine.close()
    return live.peak


def planned(model: str, run: str, number: int) -> int:
    """Return the planner's peak bytes of a step."""
    from infembed_ray.planning.backbones import load
    from infembed_ray.planning.memory import ModelSize, saved_bytes
    from infembed_ray.planning.train import tensor_memory
    from infembed_ray.training.backbone import precision_of

    settings = settings_of(model, run)
    encoder = load(settings)
    size = ModelSize.of(encoder, settings)
    places = 2 * number * TOKENS  # of a step
    chunk = settings.grad_cache_tokens
    passes = places / chunk if chunk else 2
    kept = saved_bytes(encoder, precision_of(settings))
    return round(tensor_memory(settings, size, kept, chunk or places, passes).total)


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_workers(model: str, run: str, number: int) -> int:
    """Return the larger of the two workers' peaks."""
    environment = os.environ | {"WORLD_SIZE": str(WORKERS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, __file__, "--texts", str(number), "--one", model, run]
    children = [
        subprocess.Popen(
            command, env=environment | {"RANK": str(n), "LOCAL_RANK": str(n)}, stdout=subprocess.PIPE, text=True
        )
        for n in range(WORKERS)
    ]
    outputs = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(f"{run}: a worker failed")
    return max(int(output.splitlines()[-1]) for output in outputs)


def table() -> str:
    """Print the table of docs/guides/plan.md: the paper's Qwen2.5 on one to four nodes of 8 A100-80G."""
    from infembed_ray.config.planning import PlanTrainSettings
    from infembed_ray.planning.train import plan
    from infembed_ray.storage.steps import GIB

    lines = ["| model | nodes | " + " | ".join(f"ZeRO-{s} GiB, ckpt" for s in (1, 2, 3)) + " | s/step | h |"]
    lines.append("|---|---:" + "|---:" * 5 + "|")
    for size in ("1.5B", "3B", "7B"):
        for nodes in range(1, 5):
            given = [f"model=Qwen/Qwen2.5-{size}", "precision=bf16", "records_per_step=32", "mfu=0.4"]
            given.append(f"workers={8 * nodes}")
            plans = {
                (stage, again): plan(
                    PlanTrainSettings.load(None, [*given, f"zero_stage={stage}", f"activation_checkpointing={again}"])
                )
                for stage in (1, 2, 3)
                for again in ("false", "true")
            }
            cells = [
                ", ".join(f"{plans[stage, again].memory.total / GIB:.0f}" for again in ("false", "true"))
                for stage in (1, 2, 3)
            ]
            best = plans[2, "false"]
            lines.append(f"| {size} | {nodes} | {' | '.join(cells)} | {best.step_seconds:.2f} | {best.hours:.2f} |")
    return "\n".join(lines)


def recipes() -> str:
    """Print a table of the recipes of the paper's backbones as they are set, on one to four nodes of 8 A100-80G."""
    from infembed_ray.config.planning import PlanTrainSettings
    from infembed_ray.planning.train import plan
    from infembed_ray.storage.steps import GIB

    lines = [
        "| recipe | parameters | settings | GiB per GPU on 1, 2, 4 nodes | tokens per step | tokens/s | h, 2 epochs |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    paths = sorted(path for path in RECIPES.glob("*.yaml") if not path.stem.startswith(("table", "evaluate", "report")))
    made = {
        path: [plan(PlanTrainSettings.load(str(path), ["mfu=0.4", f"workers={8 * n}"])) for n in (1, 2, 4)]
        for path in paths
    }
    for path in sorted(paths, key=lambda path: made[path][0].size.parameters):
        reports = made[path]
        keys = ("zero_stage", "activation_checkpointing", "offload")
        given = PlanTrainSettings.load(str(path))
        settings = " ".join(f"{key}={getattr(given, key)}" for key in keys if key in given.model_fields_set)
        tokens = reports[0].work.tokens * reports[0].gpus
        memory = ", ".join(f"{report.memory.total / GIB:.1f}" for report in reports)
        lines.append(
            f"| {path.stem} | {reports[0].size.parameters / 1e9:.2f} B | `{settings}` | {memory} | {tokens:,.0f} | "
            f"{tokens / reports[0].step_seconds:,.0f} | {reports[0].hours:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=RUNS, help="settings of each run, separated by commas")
    parser.add_argument("--texts", type=int, default=12, help="texts of each side per worker")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--recipes", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        print(table())
        return
    if arguments.recipes:
        print(recipes())
        return
    if arguments.one:
        print(measure(*arguments.one, arguments.texts))
        return
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        print("| run | measured MiB | planned MiB | planned / measured |\n|---|---:|---:|---:|")
        for run in arguments.runs:
            peak, plan = (of(directory, run, arguments.texts) for of in (run_workers, planned))
            results[run] = plan / peak
            print(f"| {run} | {peak / 2**20:.0f} | {plan / 2**20:.0f} | {plan / peak:.3f} |", flush=True)
    print(json.dumps({"planned_over_measured": {run: round(ratio, 4) for run, ratio in results.items()}}))


if __name__ == "__main__":
    main()
