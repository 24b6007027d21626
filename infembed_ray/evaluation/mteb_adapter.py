"""Our encoders in mteb 2 (https://github.com/embeddings-benchmark/mteb), and our figures in its result files.

    infembed mteb run -m runs/train -t Core17InstructionRetrieval --output-folder results

is `mteb run` with a model of ours: a checkpoint, a hub's model or a baseline, as in `models` of `infembed evaluate`. From
Python: `mteb.evaluate(mteb_adapter.load("runs/train"), tasks)`.

mteb alone, given the same checkpoint, reads every query as `{query} {instruction}`, whatever the checkpoint's template.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from infembed_ray import storage
from infembed_ray.errors import InputError
from infembed_ray.evaluation.results import Asked, Results
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.evaluation.retrievers.encoders import CheckpointEncoder
from infembed_ray.evaluation.retrievers.retriever import Encoder
from infembed_ray.evaluation.tasks.task import Query
from infembed_ray.progress import track

if TYPE_CHECKING:
    from mteb.models import ModelMeta

CHUNK = 1024
"""Texts that are encoded together: enough to batch by length, few enough to show progress."""

# ------------------------------------------------------------------------------------------------- our model in mteb


class MtebEncoder:
    """An encoder of ours as mteb's `EncoderProtocol`.

    mteb gives query and instruction apart, and the encoder writes them as one text in its own way.

    Args:
        encoder: any of ours.
        meta: what mteb's result files say of it.
    """

    def __init__(self, encoder: Encoder, meta: ModelMeta) -> None:
        self.encoder = encoder
        self.mteb_model_meta = meta

    def encode(
        self, inputs: Any, *, task_metadata: Any, hf_split: str, hf_subset: str, prompt_type: Any = None, **kwargs: Any
    ) -> np.ndarray:
        """Embed the texts of one side.

        Args:
            inputs: mteb's loader of batches of passages (`text`) or queries (`query`, and `instruction` if they have one).
            task_metadata: the task's.
            hf_split, hf_subset: what of the task; unused.
            prompt_type: `document` or `query`; None, of tasks whose texts are all of one kind, is as `query`.
            kwargs: mteb's batch size and the like; the encoder makes batches of its own.

        Returns:
            (n, d) float32.
        """
        passages = prompt_type == "document"
        rows: Iterator[Any] = _passages(inputs) if passages else _queries(inputs)
        embed: Any = self.encoder.encode_passages if passages else self.encoder.encode_queries
        chunks = []
        side = "passages" if passages else "queries"
        with track(f"encode {side} of {task_metadata.name}", len(inputs.dataset)) as advance:
            while chunk := list(islice(rows, CHUNK)):
                chunks.append(embed(chunk))
                advance(len(chunk))
        return np.concatenate(chunks)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """(n, m) inner products of (n, d) and (m, d)."""
        return _matrix(embeddings1) @ _matrix(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """(n) inner products of the rows of (n, d) with those of (n, d)."""
        return (_matrix(embeddings1) * _matrix(embeddings2)).sum(-1)


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


def load(model: str, device: str = "cpu") -> MtebEncoder:
    """An encoder of ours for `mteb.evaluate`.

    Args:
        model: checkpoint directory (`latest` is followed), hub name, or name of a baseline.
        device: of torch.

    Raises:
        InputError: there is no such model, it is no encoder, or mteb is not installed.
    """
    _require_mteb()
    from mteb.models import ModelMeta

    encoder = baselines.load(baselines.resolve("mteb", model), device)
    if not isinstance(encoder, Encoder):
        raise InputError(f"model={model}: no encoder; give one, or evaluate it with infembed evaluate")
    return MtebEncoder(encoder, ModelMeta(**_meta(_name(model), encoder.identity, encoder)))


def register(model: str, device: str = "cpu") -> str:
    """Load an encoder of ours under a name that `mteb.get_model` then knows in this process; returns the name."""
    encoder = load(model, device)
    from mteb.models.model_implementations import MODEL_REGISTRY

    def infembed_ray(*args: Any, **kwargs: Any) -> MtebEncoder:  # mteb writes its name down
        return encoder

    name = str(encoder.mteb_model_meta.name)
    MODEL_REGISTRY[name] = encoder.mteb_model_meta.model_copy(update={"loader": infembed_ray})
    return name


def run(arguments: Sequence[str]) -> None:
    """mteb's command line, but that the model of its `run` is ours.

    Raises:
        InputError: as `load`; no model is given, or a revision of it; mteb has no such task.
    """
    _require_mteb()
    import mteb
    from mteb.cli import main

    rest = list(arguments) or ["--help"]
    if rest[:1] == ["run"]:
        parser = argparse.ArgumentParser(prog="infembed mteb run", add_help=False, allow_abbrev=False)
        parser.add_argument("-m", "--model")
        parser.add_argument("--model-revision", "--model_revision")
        parser.add_argument("--device", type=int)
        parser.add_argument("-t", "--tasks", nargs="+", default=[])
        ours, rest = parser.parse_known_args(rest)
        if ours.model_revision is not None:
            raise InputError(
                f"--model-revision {ours.model_revision}: give -m the directory of that revision, or a baseline"
            )
        for task in ours.tasks:
            try:
                mteb.get_task(task)
            except KeyError as error:
                raise InputError(f"-t {task}: {error.args[0].removeprefix('KeyError: ')}") from error
        rest += ["-t", *ours.tasks] if ours.tasks else []
        if ours.model is not None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            rest += ["-m", register(ours.model, device if ours.device is None else f"cuda:{ours.device}")]
        elif not {"-h", "--help"} & set(rest):
            raise InputError("-m is not given; give a checkpoint directory, a hub name, or the name of a baseline")
    before, sys.argv = sys.argv, ["infembed mteb", *rest]
    try:
        main()
    finally:
        sys.argv = before


def _require_mteb() -> None:
    if importlib.util.find_spec("mteb") is None:
        raise InputError("mteb is not installed; pip install 'infembed-ray[mteb]'")


def _name(model: str) -> str:
    """`organisation/model`: a hub's name is one; other models are named by their directory, or by the baseline."""
    hub = model.count("/") == 1 and not model.startswith((".", "~", "/")) and not Path(model).exists()
    return model if hub else f"infembed/{Path(model).absolute().name}"


