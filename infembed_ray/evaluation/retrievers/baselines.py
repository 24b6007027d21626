"""Resolves and loads retrievers: checkpoints, the baselines of the tables, and mappings of settings.

The baselines are data (baselines.yaml): those of the paper's Tables 2 and 5 and some newer ones, each with the prompts,
pooling and lengths it was made for.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from infembed_ray.config.base import nearest
from infembed_ray.config.evaluation import RetrieverSettings
from infembed_ray.config.training import Template
from infembed_ray.errors import InputError
from infembed_ray.evaluation.retrievers import runs
from infembed_ray.evaluation.retrievers.retriever import Retriever
from infembed_ray.modeling import checkpoint
from infembed_ray.storage import steps
from infembed_ray.storage.object_store import Folder, is_uri
from infembed_ray.storage.places import Place, place_of

FILE = Path(__file__).with_name("baselines.yaml")
_CLASSES = {
    "encoder": ("evaluation.retrievers.encoders", "CheckpointEncoder"),
    "sentence_transformers": ("evaluation.retrievers.encoders", "SentenceTransformersEncoder"),
    "api": ("evaluation.retrievers.api", "ApiEncoder"),
    "bm25": ("evaluation.retrievers.bm25", "Bm25Ranker"),
    "run": ("evaluation.retrievers.runs", "RunRanker"),
    "seq2seq": ("modeling.rerankers", "Seq2Seq"),
    "causal": ("modeling.rerankers", "Causal"),
    "classifier": ("modeling.rerankers", "Classifier"),
    "random": ("modeling.rerankers", "RandomReranker"),
}
"""Kind -> module and class of its retriever, imported when it is loaded: some import torch or transformers."""
_WITHOUT_WEIGHTS = ("api", "bm25", "random", "run")
"""Kinds that take neither a device nor a number of tokens."""

# ------------------------------------------------------------------------------------------------------ entries


@dataclass(frozen=True)
class Baseline:
    """An entry of baselines.yaml."""

    name: str
    values: Mapping[str, Any]
    """Its settings as the file has them."""
    rows: tuple[str, ...]
    """Its rows in the paper's Tables 2 and 5; none for newer models."""
    source: str
    """Source of prompts, pooling and lengths, and what is uncertain about them."""
    refused: str | None
    """Why it cannot run, and what to do instead; None: it can."""

    @cached_property
    def settings(self) -> RetrieverSettings:
        """Its settings, validated."""
        return _validated(self.values, self.name, f"{FILE.name}: {self.name}.")


@cache
def entries() -> Mapping[str, Baseline]:
    """Read the baselines, by name."""
    listed: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return {
        name: Baseline(name, values, tuple(values.pop("rows", ())), values.pop("source"), values.pop("refused", None))
        for name, values in ((name, dict(values)) for name, values in listed.items())
    }


# -------------------------------------------------------------------------------------- from setting to retriever


def resolve(
    label: str,
    model: str | Mapping[str, Any] | RetrieverSettings,
    template: Template | None = None,
    where: str | None = None,
) -> RetrieverSettings:
    """Return the complete settings of the retriever `models.<label>`, with absolute paths. Reads no weights.

    Args:
        label: of the model in the evaluation's settings.
        model: a checkpoint directory, a hub name, the name of a baseline, or settings, perhaps over those of a baseline.
        template: for a checkpoint that has none, where the settings give no formats.
        where: setting of the model, for error messages; None: `models.<label>`.

    Raises:
        InputError: the baseline is unknown or cannot run, or the settings do not fit together.
    """
    where = where or f"models.{label}"
    if isinstance(model, str):
        if not _is_checkpoint(model):
            return _baseline(where, model, ()).settings
        model = {"model": model}
    settings = RetrieverSettings.from_mapping(dict(model), f"{where}.") if isinstance(model, Mapping) else model
    if settings.baseline is not None:
        settings = _over_baseline(where, settings.baseline, settings.model_dump(exclude_unset=True))
    if settings.kind == "encoder" and settings.template is None and settings.instructed_query is None:
        settings = settings.model_copy(update={"template": template})
    if settings.kind == "api":  # workers have other working directories
        files = {name: getattr(settings.api, name) for name in ("journal", "prices")}
        absolute = {name: str(steps.local_path(file, f"{where}.api.{name}")) for name, file in files.items() if file}
        return settings.model_copy(update={"api": settings.api.model_copy(update=absolute)})
    if settings.kind == "run":
        return settings.model_copy(update={"runs": runs.absolute(settings.runs, where)})
    places = {part: _absolute(name, f"{where}.{part}") for part, name, _ in _models(settings)}
    return settings.model_copy(update=places)


def _over_baseline(where: str, name: str, given: Mapping[str, Any]) -> RetrieverSettings:
    """Merge given values over those of the baseline. Another model does not inherit the revision."""
    values = dict(_baseline(where, name, given).values)
    for model, revision in (("model", "revision"), ("adapter", "adapter_revision")):
        if model in given:
            values.pop(revision, None)
    return _validated(_merged(values, {key: v for key, v in given.items() if key != "baseline"}), name, f"{where}.")


