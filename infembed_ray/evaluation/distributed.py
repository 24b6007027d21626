"""Evaluation on Ray: encode corpus and queries with every model, search exactly, score, compare."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.data import ActorPoolStrategy

from infembed_ray import records, storage
from infembed_ray.config import EvaluateSettings, Template
from infembed_ray.distributed import connect
from infembed_ray.errors import InputError
from infembed_ray.evaluation import tables
from infembed_ray.evaluation.metrics import CONVENTIONS
from infembed_ray.evaluation.retrievers import DEPTH, exact_search
from infembed_ray.evaluation.scoring import Figures, QueryScore, score_queries, summarise
from infembed_ray.evaluation.tasks import Task, instruction_following
from infembed_ray.modeling import checkpoint
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.progress import say, track

RESULTS_FILE = "results.json"
PER_QUERY_FILE = "per_query.parquet"
TABLE_FILE = "table.md"

CHUNK = 256
"""Texts that travel to an actor at once: long enough to batch by length, short enough to show progress."""

_PER_QUERY = pa.schema(
    [("model", pa.string()), ("query", pa.string()), ("kind", pa.string())]
    + [(measure, pa.float64()) for measure in ("ndcg_at_10", "map_at_1000", "p_mrr")]
)
_TEXTS = pa.schema([("row", pa.int64()), ("is_query", pa.bool_()), ("instruction", pa.string()), ("text", pa.string())])


def run(settings: EvaluateSettings) -> storage.Published:
    """Evaluate all models on one task and publish `results.json`, `per_query.parquet` and `table.md`.

    Raises:
        InputError: records, distractors, a model or the output cannot be used; a model gives embeddings that are not
            finite.
    """
    if not settings.models:
        raise InputError("models is empty: set models.base=<checkpoint directory or hub name>")
    data = {"records": storage.existing(settings.records, "records")}
    if settings.distractors is not None:
        data["distractors"] = storage.existing(settings.distractors, "distractors")
    inputs, names, models = dict(data), dict[str, str](), dict[str, str]()
    for position, (label, model) in enumerate(settings.models.items()):
        found = checkpoint.locate(model, f"models.{label}")
        # The position is part of the identity: the first model is the baseline.
        inputs |= {f"{name} ({position})": path for name, path in found.inputs.items()}
        names |= {f"{name} ({position})": name_there for name, name_there in found.names.items()}
        models[label] = found.path
    step = storage.Step("evaluate", settings, settings.output, inputs, names)
    if done := step.finished():
        return done
    rows = records.read(data["records"], records.Record, "records", split=settings.split)
    others = records.read(data["distractors"], records.Passage, "distractors") if "distractors" in data else []
    task = instruction_following(rows, others, settings.max_distractors)

    asked = f"{len(task.queries)} queries, {len(task.corpus)} passages ({task.distractors} distractors)"
    say(f"evaluate: {', '.join(models)} on {asked}")
    connect()
    with step.publish() as staging:
        scores = {label: _score(label, model, task, settings) for label, model in models.items()}
        figures = {label: summarise(of_model) for label, of_model in scores.items()}
        staging.counts = _counts(task)
        staging.facts = {"figures": {label: asdict(f) for label, f in figures.items()}}
        storage.write_json(staging.path / RESULTS_FILE, _results(settings, task, figures))
        _write_per_query(staging.path / PER_QUERY_FILE, scores)
        (staging.path / TABLE_FILE).write_text(_markdown(task, figures), encoding="utf-8")
    say(tables.as_text(figures))
    return step.published()


def _score(label: str, model: str, task: Task, settings: EvaluateSettings) -> list[QueryScore]:
    embeddings = _encode(label, model, task, settings)
    size = len(task.corpus)
    rankings = exact_search(embeddings[size:], embeddings[:size], list(task.corpus))
    return score_queries(task, {q.id: ranking for q, ranking in zip(task.queries, rankings, strict=True)})


class Encode:
    """A Ray Data actor: loads one model once, then turns chunks of texts into embeddings."""

    def __init__(self, model: str, template: Template, batch_tokens: int, device: str) -> None:
        self.encoder = InstructionEncoder.from_pretrained(
            model, template=None if checkpoint.is_own(model) else template, device=device
        )
        self.batch_tokens = batch_tokens

    def __call__(self, chunk: pa.Table) -> dict[str, np.ndarray]:
        """Columns `row, is_query, instruction, text` -> `row`, `embedding` (n, d)."""
        rows = chunk.to_pylist()
        queries = [r for r in rows if r["is_query"]]
        passages = [r for r in rows if not r["is_query"]]
        tokens = self.encoder.tokenize_queries([r["text"] for r in queries], [r["instruction"] for r in queries])
        tokens += self.encoder.tokenize_passages([r["text"] for r in passages])
        return {
            "row": np.array([r["row"] for r in queries + passages]),
            "embedding": self.encoder.embed(tokens, self.batch_tokens),
        }


def _encode(label: str, model: str, task: Task, settings: EvaluateSettings) -> np.ndarray:
    """(passages + queries, d) float32 embeddings, in the task's order."""
    texts = [{"is_query": False, "instruction": None, "text": text} for text in task.corpus.values()]
    texts += [{"is_query": True, "instruction": q.instruction, "text": q.query} for q in task.queries]
    rows = [{"row": row} | text for row, text in enumerate(texts)]
    chunks = [pa.Table.from_pylist(rows[i : i + CHUNK], schema=_TEXTS) for i in range(0, len(rows), CHUNK)]
    encoded = ray.data.from_arrow(chunks).map_batches(
        Encode,
        fn_constructor_args=(
            model,
            settings.template,
            settings.batch_tokens,
            "cuda" if settings.gpus_per_actor else "cpu",
        ),
        batch_format="pyarrow",
        batch_size=None,
        compute=ActorPoolStrategy(size=settings.actors),
        num_gpus=settings.gpus_per_actor,
    )
    embeddings = np.empty((len(rows), 0), dtype=np.float32)
    arrived = np.zeros(len(rows), dtype=bool)
    with track(f"encode {label}", len(rows)) as advance:
        for batch in encoded.iter_batches(batch_size=None):
            if not embeddings.size:
                embeddings = np.empty((len(rows), batch["embedding"].shape[1]), dtype=np.float32)
            embeddings[batch["row"]] = batch["embedding"]
            arrived[batch["row"]] = True
            advance(len(batch["row"]))
    assert arrived.all(), "Ray Data lost rows"
    broken = np.flatnonzero(~np.isfinite(embeddings).all(axis=1))
    if broken.size:
        raise InputError(
            f"models.{label}={model}: {broken.size} of {len(rows)} embeddings are not finite, the first that of "
            f"{texts[broken[0]]['text'][:60]!r}; the weights are damaged or training diverged: give another checkpoint"
        )
    return embeddings


def _counts(task: Task) -> dict[str, int]:
    return {
        "queries": len(task.queries),
        "passages": len(task.corpus),
        "distractors": task.distractors,
        "changed_queries": sum(bool(change.documents) for change in task.changes),
    }


def _results(settings: EvaluateSettings, task: Task, figures: dict[str, Figures]) -> dict[str, Any]:
    return {
        "task": {"records": settings.records, "split": settings.split} | _counts(task),
        "conventions": {**CONVENTIONS, "depth": DEPTH},
        "baseline": next(iter(figures)),
        "models": {label: {"model": settings.models[label], **asdict(f)} for label, f in figures.items()},
    }


def _write_per_query(path: Path, scores: dict[str, list[QueryScore]]) -> None:
    rows = [{"model": label} | asdict(score) for label, of_model in scores.items() for score in of_model]
    pq.write_table(pa.Table.from_pylist(rows, schema=_PER_QUERY), path)


def _markdown(task: Task, figures: dict[str, Figures]) -> str:
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in _counts(task).items())
    conventions = "\n".join(f"- {name}: {text}" for name, text in CONVENTIONS.items())
    return f"{tables.as_markdown(figures)}\n\n{counts}; differences are to {next(iter(figures))!r}.\n\n{conventions}\n"