_META = (
    *("loader", "release_date", "languages", "n_parameters", "memory_usage_mb", "max_tokens", "embed_dim", "license"),
    *("open_weights", "public_training_code", "public_training_data", "training_datasets"),
)
"""Fields of mteb's `ModelMeta` that must be there, and are null where nothing is known."""


def _meta(name: str, revision: str, encoder: Encoder | None = None) -> dict[str, Any]:
    """mteb's `ModelMeta`, field by field."""
    known: dict[str, Any] = {}
    if isinstance(encoder, CheckpointEncoder):
        model = encoder.encoder
        parameters = list(model.parameters())
        known = {
            "framework": ["PyTorch"],
            "n_parameters": sum(p.numel() for p in parameters),
            "memory_usage_mb": sum(p.numel() * p.element_size() for p in parameters) / 2**20,
            "max_tokens": max(model.text.query_length, model.text.passage_length),
            "embed_dim": model.dimension,
        }
    return {
        **dict.fromkeys(_META),
        "name": name,
        "revision": revision,
        "framework": [],
        "similarity_fn_name": "dot",
        "use_instructions": True,
        **known,
    }


# ------------------------------------------------------------------------------------- our figures in mteb's files


@dataclass(frozen=True)
class MtebTask:
    """What mteb calls one of our tasks."""

    name: str
    split: str
    main_score: str


def _followir(name: str) -> MtebTask:
    return MtebTask(f"{name}InstructionRetrieval", "test", "p-MRR")


def _bright(name: str) -> MtebTask:
    return MtebTask(f"Bright{name}Retrieval", "standard", "ndcg_at_10")


TASKS = {
    "followir/robust04": _followir("Robust04"),
    "followir/news21": _followir("News21"),
    "followir/core17": _followir("Core17"),
    "bright/biology": _bright("Biology"),
    "bright/earth_science": _bright("EarthScience"),
    "bright/economics": _bright("Economics"),
    "bright/psychology": _bright("Psychology"),
    "bright/robotics": _bright("Robotics"),
    "bright/stackoverflow": _bright("Stackoverflow"),
    "bright/sustainable_living": _bright("SustainableLiving"),
    "bright/leetcode": _bright("Leetcode"),
    "bright/pony": _bright("Pony"),
    "bright/aops": _bright("Aops"),
    "bright/theoremqa_questions": _bright("TheoremQAQuestions"),
    "bright/theoremqa_theorems": _bright("TheoremQATheorems"),
    "instructir": MtebTask("InstructIR", "test", "robustness_at_10"),
}
"""Those of the catalogue that mteb has. MAIR is not in it."""

_UNKNOWN_REVISION = "no_revision_available"  # as mteb writes it


def write(directory: Path, results: Results) -> None:
    """Write the figures of the tasks that mteb has as `mteb run --output-folder` does: `mteb.ResultCache(directory)` reads them.

    `results/<model>/<revision>/<task>.json`, and `model_meta.json` beside it. A model is `infembed/<label>`, its revision
    our hash of it. Without `mteb_version`: it was not mteb that computed them. Means over nothing are left out, and so is
    a task whose main figure is one: mteb has no such results.
    """
    for label, of_model in results.figures.items():
        name, revision = f"infembed/{label}", str(results.models[label].get("identity", _UNKNOWN_REVISION))
        folder = directory / "results" / name.replace("/", "__").replace(" ", "_") / revision
        for task, means in of_model.items():
            if task in TASKS and (result := _task_result(TASKS[task], results.tasks[task], means)):
                folder.mkdir(parents=True, exist_ok=True)
                storage.write_json(folder / "model_meta.json", _meta(name, revision))
                storage.write_json(folder / f"{TASKS[task].name}.json", result)


def _task_result(task: MtebTask, asked: Asked, means: Mapping[str, float | None]) -> dict[str, Any] | None:
    """The fields of mteb's `TaskResult`; None where it has no main score."""
    scores: dict[str, Any] = {}
    for figure in asked.figures:
        if (mean := means[figure.name]) is not None:
            # mteb has what counts queries of one kind only, FollowIR's `og` and `changed`, apart.
            of_kind = scores if figure.kind is None else scores.setdefault(figure.kind, {})
            of_kind[_score_name(figure.measure)] = mean
    if task.main_score not in scores:
        return None
    scores |= {"main_score": scores[task.main_score], "hf_subset": "default", "languages": ["eng-Latn"]}
    revisions = [revision for revision in asked.about.get("repositories", {}).values() if revision]
    return {
        "dataset_revision": "+".join(revisions) or _UNKNOWN_REVISION,
        "task_name": task.name,
        "mteb_version": None,
        "scores": {task.split: [scores]},
        "evaluation_time": None,
    }


def _score_name(measure: str) -> str:
    """`nDCG@10` -> `ndcg_at_10`; p-MRR is p-MRR."""
    return measure.lower().replace("@", "_at_") if "@" in measure else measure
