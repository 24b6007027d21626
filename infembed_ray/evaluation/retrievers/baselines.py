"""Which retriever a setting means, and how to load it: checkpoints, the baselines of the tables, and mappings of settings.

The baselines are data (baselines.yaml): those of the paper's Tables 2 and 5 and some newer ones, each with the prompts,
pooling and lengths it was made for.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml

from infembed_ray import storage
from infembed_ray.config import RetrieverKind, RetrieverSettings, Settings, Template, nearest
from infembed_ray.errors import InputError
from infembed_ray.evaluation.retrievers import formats
from infembed_ray.evaluation.retrievers.retriever import Encoder, Ranker, Reranker
from infembed_ray.modeling import checkpoint
from infembed_ray.object_store import is_uri

S = TypeVar("S", bound=Settings)

FILE = Path(__file__).with_name("baselines.yaml")
ALONE: frozenset[RetrieverKind] = frozenset({"api", "bm25"})
"""Kinds of which there is one process: a budget is kept in one place, and BM25 ranks a whole task by itself."""

_FORMATS = {"instructed_query", "plain_query"}
_USED: dict[RetrieverKind, set[str]] = {
    "encoder": {
        "model",
        "revision",
        "adapter",
        "adapter_revision",
        "dtype",
        *_FORMATS,
        "passage",
        "template",
        "pooling",
    }
    | {"pool_prompt", "append_eos", "bidirectional", "dimensions", "query_length", "passage_length"},
    "sentence_transformers": {"model", "revision", "dtype", *_FORMATS, "passage", "pool_prompt", "normalize"}
    | {"dimensions", "query_length", "passage_length"},
    "api": {"model", *_FORMATS, "passage", "dimensions", "api"},
    "bm25": {*_FORMATS, "bm25"},
    "seq2seq": {"model", "revision", "dtype", *_FORMATS, "passage", "pair", "pair_length", "query_length", "answers"},
    "classifier": {"model", "revision", "dtype", *_FORMATS, "passage", "pair_length", "query_length"},
    "causal": {"model", "revision", "adapter", "adapter_revision", "dtype", *_FORMATS, "passage", "pair", "pair_length"}
    | {"query_length", "answers"},
    "random": {"seed"},
}
"""Kind -> what of the settings it takes besides `baseline` and `kind`."""
_NEEDED: dict[RetrieverKind, tuple[str, ...]] = {
    "encoder": ("model",),
    "sentence_transformers": ("model", "instructed_query", "plain_query", "passage"),
    "api": ("model", "instructed_query", "plain_query"),
    "bm25": ("instructed_query", "plain_query"),
    "seq2seq": ("model", "instructed_query", "plain_query", "pair", "answers"),
    "classifier": ("model", "instructed_query", "plain_query"),
    "causal": ("model", "instructed_query", "plain_query", "pair", "answers"),
    "random": (),
}
_PLACES: dict[str, tuple[set[str], set[str]]] = {
    "instructed_query": ({"query"}, {"query", "instruction"}),
    "plain_query": ({"query"}, {"query"}),
    "passage": ({"passage"}, {"passage"}),
    "pair": ({"query", "passage"}, {"query", "passage"}),
}
"""Format -> the places it must have, and those it may have."""


# ---------------------------------------------------------------------------------------------- the entries


@dataclass(frozen=True)
class Baseline:
    """A retriever of the tables."""

    name: str
    settings: RetrieverSettings
    rows: tuple[str, ...]
    """Rows of the paper's Tables 2 and 5 that it is; none of the newer ones."""
    source: str
    """Where prompts, pooling and lengths are from, and what is uncertain about them."""
    refused: str | None
    """Why it cannot be run, and what to do instead; None: it can."""


@cache
def entries() -> Mapping[str, Baseline]:
    """The baselines, by name."""
    listed: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return {name: _entry(name, dict(values)) for name, values in listed.items()}


def _entry(name: str, values: dict[str, Any]) -> Baseline:
    rows, source, refused = values.pop("rows", []), values.pop("source"), values.pop("refused", None)
    settings = RetrieverSettings.of(values | {"baseline": name}, where=f"{FILE.name}: {name}")
    return Baseline(name, settings, tuple(rows), source, refused)


# --------------------------------------------------------------------------------------- from setting to retriever