def _validated(values: Mapping[str, Any], baseline: str, where: str) -> RetrieverSettings:
    """Check the values over a baseline together with its own; the result names the baseline."""
    return RetrieverSettings.from_mapping(dict(values), where).model_copy(update={"baseline": baseline})


def _merged(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**values, **given}
    for key in values.keys() & given.keys():
        if isinstance(values[key], Mapping) and isinstance(given[key], Mapping):
            merged[key] = _merged(values[key], given[key])
    return merged


def _baseline(where: str, name: str, given: Collection[str]) -> Baseline:
    if name not in entries():
        raise InputError(
            f"{where}={name}: no such baseline, {nearest(name, entries())}; "
            "or give a checkpoint directory, or a hub name like org/model"
        )
    baseline = entries()[name]
    if baseline.refused is not None and "model" not in given:
        raise InputError(f"{where}={name}: {baseline.refused}")
    return baseline


def _absolute(model: str, setting: str) -> str:
    """Return a model directory as an absolute path, with `latest` followed; a hub name stays as it is.

    Raises:
        InputError: the value looks like a directory that does not exist.
    """
    if is_uri(model):
        return steps.open_input(model, setting).uri
    path = Path(model).expanduser().absolute()
    if path.is_dir():
        return str(steps.resolve(path).resolve())
    if model.startswith(("/", ".", "~")) or model.count("/") != 1:
        raise InputError.of(
            setting, model, "no such model directory", "give an existing one, or a hub name like org/model"
        )
    return model


def _is_checkpoint(model: str) -> bool:
    return is_uri(model) or "/" in model or model.startswith((".", "~")) or Path(model).is_dir()


def inputs(settings: RetrieverSettings, where: str = "model") -> tuple[dict[str, Place], dict[str, str]]:
    """Return a retriever's part of the identity of a `steps.Step`: paths, and names of what is not a path.

    Raises:
        InputError: a directory is missing or holds no model, the hub has no such model, a package is missing, or the
            description of an API is incomplete.
    """
    if settings.kind == "sentence_transformers":
        if importlib.util.find_spec("sentence_transformers") is None:
            raise InputError(
                f"{where}={settings.baseline or settings.model}: needs the package sentence-transformers; "
                "pip install 'infembed-ray[sentence-transformers]'"
            )
    elif settings.kind == "api":
        from infembed_ray.evaluation.retrievers import api

        api.require_usable(settings, where)
    elif settings.kind == "bm25":
        from infembed_ray.evaluation.retrievers import bm25

        bm25.tokenizer(settings.bm25, where)
    paths, names = dict[str, Place](), {"retriever": json.dumps(settings.identity(), sort_keys=True)}
    if settings.kind == "api":
        return paths, names | {"model": settings.model}
    if settings.kind == "run":
        return {f"runs.{number}": place_of(path) for number, path in enumerate(settings.runs)}, names
    for part, model, revision in _models(settings):
        place = place_of(model)
        stored = isinstance(place, Folder) or place.is_dir()
        if part == "adapter" and stored:
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                if not (place / file).is_file():
                    raise InputError(f"{where}.adapter={model}: no {file} in this directory; give one that peft wrote")
        if part == "model":
            checkpoint.locate(model, f"{where}.{part}", revision)
        if stored:
            paths[part] = place
        else:
            file = "config.json" if part == "model" else "adapter_config.json"
            commit = checkpoint.commit(model, file, revision, f"{where}.{part}") or revision
            names[part] = model if commit is None else f"{model}@{commit}"
    return paths, names


def _models(settings: RetrieverSettings) -> list[tuple[str, str, str | None]]:
    """Return (part, directory or hub name, revision) of a local retriever's weights."""
    parts = [("model", settings.model, settings.revision), ("adapter", settings.adapter, settings.adapter_revision)]
    return [(part, model, revision) for part, model, revision in parts if model]


def identity(settings: RetrieverSettings) -> str:
    """Return 16 hex digits that change with anything that changes embeddings, scores or rankings.

    The hash of a directory covers the contents of its files. The hash of a hub model covers its name and commit.
    """
    paths, names = inputs(settings)
    contents = {part: steps.fingerprint(path) for part, path in paths.items()}
    return hashlib.sha256(json.dumps([contents, names], sort_keys=True).encode()).hexdigest()[:16]


def load(
    settings: RetrieverSettings, device: str = "cpu", batch_tokens: int = 4096, known: str | None = None
) -> Retriever:
    """Load the retriever of resolved settings.

    Args:
        settings: from `resolve`.
        device: torch device.
        batch_tokens: tokens of a forward pass, with padding.
        known: identity of the retriever, if it is known; computing it reads all weights.

    Raises:
        InputError: a model, a key or a package is missing.
    """
    own = known or identity(settings)
    # A model in an object store is copied to this node.
    copies = {part: checkpoint.local(model) for part, model, _ in _models(settings) if is_uri(model)}
    settings = settings.model_copy(update=copies)
    module, name = _CLASSES[settings.kind]
    retriever = getattr(importlib.import_module(f"infembed_ray.{module}"), name)
    made: Retriever = retriever(settings, *(() if settings.kind in _WITHOUT_WEIGHTS else (device, batch_tokens)), own)
    return made
