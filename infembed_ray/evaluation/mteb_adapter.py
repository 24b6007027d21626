"""Our encoders and rerankers as models of mteb 2 (https://github.com/embeddings-benchmark/mteb), and our figures in its result files.

    infembed mteb run -m runs/train -t Core17InstructionRetrieval --output-folder results

runs `mteb run` with one of our models: a checkpoint, a hub model or a baseline (encoder or reranker), as in `models` of `infembed evaluate`. In
Python: `mteb.evaluate(mteb_adapter.load("runs/train"), tasks)`.

mteb itself formats every query of a checkpoint as `{query} {instruction}`, whatever the checkpoint's template.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from infembed_ray.errors import InputError
from infembed_ray.evaluation.results import Results, TaskSummary
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.evaluation.retrievers.encoders import CheckpointEncoder
from infembed_ray.evaluation.retrievers.retriever import Encoder, Ranker, Reranker, Retriever
from infembed_ray.evaluation.tasks import registry
from infembed_ray.evaluation.tasks.registry import Entry
from infembed_ray.evaluation.tasks.task import Query
from infembed_ray.progress import track
from infembed_ray.storage import durable

if TYPE_CHECKING:
    from mteb.models import ModelMeta

CHUNK = 1024
"""Texts or pairs per call of the model: enough to batch by length, few enough to show progress."""
RERANKER_KINDS = ("seq2seq", "classifier", "causal", "random")

# ------------------------------------------------------------------------------------------- our models in mteb


class MtebEncoder:
    """One of our encoders as mteb's `EncoderProtocol`.

    mteb passes query and instruction separately, and the encoder formats them.

    Args:
        encoder: any of our encoders.
        meta: description in mteb's result files.
    """

    def __init__(self, encoder: Encoder, meta: ModelMeta) -> None:
        self.encoder = encoder
        self.mteb_model_meta = meta

    def encode(
        self, inputs: Any, *, task_metadata: Any, hf_split: str, hf_subset: str, prompt_type: Any = None, **kwargs: Any
    ) -> np.ndarray:
        """Embed queries or passages: (n, d) float32.

        Args:
            inputs: mteb's loader of batches of passages (`text`) or queries (`query`, perhaps `instruction`).
            task_metadata: of the task, for its name.
            hf_split, hf_subset: unused.
            prompt_type: `document` or `query`; None, for tasks with texts of one kind, means `query`.
            kwargs: mteb's batch size and other options; unused, because the encoder makes its own batches.
        """
        if prompt_type == "document":
            title = f"encode passages of {task_metadata.name}"
            return _in_chunks(_passages(inputs), len(inputs.dataset), title, self.encoder.encode_passages)
        title = f"encode queries of {task_metadata.name}"
        return _in_chunks(_queries(inputs), len(inputs.dataset), title, self.encoder.encode_queries)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Multiply (n, d) with (m, d): (n, m) inner products."""
        return _matrix(embeddings1) @ _matrix(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Multiply the rows of two (n, d) arrays: (n) inner products."""
        return (_matrix(embeddings1) * _matrix(embeddings2)).sum(-1)


class MtebReranker:
    """One of our rerankers as mteb's `CrossEncoderProtocol`.

    mteb passes pairs of a query, with its instruction, and a candidate of its re-ranking tasks.

    Args:
        reranker: any of our rerankers.
        meta: description in mteb's result files.
    """

    def __init__(self, reranker: Reranker, meta: ModelMeta) -> None:
        self.reranker = reranker
        self.mteb_model_meta = meta

    def predict(
        self, inputs1: Any, inputs2: Any, *, task_metadata: Any, hf_split: str, hf_subset: str, **kwargs: Any
    ) -> np.ndarray:
        """Score pairs: (n) float32.

        Args:
            inputs1, inputs2: mteb's loaders of the n queries and of the n passages, pair by pair.
            task_metadata: of the task, for its name.
            hf_split, hf_subset, kwargs: unused.
        """
        pairs = zip(_queries(inputs1), _passages(inputs2), strict=True)
        return _in_chunks(pairs, len(inputs1.dataset), f"score pairs of {task_metadata.name}", self.reranker.score)


def _in_chunks(rows: Iterator[Any], size: int, title: str, compute: Callable[[list[Any]], np.ndarray]) -> np.ndarray:
    """Concatenate the arrays of chunks of `CHUNK` rows, and show progress."""
    chunks = []
    with track(title, size) as advance:
        while chunk := list(islice(rows, CHUNK)):
            chunks.append(compute(chunk))
            advance(len(chunk))
    return np.concatenate(chunks)


def _passages(inputs: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    return (text for batch in inputs for text in batch["text"])


def _queries(inputs: Iterable[Mapping[str, Any]]) -> Iterator[Query]:
    for batch in inputs:
        texts = batch.get("query", batch["text"])
        instructions = batch.get("instruction", [None] * len(texts))
        for text, instruction in zip(texts, instructions, strict=True):
            yield Query("", text, instruction or None)


def _matrix(embeddings: Any) -> torch.Tensor:
    return torch.atleast_2d(torch.as_tensor(embeddings))


def load(model: str, device: str = "cpu") -> MtebEncoder | MtebReranker:
    """Load one of our encoders or rerankers for `mteb.evaluate`.

    Args:
        model: checkpoint directory (`latest` is followed), hub name, or name of a baseline.
        device: torch device.

    Raises:
        InputError: there is no such model, it ranks whole tasks, or mteb is not installed.
    """
    _require_mteb()
    from mteb.models import ModelMeta

    loaded = baselines.load(baselines.resolve("mteb", model), device)
    if isinstance(loaded, Ranker):
        raise InputError(f"model={model}: neither an encoder nor a reranker; give one, or use infembed evaluate")
    meta = ModelMeta(**_meta(_name(model), loaded.identity, loaded, isinstance(loaded, Reranker)))
    return MtebReranker(loaded, meta) if isinstance(loaded, Reranker) else MtebEncoder(loaded, meta)


def register(model: str, device: str = "cpu") -> str:
    """Load one of our models and register it with `mteb.get_model` in this process; return its name."""
    loaded = load(model, device)
    from mteb.models.model_implementations import MODEL_REGISTRY

    def infembed_ray(*args: Any, **kwargs: Any) -> MtebEncoder | MtebReranker:  # mteb records the function's name
        return loaded

    name = str(loaded.mteb_model_meta.name)
    MODEL_REGISTRY[name] = loaded.mteb_model_meta.model_copy(update={"loader": infembed_ray})
    return name


def run(arguments: Sequence[str]) -> None:
    """Run mteb's command line; the model of its `run` is one of ours.

    Raises:
        InputError: as `load`; the model is missing or has a revision; mteb has no such task.
    """
    _require_mteb()
    import mteb
    from mteb.cli import main

    rest = list(arguments) or ["--help"]
    if rest[0] == "run":
        parser = argparse.ArgumentParser(prog="infembed mteb run", add_help=False, allow_abbrev=False)
        parser.add_argument("-m", "--model")
        parser.add_argument("--model-revision", "--model_revision")
        parser.add_argument("--device", type=int)
        parser.add_argument("-t", "--tasks", nargs="+", default=[])
        given, rest = parser.parse_known_args(rest)
        if given.model_revision is not None:
            raise InputError(
                f"--model-revision {given.model_revision}: give -m the directory of that revision, or a baseline"
            )
        for task in given.tasks:
            try:
                mteb.get_task(task)
            except KeyError as error:
                raise InputError(f"-t {task}: {error.args[0].removeprefix('KeyError: ')}") from error
        rest += ["-t", *given.tasks] if given.tasks else []
        if given.model is not None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            rest += ["-m", register(given.model, device if given.device is None else f"cuda:{given.device}")]
        elif not {"-h", "--help"} & set(rest):
            raise InputError("-m is missing; give a checkpoint directory, a hub name, or the name of a baseline")
    before, sys.argv = sys.argv, ["infembed mteb", *rest]
    try:
        main()
    finally:
        sys.argv = before


def _require_mteb() -> None:
    if importlib.util.find_spec("mteb") is None:
        raise InputError("mteb is not installed; pip install 'infembed-ray[mteb]'")


def _name(model: str) -> str:
    """Return `organisation/model`: a hub name, or `infembed/` and the directory or baseline."""
    hub = model.count("/") == 1 and not model.startswith((".", "~", "/")) and not Path(model).exists()
    return model if hub else f"infembed/{Path(model).absolute().name}"


_META = (
    *("loader", "release_date", "languages", "n_parameters", "memory_usage_mb", "max_tokens", "embed_dim", "license"),
    *("open_weights", "public_training_code", "public_training_data", "training_datasets"),
)
"""Required fields of mteb's `ModelMeta`, null where unknown."""


def _meta(name: str, revision: str, model: Retriever | None = None, reranks: bool = False) -> dict[str, Any]:
    """Return the fields of mteb's `ModelMeta`."""
    known: dict[str, Any] = {}
    if isinstance(model, CheckpointEncoder):
        text = model.encoder.text
        known = {"max_tokens": max(text.query_length, text.passage_length), "embed_dim": model.encoder.dimension}
    module = getattr(model, "encoder", getattr(model, "model", None))
    if isinstance(module, torch.nn.Module):
        parameters = list(module.parameters())
        known |= {
            "framework": ["PyTorch"],
            "n_parameters": sum(p.numel() for p in parameters),
            "memory_usage_mb": sum(p.numel() * p.element_size() for p in parameters) / 2**20,
        }
    return {
        **dict.fromkeys(_META),
        "name": name,
        "revision": revision,
        "framework": [],
        "similarity_fn_name": None if reranks else "dot",
        "model_type": ["cross-encoder" if reranks else "dense"],
        "use_instructions": True,
        **known,
    }


# --------------------------------------------------------------------------------------- our figures in mteb's files


@dataclass(frozen=True)
class MtebTask:
    """One of our tasks in mteb."""

    name: str
    split: str
    main_score: str


def _mteb_task(entry: Entry) -> MtebTask:
    name = entry.name.rpartition("/")[2].title().replace("_", "").replace("Theoremqa", "TheoremQA")
    if entry.layout == "followir":
        return MtebTask(f"{name}InstructionRetrieval", "test", "p-MRR")
    if entry.layout == "bright":
        return MtebTask(f"Bright{name}Retrieval", "standard", "ndcg_at_10")
    return MtebTask("InstructIR", "test", "robustness_at_10")


TASKS = {
    name: _mteb_task(entry)
    for name, entry in registry.TASKS.items()
    if entry.layout != "mair" and registry.MODE not in name
}
"""Tasks of the catalogue that mteb has, which excludes MAIR. Other protocols would have their names."""

VERSION = "2.26.24"
"""Version of mteb whose tasks and figures ours equal."""
_UNKNOWN_REVISION = "no_revision_available"  # as mteb writes it


def write(directory: Path, results: Results) -> None:
    """Write figures as `mteb run --output-folder` does, for `mteb.ResultCache(directory)`.

    The files are `results/<model>/<revision>/<task>.json`, with `model_meta.json`. A model is `infembed/<label>`, and its
    revision is our identity. `mteb_version` is the version that gives the same figures. Figures without values, and tasks
    whose main figure has none, are left out.
    """
    for label, of_model in results.figures.items():
        name, revision = f"infembed/{label}", str(results.models[label].get("identity", _UNKNOWN_REVISION))
        folder = directory / "results" / name.replace("/", "__").replace(" ", "_") / revision
        for task, means in of_model.items():
            if task in TASKS and (result := _task_result(TASKS[task], results.tasks[task], means)):
                folder.mkdir(parents=True, exist_ok=True)
                reranks = results.models[label].get("kind") in RERANKER_KINDS
                durable.replace_json(folder / "model_meta.json", _meta(name, revision, reranks=reranks))
                durable.replace_json(folder / f"{TASKS[task].name}.json", result)


def _task_result(task: MtebTask, summary: TaskSummary, means: Mapping[str, float | None]) -> dict[str, Any] | None:
    """Return the fields of mteb's `TaskResult`; None without a main score."""
    scores: dict[str, Any] = {}
    for figure in summary.figures:
        if (mean := means[figure.name]) is not None:
            # mteb nests figures of one kind of queries, FollowIR's `og` and `changed`.
            of_kind = scores if figure.kind is None else scores.setdefault(figure.kind, {})
            of_kind[_score_name(figure.measure)] = mean
    if task.main_score not in scores:
        return None
    scores |= {"main_score": scores[task.main_score], "hf_subset": "default", "languages": ["eng-Latn"]}
    revisions = [revision for revision in summary.about.get("repositories", {}).values() if revision]
    return {
        "dataset_revision": "+".join(revisions) or _UNKNOWN_REVISION,
        "task_name": task.name,
        "mteb_version": VERSION,
        "scores": {task.split: [scores]},
        "evaluation_time": None,
    }


def _score_name(measure: str) -> str:
    """Translate `nDCG@10` to `ndcg_at_10`; p-MRR keeps its name."""
    return measure.lower().replace("@", "_at_") if "@" in measure else measure