def resolve(
    label: str, model: str | Mapping[str, Any] | RetrieverSettings, template: Template | None = None
) -> RetrieverSettings:
    """The settings of the retriever that `models.<label>` means. Reads no weights.

    Args:
        label: of the model in the evaluation's settings.
        model: a checkpoint directory, a hub name, the name of a baseline, or settings, which may build on a baseline.
        template: of a checkpoint directory or hub's model that carries none, where the settings give no formats.

    Raises:
        InputError: there is no such baseline, it cannot be run here, or the settings do not fit together.
    """
    where = f"models.{label}"
    if isinstance(model, str):
        if not _is_checkpoint(model):
            return _baseline(where, model, frozenset()).settings
        settings = RetrieverSettings(model=model)
    else:
        settings = model if isinstance(model, RetrieverSettings) else RetrieverSettings.of(dict(model), where)
    if settings.baseline is not None:
        settings = _over(_baseline(where, settings.baseline, settings.model_fields_set).settings, settings)
    _require_sound(where, settings)
    if settings.kind == "encoder" and settings.template is None and settings.instructed_query is None:
        settings = settings.model_copy(update={"template": template})
    if settings.kind == "api":
        # Workers have other working directories.
        files = {name: getattr(settings.api, name) for name in ("journal", "prices")}
        absolute = {name: str(storage.local_path(file, f"{where}.api.{name}")) for name, file in files.items() if file}
        return settings.model_copy(update={"api": settings.api.model_copy(update=absolute)})
    found = {part: _absolute(name, f"{where}.{part}") for part, name, _ in _models(settings)}
    return settings.model_copy(update=found)


def _absolute(model: str, setting: str) -> str:
    """A directory as one of this machine's absolute paths, `latest` followed; a hub name as it is.

    Raises:
        InputError: it looks like a directory, and is not there.
    """
    if is_uri(model):
        return str(storage.existing(model, setting))
    path = Path(model).expanduser().absolute()
    if path.is_dir():
        return str(storage.resolve(path).resolve())
    if model.startswith(("/", ".", "~")) or model.count("/") != 1:
        raise InputError(
            f"{setting}={model}: no such model directory; give an existing one, or a hub name like org/model"
        )
    return model


def _is_checkpoint(model: str) -> bool:
    return is_uri(model) or "/" in model or model.startswith((".", "~")) or Path(model).is_dir()


def _over(entry: S, given: S) -> S:
    """The settings of a baseline under those that were given. The revision of its model is that of no other."""
    update = {name: getattr(given, name) for name in given.model_fields_set}
    for name, value in update.items():
        if isinstance(value, Settings):
            update[name] = _over(getattr(entry, name), value)
    for model, revision in (("model", "revision"), ("adapter", "adapter_revision")):
        if model in update:
            update.setdefault(revision, None)
    return entry.model_copy(update=update)


def _baseline(where: str, name: str, given: AbstractSet[str]) -> Baseline:
    if name not in entries():
        raise InputError(
            f"{where}={name}: no such baseline, {nearest(name, entries())}; "
            "or give a checkpoint directory, or a hub name like org/model"
        )
    baseline = entries()[name]
    if baseline.refused is not None and "model" not in given:
        raise InputError(f"{where}={name}: {baseline.refused}")
    return baseline


def _require_sound(where: str, settings: RetrieverSettings) -> None:
    kind = settings.kind
    for name in sorted(settings.model_fields_set - _USED[kind] - {"baseline", "kind"}):
        if getattr(settings, name) != RetrieverSettings.model_fields[name].default:
            raise InputError(f"{where}.{name}: not a setting of kind {kind}; drop it, or correct {where}.kind")
    for name in _NEEDED[kind]:
        if getattr(settings, name) is None:
            raise InputError(f"{where}.{name} is missing: kind {kind} needs it")
    if (settings.instructed_query is None) != (settings.plain_query is None):
        raise InputError(f"{where}: give instructed_query and plain_query both, or neither")
    for name, (must, may) in _PLACES.items():
        text_format = getattr(settings, name)
        if text_format is None:
            continue
        found = formats.places(text_format)
        if not must <= set(found) <= may or len(found) != len(set(found)):
            wanted = " and ".join(f"{{{place}}}" for place in sorted(may))
            raise InputError(f"{where}.{name}={text_format!r}: write it with {wanted}, each once")
    if settings.template is not None and settings.instructed_query is not None:
        raise InputError(f"{where}.template={settings.template}: formats say how a query is written; drop it, or them")
    if not settings.pool_prompt and settings.instructed_query is None:
        raise InputError(
            f"{where}.pool_prompt=false: says nothing without formats; give instructed_query and plain_query"
        )
    if not settings.pool_prompt and settings.pooling not in ("auto", "mean"):
        raise InputError(f"{where}.pool_prompt=false: is about a mean, {where}.pooling={settings.pooling}; set mean")


