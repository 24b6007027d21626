"""Model directories: finding, reading, writing and telling them apart.

A checkpoint is a sentence-transformers directory: `SentenceTransformer(path)` loads it and embeds the same texts to
the same vectors. `infembed.json` beside it holds what that format has no place for: template and lengths. Separate
encoders of queries and passages are the two routes of a sentence-transformers `Router`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from infembed_ray.config import Interaction, Template
from infembed_ray.errors import InputError
from infembed_ray.modeling.pooling import PoolingMode
from infembed_ray.object_store import is_uri
from infembed_ray.storage import MANIFEST, existing, fingerprint_files, resolve, write_json

OWN_CONFIG = "infembed.json"
ADAPTERS = "adapters"
"""Folder of a checkpoint with the adapters it was trained by, which are merged into its weights."""
_ROUTER_CONFIG = "router_config.json"
_ROUTES = ("query", "document")
_SHARED = ("",)
_POOLING_MODES: dict[str, PoolingMode] = {
    "mean": "mean",
    "lasttoken": "last",
    "cls": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
}
"""sentence-transformers' names, of version 6 and before, of the modes that are here."""
_MODEL_FILES = (".json", ".txt", ".model", ".safetensors")
"""Weights, configuration and tokenizer of a model directory, in whatever form they come."""


# ------------------------------------------------------------------------------------------- which model it is


@dataclass(frozen=True)
class Located:
    """A model that is there.

    Attributes:
        path: its directory on this machine, absolute and with `latest` followed, or its hub name.
        inputs, names: what it contributes to the identity of a `storage.Step`, one of them empty.
    """

    path: str
    inputs: dict[str, Path]
    names: dict[str, str]


def locate(model: str, setting: str, revision: str | None = None) -> Located:
    """Find a model that a setting names.

    Args:
        model: directory (`latest` is followed), URI of one in an object store, or hub name.
        setting: the setting's name.
        revision: commit of a hub's model; None: the newest.

    Raises:
        InputError: it looks like a directory but there is none, or the directory holds no model, or the hub does not
            know the name.
    """
    path = existing(model, setting) if is_uri(model) else resolve(Path(model).expanduser().absolute()).resolve()
    if path.is_dir():
        for tower in _towers(str(path)):
            folder = path / tower
            if not (folder / "config.json").is_file():
                raise InputError(f"{setting}={model}: no config.json in this directory; give a model directory")
            if not any(folder.glob("*.safetensors")):
                raise InputError(
                    f"{setting}={model}: no *.safetensors in this directory; convert the weights to safetensors"
                )
            for weights in folder.glob("*.safetensors"):
                _require_whole(weights, f"{setting}={model}")
        _require_loadable(str(path), f"{setting}={model}")
        return Located(str(path), {setting: path}, {})
    if model.startswith(("/", ".", "~")) or model.count("/") != 1:
        raise InputError(
            f"{setting}={model}: no such model directory; give an existing one, or a hub name like org/model"
        )
    _require_loadable(model, f"{setting}={model}", revision)
    return Located(model, {}, {setting: f"{model}@{revision}" if revision else model})


def _require_whole(weights: Path, setting: str) -> None:
    """Read the header of a file of weights, which says how long it is."""
    try:
        with safe_open(weights, "pt"):
            pass
    except SafetensorError as error:
        raise InputError(
            f"{setting}: {weights.name} is no whole safetensors file ({error}); copy or download it again"
        ) from error


def _require_loadable(model: str, setting: str, revision: str | None = None) -> None:
    """Read configuration and tokenizer here and now; the weights are first read by the workers."""
    try:
        for tower in _towers(model, revision):
            AutoConfig.from_pretrained(model, subfolder=tower, revision=revision)
        AutoTokenizer.from_pretrained(model, subfolder=tower, revision=revision)
    except (OSError, ValueError) as error:
        raise unloadable(setting, error) from error


