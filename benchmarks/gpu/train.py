"""The training loop as it runs on a worker: texts are tokenized, collated and laid out in its thread, DeepSpeed steps."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu import measure, zero
from benchmarks.gpu.suite import Context, Result
from infembed_ray.records.tables import Record
from infembed_ray.training.loop import train_worker
from infembed_ray.training.observability.logs import read_metrics

STEPS, WARM_UP = 14, 6


class Enough(Exception):
    """Ends a run before it writes checkpoints."""


def train(context: Context) -> Iterator[Result]:
    """Time steps of the loop: the paper's share of a device, and eight times as much."""
    for records in (4, 32):
        if context.left < 0:
            return
        with tempfile.TemporaryDirectory() as directory:
            output = Path(directory, "output")
            output.mkdir()
            zero.save(str(context.argument), context, directory)
            settings = zero.settings_of(context, records_per_step=records, instruction_negatives=5, trackers=[])
            settings = settings.model_copy(update={"model": directory, "output": str(output), "epochs": 2 * STEPS})
            asked = iter(range(STEPS))

            def preempted(asked: Iterator[int] = asked) -> bool:
                """The loop asks once a step."""
                if next(asked, None) is None:
                    raise Enough
                return False

            try:
                train_worker(settings, _records(records), output, torch.device(context.device), preempted)
            except Enough:
                lines = list(read_metrics(output))
        measured = lines[WARM_UP:]
        figures = {
            "tokens": statistics.median(line["tokens"] for line in measured),
            "step, ms": 1e3 * statistics.median(line["seconds"] for line in measured),
            "wait for data, ms": 1e3 * statistics.median(line["data_seconds"] for line in measured),
            "tokens/s": statistics.median(line["tokens_per_second"] for line in measured),
        }
        if measured[0]["mfu"] is not None:
            figures |= {"MFU": statistics.median(line["mfu"] for line in measured), "GiB": measured[-1]["memory_gib"]}
        fell = lines[-1]["loss"] - lines[0]["loss"]
        yield Result(
            f"{context.argument}, {3 * records} tuples, multi{{P,I}}", {**figures}, {"last loss - first": (fell, 0)}
        )
        measure.free()


def _records(count: int) -> list[Record]:
    """Make records of the published lengths: instruction, query and passage."""
    rng = random.Random(0)

    def text(mean: int) -> str:
        return measure.sentence(max(1, round(mean * rng.lognormvariate(-(measure.SPREAD**2) / 2, measure.SPREAD))), rng)

    of = {"instruction": measure.INSTRUCTION, "query": measure.QUERY, "document": measure.PASSAGE}
    return [
        Record(
            id=str(n),
            query_positive=text(of["query"]),
            instruction_positive=text(of["instruction"]),
            instruction_negative=text(of["instruction"]),
            query_negative=text(of["query"]),
            document_positive=text(of["document"]),
            hard_negative_document_1=text(of["document"]),
            hard_negative_document_2=text(of["document"]),
        )
        for n in range(count)
    ]