def inputs(settings: RetrieverSettings, where: str = "model") -> tuple[dict[str, Path], dict[str, str]]:
    """What a retriever contributes to the identity of a `storage.Step`: paths, and names of what is no path.

    Raises:
        InputError: a directory is not there or holds no model, the hub does not give one, a package is missing, or an API
            is not fully described.
    """
    if settings.kind == "sentence_transformers":
        _require_package(where, settings)
    elif settings.kind == "api":
        from infembed_ray.evaluation.retrievers import api

        api.require_usable(settings, where)
    elif settings.kind == "bm25":
        from infembed_ray.evaluation.retrievers import bm25

        bm25.tokenizer(settings.bm25, where)
    paths, names = dict[str, Path](), {"retriever": json.dumps(settings.identity(), sort_keys=True)}
    for part, model, revision in _models(settings):
        if part == "adapter" and Path(model).is_dir():
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                if not (Path(model) / file).is_file():
                    raise InputError(f"{where}.adapter={model}: no {file} in this directory; give one that peft wrote")
        if part == "model" and settings.kind != "api":
            checkpoint.locate(model, f"{where}.{part}", revision)
        if settings.kind == "api":
            names[part] = model
        elif Path(model).is_dir():
            paths[part] = Path(model)
        else:
            file = "config.json" if part == "model" else "adapter_config.json"
            found = checkpoint.commit(model, file, revision, f"{where}.{part}") or revision
            names[part] = model if found is None else f"{model}@{found}"
    return paths, names


def _require_package(where: str, settings: RetrieverSettings) -> None:
    if importlib.util.find_spec("sentence_transformers") is None:
        raise InputError(
            f"{where}={settings.baseline or settings.model}: needs the package sentence-transformers, which only "
            "some models do; pip install 'infembed-ray[sentence-transformers]'"
        )


def _models(settings: RetrieverSettings) -> list[tuple[str, str, str | None]]:
    """(part, directory or name, revision) of what it consists of."""
    parts = [("model", settings.model, settings.revision), ("adapter", settings.adapter, settings.adapter_revision)]
    return [(part, model, revision) for part, model, revision in parts if model is not None]


def identity(settings: RetrieverSettings) -> str:
    """16 hex digits that change with anything that changes embeddings, scores or rankings; what `load` gives has it.

    Of directories, the contents count; of hub names, the name and the commit. It reads all weights of a directory.
    """
    paths, names = inputs(settings)
    contents = {part: storage.fingerprint(path) for part, path in paths.items()}
    return hashlib.sha256(json.dumps([contents, names], sort_keys=True).encode()).hexdigest()[:16]


def load(
    settings: RetrieverSettings, device: str = "cpu", batch_tokens: int = 4096, known: str | None = None
) -> Encoder | Reranker | Ranker:
    """The retriever of resolved settings.

    Args:
        settings: as `resolve` gives them.
        device: of torch.
        batch_tokens: most tokens of a forward pass, padding included.
        known: its identity, if somebody has computed it before: else all weights are read once more for it.

    Raises:
        InputError: a model, a key or a package is missing.
    """
    own = known or identity(settings)
    if settings.kind == "encoder":
        from infembed_ray.evaluation.retrievers.encoders import CheckpointEncoder

        return CheckpointEncoder(settings, device, batch_tokens, own)
    if settings.kind == "sentence_transformers":
        from infembed_ray.evaluation.retrievers.encoders import SentenceTransformersEncoder

        return SentenceTransformersEncoder(settings, device, batch_tokens, own)
    if settings.kind == "api":
        from infembed_ray.evaluation.retrievers.api import ApiEncoder

        return ApiEncoder(settings, own)
    if settings.kind == "bm25":
        from infembed_ray.evaluation.retrievers.bm25 import Bm25Ranker

        return Bm25Ranker(settings, own)
    from infembed_ray.evaluation.retrievers import rerankers

    if settings.kind == "random":
        return rerankers.Chance(settings, own)
    return rerankers.load(settings, device, batch_tokens, own)
