"""Cases, their processes and their time. This module imports neither torch nor the package."""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu import report

Plain = dict[str, Any]
"""A line of the results as JSON has it."""
PATIENCE = 2.0
"""A case is killed after this multiple of its time, after which it should begin nothing new."""
END_S = 5.0
"""Seconds that a process gets to end after its last result."""
BASE = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "rich", "yaml", "pyarrow", "obstore")
"""Modules that every case may import; the training configuration and model directories need the last six."""
PRELOADED = ["torch", "transformers.models.qwen2.modeling_qwen2"]
"""Modules that the server of new processes imports once; they do not touch the GPU."""


class Skipped(Exception):
    """The case cannot run on this machine; the message says why."""


@dataclass(frozen=True)
class Result:
    """One measurement.

    Attributes:
        name: what was measured.
        figures: name -> number or text.
        checks: name -> (value, largest value that passes).
    """

    name: str
    figures: dict[str, float | str] = field(default_factory=dict)
    checks: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def failed(self) -> list[str]:
        """Names of the checks that did not pass; NaN does not pass."""
        return [name for name, (value, bound) in self.checks.items() if not value <= bound]

    def as_plain(self) -> Plain:
        """Return the result with numbers of four digits."""
        return {
            "result": self.name,
            "figures": {name: _short(value) for name, value in self.figures.items()},
            "checks": {name: [_short(number) for number in pair] for name, pair in self.checks.items()},
            "failed": self.failed,
        }


@dataclass(frozen=True)
class Context:
    """What a case gets.

    Attributes:
        device: cuda or cpu.
        tiny: whether to run on shapes that take a CPU no time.
        argument: of the case, such as the size of its model.
        ends: time (`time.monotonic`) after which the case should begin nothing new.
        profile: whether to divide the host's time of a step.
    """

    device: str
    tiny: bool
    argument: Any = None
    ends: float = math.inf
    profile: bool = False

    @property
    def left(self) -> float:
        """Seconds left of the case's time."""
        return self.ends - time.monotonic()


@dataclass(frozen=True)
class Case:
    """A function of a module (relative to this package) that yields results.

    Attributes:
        seconds: its time on an H100 or H200, with its process; with less left, it does not start.
        needs: modules beside `BASE`.
    """

    module: str
    function: str
    seconds: float
    shows: str
    argument: Any = None
    needs: tuple[str, ...] = ()


_ZERO = ("deepspeed", "accelerate")
CASES: dict[str, Case] = {
    "machine": Case(".machine", "machine", 10, "versions, bf16 FLOP/s and memory rate of the device"),
    "step-0.5b": Case(".steps", "step", 30, "full training step at the paper's lengths", "0.5B"),
    "step-1.5b": Case(".steps", "step", 32, "full training step at the paper's lengths", "1.5B"),
    "encode": Case(
        ".encode",
        "encode",
        50,
        "offline encoding against SentenceTransformer.encode and plain transformers",
        None,
        ("sentence_transformers",),
    ),
    "query": Case(
        ".query",
        "query",
        40,
        "latency of 1, 8 and 32 queries: serving engine, encode_queries, eager backbone, CUDA graph",
    ),
    "peers-0.5b": Case(
        ".peers",
        "peers",
        55,
        "training step of the engine against that of sentence-transformers, on the same ids",
        "0.5B",
        (*_ZERO, "sentence_transformers"),
    ),
    "peers-1.5b": Case(".peers", "peers", 75, "the same in 1.5B", "1.5B", (*_ZERO, "sentence_transformers")),
    "step-3b": Case(".steps", "step", 43, "full training step at the paper's lengths", "3B"),
    "step-7b-lora": Case(".steps", "lora", 120, "LoRA training step at the paper's lengths", "7B", ("peft",)),
    "train": Case(".train", "train", 40, "the training loop as it runs, from texts", "0.5B", (*_ZERO, "ir_measures")),
    "trees": Case(".attention", "trees", 65, "prefix trees with FlexAttention and dense masks against pairwise texts"),
    "zero-2": Case(
        ".zero", "zero", 60, "DeepSpeed ZeRO-2, one process: step, checkpoint, memory against the plan", "2", _ZERO
    ),
    "zero-3": Case(".zero", "zero", 65, "ZeRO-3", "3", _ZERO),
    "zero-2-offload": Case(".zero", "zero", 65, "ZeRO-2, optimizer in host memory", "2,optimizer", _ZERO),
    "zero-3-offload": Case(".zero", "zero", 75, "ZeRO-3, optimizer and parameters in host memory", "3,all", _ZERO),
    "bf16": Case(".exactness", "bf16", 8, "embeddings, loss and gradients in bf16 against fp32"),
    "grad_cache": Case(".exactness", "grad_cache", 12, "GradCache against all graphs kept: gradients, time, memory"),
    "qlora": Case(".steps", "qlora", 60, "LoRA step over a backbone in 4 bits", "1.5B", ("peft", "bitsandbytes")),
    "varlen": Case(".attention", "varlen", 22, "packed texts through the variable-length kernel against padded ones"),
    "zero-1": Case(".zero", "zero", 60, "ZeRO-1", "1", _ZERO),
    "faiss": Case(".encode", "faiss", 15, "FAISS on the GPU against brute force", None, ("faiss",)),
}
"""The cases in their order: the most important first, because the last ones may find no time."""