def unloadable(setting: str, error: Exception) -> InputError:
    """What an error of transformers means for the person who named the model.

    Args:
        setting: name and value of the setting.
        error: raised while the model was loaded.
    """
    said = " ".join(str(error).split())
    if "trust_remote_code" in said:
        return InputError(
            f"{setting}: runs only with code that comes with it, which is never run here; serve it behind an "
            "OpenAI-compatible /v1/embeddings and evaluate that, or convert it to a class that transformers has"
        )
    return InputError(
        f"{setting}: neither a model directory here nor a model the hub gives "
        f"({said[:160]}); check the spelling, the tokenizer's files and the network"
    )


def at_revision(model: str, revision: str | None) -> str:
    """A model as it can be loaded: of a hub's model at a commit, its directory on this machine.

    Raises:
        InputError: the hub does not give it.
    """
    if revision is None or Path(model).is_dir():
        return model
    try:
        return snapshot_download(model, revision=revision, allow_patterns=[f"*{suffix}" for suffix in _MODEL_FILES])
    except (OSError, ValueError) as error:
        raise unloadable(f"model={model}, revision={revision}", error) from error


def commit(model: str, file: str, revision: str | None, setting: str) -> str | None:
    """The commit of a hub's model that a revision means now; None if neither the hub nor this machine's cache says.

    Args:
        model: hub name.
        file: that it has, like config.json.
        revision: commit, branch or tag; None: the newest.
        setting: the setting's name.

    Raises:
        InputError: the hub says that there is no such model.
    """
    try:
        found = cached_file(
            model,
            file,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except (OSError, ValueError) as error:
        raise unloadable(f"{setting}={model}", error) from error
    return extract_commit_hash(found, None)


def fingerprint(model: str, asked: str) -> str:
    """16 hex digits that change with anything that changes an embedding; of a hub name, the name and `asked`.

    Two copies of one checkpoint have the same fingerprint, wherever they lie.

    Args:
        model: directory or hub name.
        asked: what was asked for when it was loaded; it may differ from what the files say.
    """
    root = Path(model)
    if not root.is_dir():
        return f"hub:{model}:{hashlib.sha256(asked.encode()).hexdigest()[:8]}"
    folders = [root, *root.glob("*_Pooling"), *(root / tower for tower in _towers(model) if tower)]
    files = sorted(
        file for folder in folders for file in folder.iterdir() if file.suffix in _MODEL_FILES and file.name != MANIFEST
    )
    return hashlib.sha256(f"{fingerprint_files(files, relative_to=root)}{asked}".encode()).hexdigest()[:16]


# ----------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Description:
    """What a model directory says of itself, besides weights and tokenizer; None where it says nothing.

    Attributes:
        towers: folders of its backbones: one, or those of queries and of passages.
        pooling, template, query_prefix, passage_prefix, query_length, passage_length: as of the encoder.
        max_length: most tokens of any text.
        dimensions: so many components of an embedding are used.
        interaction: how instruction and query meet.
        finished: it is made for embedding, so its tokenizer is as it should be.
    """

    towers: Sequence[str] = _SHARED
    pooling: PoolingMode | None = None
    template: Template | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None
    query_length: int | None = None
    passage_length: int | None = None
    max_length: int | None = None
    dimensions: int | None = None
    interaction: Interaction | None = None
    finished: bool = False


def describe(model: str, with_pooling: bool = True) -> Description:
    """Read what a directory or a hub's model says of itself.

    Args:
        model: directory or hub name.
        with_pooling: False where its pooling is overridden.

    Raises:
        InputError: it has a part or a pooling that this encoder does not: its embeddings would silently be others.
    """
    modules = _read_json(model, "modules.json")
    folders = _modules(model, modules) if modules else {}
    own = _read_json(model, OWN_CONFIG)
    towers = _towers(model)
    settings = _read_json(model, "config_sentence_transformers.json")
    prompts = settings.get("prompts", {})
    lengths = [_read_json(model, _join(tower, "sentence_bert_config.json")).get("max_seq_length") for tower in towers]
    return Description(
        towers=towers,
        pooling=_saved_pooling(model, folders["Pooling"]) if with_pooling and "Pooling" in folders else None,
        template=own.get("template"),
        query_prefix=prompts.get("query"),
        passage_prefix=prompts.get("document", prompts.get("passage")),
        query_length=own.get("query_length"),
        passage_length=own.get("passage_length"),
        max_length=min((length for length in lengths if length), default=None),
        dimensions=settings.get("truncate_dim"),
        interaction=own.get("interaction"),
        finished=bool(modules),
    )


def load(model: str, towers: Sequence[str], with_weights: bool = True, **options: Any) -> tuple[list[Any], Any]:
    """The backbones of a directory or a hub's model, and their tokenizer, which has a padding token.

    Args:
        model: directory or hub name.
        towers: its folders, as it describes itself.
        with_weights: read them; or else the backbones are on torch's meta device.
        options: for `AutoModel.from_pretrained`.

    Raises:
        InputError: no such model, or a directory without weights, with damaged ones, or with a tokenizer that knows no
            places of tokens.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, subfolder=towers[0])
        if with_weights:
            backbones = [AutoModel.from_pretrained(model, subfolder=tower, **options) for tower in towers]
        else:
            with torch.device("meta"):
                configs = [AutoConfig.from_pretrained(model, subfolder=tower) for tower in towers]
                backbones = [AutoModel.from_config(config, **options) for config in configs]
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(
            f"model={model}: cannot be loaded ({' '.join(str(error).split())[:200]}); "
            "give a directory with config.json, tokenizer and safetensors, or a reachable hub name"
        ) from error
    places = backbones[0].get_input_embeddings().num_embeddings
    if tokenizer.vocab_size > places:  # added ones do not count: Qwen2 gets one on loading
        raise InputError(
            f"model={model}: its tokenizer has {tokenizer.vocab_size} tokens, the model embeds {places}: it is another model's; "
            "give the tokenizer that the model was trained with"
        )
    if not tokenizer.is_fast:
        raise InputError(f"model={model}: its tokenizer is not a fast one; convert it to a tokenizer.json")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return backbones, tokenizer


def is_own(model: str) -> bool:
    """Was it written by `write`, so that it carries its template and lengths?"""
    return bool(_read_json(model, OWN_CONFIG))


def _towers(model: str, revision: str | None = None) -> Sequence[str]:
    """Folders of the backbones of queries and passages; one, the directory itself, where they share it.

    Raises:
        InputError: it has other routes than these two.
    """
    router = _read_json(model, _ROUTER_CONFIG, revision)
    if not router:
        return _SHARED
    routes = router["structure"]
    kinds = {router["types"][module].rsplit(".", 1)[-1] for route in routes.values() for module in route[:1]}
    if set(routes) != set(_ROUTES) or kinds != {"Transformer"}:
        raise InputError(
            f"model={model}: a Router over {', '.join(routes)} is not supported; give one whose routes "
            f"{' and '.join(_ROUTES)} start with a Transformer"
        )
    return tuple(routes[route][0] for route in _ROUTES)


def _modules(model: str, listed: list[dict[str, str]]) -> dict[str, str]:
    """Kind -> folder of the modules of a sentence-transformers directory, those of its routes included."""
    folders = {module["type"].rsplit(".", 1)[-1]: module.get("path", "") for module in listed}
    if "Router" in folders:
        routed = _read_json(model, _ROUTER_CONFIG)["types"]
        folders |= {kind.rsplit(".", 1)[-1]: folder for folder, kind in routed.items()}
    foreign = sorted(set(folders) - {"Router", "Transformer", "Pooling", "Normalize", "CrossAttention"})
    if foreign:
        raise InputError(f"model={model}: has a {foreign[0]} module, which is not supported; give a model without it")
    return folders


def _saved_pooling(model: str, folder: str) -> PoolingMode | None:
    saved = _read_json(model, _join(folder, "config.json"))
    if saved.get("include_prompt") is False:
        raise InputError(
            f"model={model}: leaves prompts out of its pooling, which is not supported; set pooling=mean, last or cls "
            "to override it"
        )
    modes = [saved["pooling_mode"]] if "pooling_mode" in saved else [k for k, on in saved.items() if on is True]
    modes = [mode for mode in modes if "pooling_mode" in saved or mode.startswith("pooling_mode_")]
    if not modes:
        return None
    if len(modes) > 1 or modes[0] not in _POOLING_MODES:
        raise InputError(
            f"model={model}: pools by {' and '.join(map(str, modes))}; set pooling=mean, last or cls to override it"
        )
    return _POOLING_MODES[modes[0]]


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _read_json(model: str, name: str, revision: str | None = None) -> Any:
    """A JSON file of a model, from its directory or from the hub; an empty object where the model has none."""
    file = cached_file(
        model,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return json.loads(Path(file).read_text(encoding="utf-8")) if file else {}


# ----------------------------------------------------------------------------------------------------- writing


def write(path: Path, description: Description, backbones: Sequence[Any], tokenizer: Any) -> None:
    """Write a sentence-transformers directory.

    Args:
        path: the directory; made if need be.
        description: all of it but `towers`, which follows from the backbones.
        backbones: one Hugging Face model, or that of queries and that of passages.
        tokenizer: theirs.
    """
    towers = _SHARED if len(backbones) == 1 else tuple(f"{route}_0_Transformer" for route in _ROUTES)
    longest = max(description.query_length or 0, description.passage_length or 0)
    for tower, backbone in zip(towers, backbones, strict=True):
        folder = path / tower
        folder.mkdir(parents=True, exist_ok=True)
        backbone.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        loading: dict[str, Any] = {"max_seq_length": longest, "do_lower_case": False}
        if getattr(backbone.config, "is_causal", None) is False:
            # transformers' SDPA takes a batch without padding for causal in a decoder, whatever its config says.
            loading["model_args"] = {"attn_implementation": "eager"}
        write_json(folder / "sentence_bert_config.json", loading)
    if len(towers) == 1:
        pooling = "1_Pooling"
        modules = {"": "Transformer", pooling: "Pooling", "2_Normalize": "Normalize"}
    else:
        pooling = "query_1_Pooling"  # the pooling of both routes; there is nothing in it to be separate
        modules = {"": "Router", "1_Normalize": "Normalize"}
        write_json(
            path / _ROUTER_CONFIG,
            {
                "types": {**dict.fromkeys(towers, _type("Transformer")), pooling: _type("Pooling")},
                "structure": {route: [tower, pooling] for route, tower in zip(_ROUTES, towers, strict=True)},
                "parameters": {"default_route": "document", "allow_empty_key": True, "route_mappings": {}},
            },
        )
    if description.interaction == "cross_attention":
        # It embeds two texts at a time, which this format cannot: sentence-transformers refuses a module it does not
        # have. Without modules.json it would load the backbone alone, and embed queries otherwise.
        modules["interaction"] = "CrossAttention"
    write_json(
        path / "modules.json",
        [
            {"idx": i, "name": str(i), "path": folder, "type": _type(kind)}
            for i, (folder, kind) in enumerate(modules.items())
        ],
    )
    for name in (pooling, *list(modules)[1:]):
        (path / name).mkdir(exist_ok=True)
    write_json(
        path / pooling / "config.json",
        {
            "word_embedding_dimension": int(backbones[0].config.hidden_size),
            **{key: mode == description.pooling for key, mode in _POOLING_MODES.items() if key.startswith("pooling_")},
            "include_prompt": True,
        },
    )
    write_json(
        path / "config_sentence_transformers.json",
        {
            "prompts": {"query": description.query_prefix, "document": description.passage_prefix},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
            "truncate_dim": description.dimensions,
        },
    )
    write_json(
        path / OWN_CONFIG,
        {
            "template": description.template,
            "interaction": description.interaction,
            "query_length": description.query_length,
            "passage_length": description.passage_length,
        },
    )


def _type(kind: str) -> str:
    if kind == "CrossAttention":
        return "infembed_ray.modeling.interaction.CrossAttention"
    return f"sentence_transformers.models.{kind}"
