"""The interfaces of retrievers, and their loading: checkpoints, the baselines of the tables (baselines.yaml), mappings of settings."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import yaml

from infembed_ray.config.base import nearest
from infembed_ray.config.evaluation import RetrieverSettings
from infembed_ray.errors import InputError
from infembed_ray.evaluation.metrics import Run
from infembed_ray.evaluation.tasks.task import Query, Task
from infembed_ray.modeling import checkpoint
from infembed_ray.storage import steps
from infembed_ray.storage.object_store import Folder, is_uri
from infembed_ray.storage.places import Place, place_of

FILE = Path(__file__).with_name("baselines.yaml")
ENCODER_KINDS = ("encoder", "api")
RANKER_KINDS = ("bm25", "run")
"""Kinds that rank a whole task in one process (`rank`)."""


@runtime_checkable
class TextEncoder(Protocol):
    """Embeds queries and passages; documents are ranked by inner product."""

    def encode_queries(self, queries: Sequence[Query]) -> np.ndarray:
        """Embed queries with their instructions: (n, d) float32."""

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Embed passages: (n, d) float32."""


@runtime_checkable
class PairReranker(Protocol):
    """Scores pairs of a query and a passage, which it reads together."""

    def score(self, pairs: Sequence[tuple[Query, str]]) -> np.ndarray:
        """Score pairs: (n) float32, higher is more relevant."""


Retriever = TextEncoder | PairReranker


@cache
def entries() -> Mapping[str, Mapping[str, Any]]:
    """Read the settings of each baseline, as the file has them. `source`, in the file, is for its readers."""
    listed: Mapping[str, Mapping[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return {name: {key: v for key, v in values.items() if key != "source"} for name, values in listed.items()}


def resolve(
    label: str, model: str | Mapping[str, Any] | RetrieverSettings, where: str | None = None
) -> RetrieverSettings:
    """Return the complete settings of a retriever, with absolute paths. Reads no weights.

    Args:
        label: of the model in the evaluation's settings.
        model: a checkpoint directory, a hub name, the name of a baseline, or settings, perhaps over those of a baseline.
        where: setting of the model, for errors; None: `models.<label>`.

    Raises:
        InputError: the baseline is unknown, or the settings do not fit together.
    """
    where = where or f"models.{label}"
    if isinstance(model, str):
        is_checkpoint = is_uri(model) or "/" in model or model.startswith((".", "~")) or Path(model).is_dir()
        model = {"model" if is_checkpoint else "baseline": model}
    settings = RetrieverSettings.from_mapping(dict(model), f"{where}.") if isinstance(model, Mapping) else model
    if settings.baseline is not None:
        settings = _over_baseline(where, settings.baseline, settings.model_dump(exclude_unset=True))
    if settings.kind == "run":
        run = steps.resolve_input(settings.model, f"{where}.model")
        return settings.model_copy(update={"model": settings.model if is_uri(settings.model) else str(run.absolute())})
    # Workers have other working directories.
    places = {part: checkpoint.absolute(name, f"{where}.{part}") for part, name, _ in _weights(settings)}
    return settings.model_copy(update=places)


def _over_baseline(where: str, name: str, given: Mapping[str, Any]) -> RetrieverSettings:
    """Merge given values over those of the baseline. Another model does not inherit the revision."""
    if name not in entries():
        remedy = "or give a checkpoint directory, or a hub name like org/model"
        raise InputError.of(where, name, f"no such baseline, {nearest(name, entries())}", remedy)
    values = {key: value for key, value in entries()[name].items() if key != "revision" or "model" not in given}
    merged = {
        key: {**values[key], **value} if isinstance(value, Mapping) and key in values else value
        for key, value in {**values, **given}.items()
        if key != "baseline"
    }
    return RetrieverSettings.from_mapping(merged, f"{where}.").model_copy(update={"baseline": name})


def inputs(settings: RetrieverSettings, where: str = "model") -> tuple[dict[str, Place], dict[str, str]]:
    """Return a retriever's part of the identity of a `steps.Step`: paths, and names of what is not a path.

    Raises:
        InputError: there is no such model, or a package is missing.
    """
    kind, names = settings.kind, {"retriever": json.dumps(settings.identity(), sort_keys=True)}
    if kind == "bm25":
        from infembed_ray.modeling import terms

        terms.tokenizer(settings.bm25, where)
    if kind == "api":
        return {}, names | {"model": f"{settings.endpoint.base_url} {settings.model}"}
    if kind == "run":
        return {"model": place_of(settings.model)}, names
    paths = dict[str, Place]()
    for part, model, revision in _weights(settings):
        place = place_of(model)
        stored = isinstance(place, Folder) or place.is_dir()
        if part == "adapter" and stored and not (place / "adapter_config.json").is_file():
            fault = "no adapter_config.json in this directory"
            raise InputError.of(f"{where}.adapter", model, fault, "give one that peft wrote")
        if part == "model":
            checkpoint.locate(model, f"{where}.{part}", revision, kind)
        if stored:
            paths[part] = place
        else:
            file = "config.json" if part == "model" else "adapter_config.json"
            commit = checkpoint.commit(model, file, revision, f"{where}.{part}") or revision
            names[part] = model if commit is None else f"{model}@{commit}"
    return paths, names


def _weights(settings: RetrieverSettings) -> list[tuple[str, str, str | None]]:
    """Return (part, directory or hub name, revision) of a local retriever's weights."""
    if settings.kind in ("api", *RANKER_KINDS):
        return []
    parts = [("model", settings.model, settings.revision), ("adapter", settings.adapter, None)]
    return [(part, model, revision) for part, model, revision in parts if model]


def identity(settings: RetrieverSettings) -> str:
    """Return 16 hex digits that change with anything that changes embeddings, scores or rankings: weights and settings.

    The hash of a directory covers the contents of its files. The hash of a hub model covers its name and commit.
    """
    paths, names = inputs(settings)
    contents = {part: steps.fingerprint(path) for part, path in paths.items()}
    return hashlib.sha256(json.dumps([contents, names], sort_keys=True).encode()).hexdigest()[:16]


def load(settings: RetrieverSettings, device: str = "cpu", batch_tokens: int | None = None) -> Retriever:
    """Load the encoder or reranker of settings from `resolve`; `batch_tokens` bound a forward pass, with padding.

    InputError: a model, a key or a package is missing.
    """
    # A model in an object store is copied to this node.
    copies = {part: checkpoint.local(model) for part, model, _ in _weights(settings) if is_uri(model)}
    settings = settings.model_copy(update=copies)
    if settings.kind == "api":  # modules are imported when they are needed: some import torch or transformers
        from infembed_ray.evaluation.retrievers.api import ApiEncoder

        return ApiEncoder(settings)
    from infembed_ray.evaluation.retrievers.encoders import CheckpointEncoder
    from infembed_ray.modeling.rerankers import KINDS

    return (CheckpointEncoder if settings.kind == "encoder" else KINDS[settings.kind])(settings, device, batch_tokens)


def rank(settings: RetrieverSettings, task: Task, depth: int) -> Run:
    """Rank the top `depth` documents of every query of a task by BM25 or a given run, without its excluded documents."""
    from infembed_ray.evaluation.retrievers import bm25, runs

    return bm25.rank(settings, task, depth) if settings.kind == "bm25" else runs.rank(settings, task, depth)