def run(
    names: Sequence[str], minutes: float, directory: Path, device: str, tiny: bool = False, profile: bool = False
) -> int:
    """Run cases one after another; return the exit status.

    A case gets its share of the time that is left, and at least the seconds that it needs. It does not start with less.
    """
    ends = time.monotonic() + 60 * minutes
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    results = report.Results(directory, device)
    for number, name in enumerate(names):
        case, began = CASES[name], time.monotonic()
        left = ends - began
        if left < case.seconds:
            results.add(name, {"not run": f"needs {case.seconds:.0f} s, {max(0.0, left):.0f} s left"})
            continue
        share = max(case.seconds, left * case.seconds / sum(CASES[other].seconds for other in names[number:]))
        context = Context(device, tiny, case.argument, began + share, profile)
        limit = min(left, PATIENCE * share)
        for line in _in_a_process(processes, case, context, began, limit):
            results.add(name, line)
        results.ended(name, time.monotonic() - began)
    return results.close()


def _in_a_process(processes: Any, case: Case, context: Context, began: float, limit: float) -> Iterator[Plain]:
    """Yield what a case sends; kill it, and the processes it started, `limit` seconds after `began`, starting included."""
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=_work, args=(sender, case, context))
    process.start()
    sender.close()
    try:
        while receiver.poll(max(0.0, began + limit - time.monotonic())):
            yield receiver.recv()
        yield {"error": f"killed after {limit:.0f} s; what it measured before stays"}
    except EOFError:
        process.join(END_S)
        if process.exitcode:
            yield {"error": f"its process ended with status {process.exitcode}"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # if it has no group yet
        process.join()


def _work(sender: Connection, case: Case, context: Context) -> None:
    """Run a case in this process and send its results."""
    os.setsid()  # one group with the processes that it starts, such as compilers
    try:
        if context.device == "cuda":
            _require_cuda()
        for result in getattr(importlib.import_module(case.module, __package__), case.function)(context):
            sender.send(result.as_plain())
    except ModuleNotFoundError as missing:
        sender.send({"skipped": f"{missing.name} is not installed"})
    except Skipped as reason:
        sender.send({"skipped": str(reason)})
    except Exception as error:
        traceback.print_exc()
        sender.send({"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]})
    finally:
        sender.close()


def _require_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA device; --device cpu --tiny tests the suite itself")


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else _plain(value)


def _plain(value: Any) -> Any:
    """JSON has no NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
