"""Model directories: find, describe, load, write and fingerprint them.

A checkpoint is a sentence-transformers directory, with template, interaction, lengths and the weight of exclusions in
`infembed.json`. Only the functions that load a model or ask the hub import torch and transformers, which take seconds.
"""

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict, cast

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from safetensors import SafetensorError, safe_open
from tokenizers import normalizers

from infembed_ray.config.training import Interaction, Pooling, PoolingMode, Template
from infembed_ray.errors import InputError
from infembed_ray.modeling import pretrained
from infembed_ray.modeling.pretrained import cached, join, read_json, unloadable
from infembed_ray.modeling.tokenizer import TextFormat
from infembed_ray.storage.object_store import Folder, convert_errors, is_uri
from infembed_ray.storage.places import Place, address, fingerprint_files, place_of
from infembed_ray.storage.steps import MANIFEST, STATES, find_input, resolve, resolve_input

OWN_CONFIG = "infembed.json"
ADAPTERS = "adapters"
"""Folder of a checkpoint with its adapters, which are also merged into its weights."""
ROUTER_CONFIG = "router_config.json"
ROUTES = ("query", "document")
SHARED = ("",)
POOLING_MODES: dict[str, PoolingMode] = {
    "mean": "mean",
    "lasttoken": "last",
    "cls": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
}
"""Pooling modes by their names in sentence-transformers, of version 6 and earlier."""
_MODEL_FILES = (".json", ".txt", ".model", ".safetensors")
"""Suffixes of weights, configuration and tokenizer."""


@dataclass(frozen=True)
class Located:
    """A model that exists: its hub name, or absolute directory or URI, which `local` turns into a directory of the process.

    `inputs` and `names` are its part of the identity of a `steps.Step`; one of them is empty.
    """

    path: str
    inputs: dict[str, Place]
    names: dict[str, str]


def locate(model: str, setting: str, revision: str | None = None, kind: str | None = None) -> Located:
    """Find a model that a setting names, and read its configuration and its tokenizer.

    Args:
        model: directory (`latest` is followed), its URI in an object store, or hub name.
        setting: name of the setting.
        revision: commit of a model on the hub; None: the newest.
        kind: kind of a retriever that the model must be, as far as its configuration tells; None: any.

    Raises:
        InputError: there is no such directory, the directory has no model, or one of another kind, or the hub has no such name.
    """
    located = find(model, setting, revision)
    path = local(located.path, setting, with_weights=False)
    config = require_loadable(path, f"{setting}={model}", revision)
    name = (config.architectures or [""])[0]  # where it leaves the kind open, the weights decide
    misfits = name.endswith("ForSequenceClassification") and kind not in (None, "classifier")
    if kind == "encoder":
        modules = read_json(path, "modules.json", revision, list)
        misfits = misfits and config.num_labels <= 2 and all(_kind(one["type"]) != "Pooling" for one in modules)
    elif kind == "classifier":
        misfits = name.endswith(("Model", "ForCausalLM", "ForConditionalGeneration"))
    elif kind == "causal":
        misfits = misfits or (name.endswith("Model") and not name.endswith("LMHeadModel"))
    if misfits:
        remedy = "give one of this kind, or set its own kind: encoder, causal, seq2seq, classifier (with instructed_query, plain_query)"
        raise InputError.of(setting, model, f"is a {name}, not a model of kind={kind}", remedy)
    return located


def find(model: str, setting: str, revision: str | None = None) -> Located:
    """As `locate`, without transformers: a hub name is not checked."""
    resolved = absolute(model, setting)
    path = place_of(resolved)
    if isinstance(path, Folder):  # checked by its listing
        with convert_errors(path.base, setting):
            names = {PurePosixPath(name) for name in path.entries()}
        _require_files(names, local(resolved, setting, with_weights=False), f"{setting}={path}")
        return Located(resolved, {setting: path}, {})
    if not path.is_dir():
        return Located(model, {}, {setting: f"{model}@{revision}" if revision else model})
    towers = _towers(resolved)
    if not (path / towers[0] / "config.json").is_file():
        _require_finished(path, f"{setting}={model}")
    files = [file for tower in towers for file in (path / tower).glob("*")]
    _require_files({PurePosixPath(file.relative_to(path)) for file in files}, resolved, f"{setting}={model}")
    for weights in (file for file in files if file.suffix == ".safetensors"):
        try:
            with safe_open(weights, "np"):  # compares the length of the file with its header
                pass
        except SafetensorError as error:
            fault = f"{weights.name} is damaged or truncated ({error})"
            raise InputError.of(setting, model, fault, "copy or download it again") from error
    return Located(resolved, {setting: path}, {})


def absolute(model: str, setting: str) -> str:
    """Return a model directory as an absolute path or URI, with `latest` followed; a hub name stays as it is.

    Raises:
        InputError: there is no such directory.
    """
    if is_uri(model):
        return address(find_input(model, setting))
    path = Path(str(resolve(Path(model).expanduser().absolute()))).resolve()
    if path.is_dir():
        return str(path)
    if model.startswith(("/", ".", "~")) or model.count("/") != 1:
        remedy = "give an existing one, or a hub name like org/model"
        raise InputError.of(setting, model, "no such model directory", remedy)
    return model


def _require_files(names: set[PurePosixPath], path: str, setting: str) -> None:
    """Raise InputError if a model, by the names of its files and its configuration at `path`, has parts missing."""
    for tower in _towers(path):
        pretrained.require_no_adapters(path, setting, tower)
        if PurePosixPath(tower, "config.json") not in names:
            raise InputError(f"{setting}: no config.json in this directory; give a model directory")
        if not any(name.suffix == ".safetensors" and name.parent == PurePosixPath(tower) for name in names):
            raise InputError(f"{setting}: no *.safetensors in this directory; convert the weights to safetensors")


def local(model: str, setting: str = "model", with_weights: bool = True) -> str:
    """Return what this process can load a model from: its directory, with `latest` followed, or its hub name.

    A model in an object store is copied to this node's scratch directory, once for all processes of the node;
    without weights, the configuration and the tokenizer only. InputError if the object store does not return it.
    """
    if is_uri(model):
        return str(resolve_input(model, setting, without=None if with_weights else is_weights))
    return str(resolve(Path(model)))


def is_weights(file: str) -> bool:
    """Return whether a file holds the weights of a backbone, by its name: `model-00001-of-00002.safetensors`."""
    name = PurePosixPath(file)
    return name.suffix == ".safetensors" and name.stem.startswith("model")


def _require_finished(path: Path, setting: str) -> None:
    """Raise InputError if a directory without a model is, or holds, what an unfinished training left."""
    output = path.parent if path.suffix == ".partial" else path
    if any((partial / STATES).is_dir() for partial in output.glob(".*.partial")):
        remedy = f"run the same `infembed train ... output={output}` again, which resumes it"
        raise InputError.of(setting, None, "an unfinished training", remedy)


def require_loadable(model: str, setting: str, revision: str | None = None) -> Any:
    """Return a configuration, and read the tokenizer; InputError if it fails: errors appear before workers read the weights."""
    for tower in _towers(model, revision):
        config = pretrained.config(model, setting, tower, revision, native=True)
    pretrained.tokenizer(model, setting, tower, revision, native=True)
    return config


def at_revision(model: str, revision: str | None) -> str:
    """Return what to load for a model at a revision: a hub's model is downloaded; InputError if the hub does not have it."""
    if revision is None or Path(model).is_dir():
        return model
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(model, revision=revision, allow_patterns=[f"*{suffix}" for suffix in _MODEL_FILES])
    except (OSError, ValueError) as error:
        raise unloadable(f"model={model}, revision={revision}", error) from error


def commit(model: str, file: str, revision: str | None, setting: str) -> str | None:
    """Return the commit of a revision (commit, branch or tag; None: the newest) of a hub's model, by one of its files.

    None if neither the hub nor the local cache has it; InputError if the hub has no such model.
    """
    from transformers.utils.hub import extract_commit_hash

    try:
        path = cached(model, file, revision)
    except (OSError, ValueError) as error:
        raise unloadable(f"{setting}={model}", error) from error
    return extract_commit_hash(path, None)


def fingerprint(model: str, asked: str) -> str:
    """Return 16 hex digits that change whenever an embedding may change; for a hub name, the name and a hash.

    Copies of a checkpoint, loaded with the same options `asked`, have the same fingerprint.
    """
    files = files_digest(model)
    if files is None:
        return f"hub:{model}:{hashlib.sha256(asked.encode()).hexdigest()[:8]}"
    return hashlib.sha256(f"{files}{asked}".encode()).hexdigest()[:16]


def files_digest(model: str) -> str | None:
    """Return 16 hex digits of the names and bytes of a model's files; None for a hub name."""
    root = Path(local(model))
    if not root.is_dir():
        return None
    folders = [root, *root.glob("*_Pooling"), *(root / tower for tower in _towers(str(root)) if tower)]
    every = (file for folder in folders for file in folder.iterdir())
    files = sorted(file for file in every if file.suffix in _MODEL_FILES and file.name != MANIFEST)
    return fingerprint_files(files, relative_to=root)


@dataclass(frozen=True)
class Description:
    """What a model says of itself, besides weights and tokenizer; None if it says nothing.

    `towers` are the folders of the backbones: one, or those of queries and passages. `max_length` is the token limit of all
    texts. A `finished` model is made for embedding, so that its tokenizer needs no EOS. `exclusion_weight` is that of
    `InstructionEncoder`.
    """

    towers: Sequence[str] = SHARED
    pooling: PoolingMode | None = None
    template: Template | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None
    query_length: int | None = None
    passage_length: int | None = None
    max_length: int | None = None
    dimensions: int | None = None
    interaction: Interaction | None = None
    exclusion_weight: float = 0.0
    finished: bool = False


def describe(model: str, with_pooling: bool = True) -> Description:
    """Read the description of a model, without its pooling if that is overridden.

    Raises:
        InputError: it has a module or a pooling that this encoder does not support.
    """
    modules = read_json(model, "modules.json", kind=list)
    folders = _modules(model, modules) if modules else {}
    own = read_json(model, OWN_CONFIG)
    towers = _towers(model)
    settings = read_json(model, "config_sentence_transformers.json")
    prompts = settings.get("prompts") or {}
    _require_versions(model, settings.get("requirements"))
    lengths = [read_json(model, join(tower, "sentence_bert_config.json")).get("max_seq_length") for tower in towers]
    return Description(
        towers=towers,
        pooling=_saved_pooling(model, folders["Pooling"]) if with_pooling and "Pooling" in folders else None,
        template=own.get("template"),
        query_prefix=prompts.get("query"),
        passage_prefix=prompts.get("document", prompts.get("passage", own.get("passage_prefix"))),
        query_length=own.get("query_length"),
        passage_length=own.get("passage_length"),
        max_length=min((length for length in lengths if length), default=None),
        dimensions=settings.get("truncate_dim"),
        interaction=own.get("interaction"),
        exclusion_weight=own.get("exclusion_weight", 0.0),
        finished=bool(modules),
    )


def pair_format(model: str, revision: str | None = None) -> TextFormat:
    """Return the length, and the text before a passage, of a reranker's pairs, as its training wrote them; else defaults."""
    own = read_json(model, OWN_CONFIG, revision)
    names = ("passage_prefix", "passage_length") if own.get("head") == "score" else ()
    return TextFormat(**{name: own[name] for name in names if name in own})


class Overrides(TypedDict, total=False):
    """What replaces the description that comes with a model: the settings of `infembed train` by these names, and
    `dimensions`, the number of leading components that make the embedding (Matryoshka). A missing key and None keep the
    model's own value.

    Attributes:
        pooling: default mean for encoders and bidirectional decoders, last for decoders.
        query_length, passage_length: token limits; default as of `TextFormat`, or the model's `max_seq_length` if that
            is less. Never more than the backbone has positions.
        append_eos: default only if the tokenizer does not end texts with a special token yet, and either its config has
            `add_eos_token`, or the last token is pooled, it has an EOS and the model is not made for embedding.
    """

    template: Template | None
    interaction: Interaction | None
    pooling: Pooling
    query_prefix: str | None
    passage_prefix: str | None
    query_length: int | None
    passage_length: int | None
    append_eos: bool | None
    bidirectional: bool | None
    share_encoder: bool | None
    dimensions: int | None


def text_format(saved: Description, overrides: Overrides, backbone: Any, tokenizer: Any) -> TextFormat:
    """Combine overrides, the model's own description, and the defaults, in this order."""
    default = TextFormat()
    positions = min(getattr(backbone.config, "max_position_embeddings", 1 << 30), tokenizer.model_max_length)
    limit = saved.max_length or positions
    query_length = overrides.get("query_length") or saved.query_length or min(default.query_length, limit)
    passage_length = overrides.get("passage_length") or saved.passage_length or min(default.passage_length, limit)
    return TextFormat(
        template=overrides.get("template") or saved.template or default.template,
        # An empty prefix of the overrides is a prefix.
        query_prefix=next(p for p in (overrides.get("query_prefix"), saved.query_prefix, "") if p is not None),
        passage_prefix=next(p for p in (overrides.get("passage_prefix"), saved.passage_prefix, "") if p is not None),
        query_length=min(query_length, positions),
        passage_length=min(passage_length, positions),
    )


def load(
    model: str, towers: Sequence[str], with_weights: bool = True, native: bool = False, **options: Any
) -> tuple[list[Any], Any]:
    """Load the backbones of a model, by their folders, and their tokenizer, which has a padding token.

    The tokenizer writes small letters if `sentence_bert_config.json` says so.

    Args:
        with_weights: False: the backbones are on torch's meta device.
        native: the caller says how the model's attention differs from that of its class in transformers, so that code
            which the model names is not missed.
        options: options of `AutoModel.from_pretrained`.

    Raises:
        InputError: no such model, missing or damaged weights, or a tokenizer that is slow or another model's.
    """
    setting = f"model={model}"
    own = read_json(model, OWN_CONFIG)
    native = native or bool(own)  # `checkpoint_writer.write` wrote it
    if own.get("head") == "score":
        remedy = "evaluate it with kind=classifier, or give an encoder"
        raise InputError.of("model", model, "is a reranker without embeddings", remedy)
    remedy = "set bidirectional=true or false, as its model card says, to load the class of transformers instead, or "
    configs = [pretrained.config(model, setting, tower, native=native, remedy=remedy) for tower in towers]
    tokenizer = pretrained.tokenizer(model, setting, towers[0], native=native, remedy=remedy)
    remedy = "set kind=seq2seq for a reranker, or serve an embedder behind /v1/embeddings and set kind=api"
    for config in configs:
        pretrained.require_one_backbone(config, model, remedy)
    options |= {"with_weights": with_weights}
    backbones = [
        pretrained.weights("AutoModel", model, setting, subfolder=tower, config=config, **options)
        for tower, config in zip(towers, configs, strict=True)
    ]
    for backbone in backbones:
        pretrained.require_embedded(tokenizer, backbone, setting)
    if read_json(model, join(towers[0], "sentence_bert_config.json")).get("do_lower_case"):
        now = tokenizer.backend_tokenizer.normalizer
        rest = [*cast(Any, now)] if isinstance(now, normalizers.Sequence) else [now] * (now is not None)
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rest])
    return backbones, tokenizer


def _towers(model: str, revision: str | None = None) -> Sequence[str]:
    """Return the folders of the backbones of queries and passages, or the directory itself; InputError for other routes."""
    router = read_json(model, ROUTER_CONFIG, revision)
    if not router:
        listed = read_json(model, "modules.json", revision, list)
        return (next((m.get("path", "") for m in listed if _kind(m["type"]) == "Transformer"), ""),)
    routes = router["structure"]
    kinds = {_kind(router["types"][module]) for route in routes.values() for module in route[:1]}
    if set(routes) != set(ROUTES) or kinds != {"Transformer"}:
        remedy = f"give one whose routes {' and '.join(ROUTES)} start with a Transformer"
        raise InputError.of("model", model, f"a Router over {', '.join(routes)} is not supported", remedy)
    return tuple(routes[route][0] for route in ROUTES)


def _modules(model: str, listed: list[dict[str, str]]) -> dict[str, str]:
    """Return kind -> folder of the modules of a sentence-transformers directory, with those of its routes."""
    folders = {_kind(module["type"]): module.get("path", "") for module in listed}
    if "Router" in folders:
        routed = read_json(model, ROUTER_CONFIG)["types"]
        folders |= {_kind(type): folder for folder, type in routed.items()}
    foreign = sorted(set(folders) - {"Router", "Transformer", "Pooling", "Normalize", "CrossAttention"})
    if foreign:
        raise InputError(f"model={model}: has a {foreign[0]} module, which is not supported; give a model without it")
    return folders


def _kind(type: str) -> str:
    """Return the kind of a module of sentence-transformers; its path if it is the code of someone else."""
    return type.rsplit(".", 1)[-1] if type.startswith(("sentence_transformers.", "infembed_ray.")) else type


def _require_versions(model: str, needed: Any) -> None:
    """Raise InputError unless the packages that a model needs, by its own words, are installed in these versions."""
    for name, given in needed.items() if isinstance(needed, dict) else ():
        specifier = given.get("specifier", "") if isinstance(given, dict) else given
        package = {"pytorch": "torch"}.get(name, name)
        try:
            wanted = SpecifierSet(specifier)
        except InvalidSpecifier:
            continue  # as sentence-transformers does
        has = next((found.version for found in metadata.distributions(name=package)), "none")
        has = platform.python_version() if package == "python" else has
        if has == "none" or not wanted.contains(has, prereleases=True):
            fault = f"requires {package}{specifier} (config_sentence_transformers.json), but {has} is installed"
            raise InputError.of("model", model, fault, f"pip install '{package}{specifier}', or give another model")


def _saved_pooling(model: str, folder: str) -> PoolingMode:
    saved = read_json(model, join(folder, "config.json"))
    if saved.get("include_prompt") is False:
        fault = "leaves prompts out of its pooling, which is not supported"
        raise InputError.of("model", model, fault, "set pooling=mean, last or cls to override it")
    given = saved.get("pooling_mode") or [n for n, on in saved.items() if n.startswith("pooling_mode_") and on is True]
    modes = [given] if isinstance(given, str) else list(given) or ["mean"]
    if len(modes) > 1 or modes[0] not in POOLING_MODES:
        fault = f"pools by {' and '.join(map(str, modes))}"
        raise InputError.of("model", model, fault, "set pooling=mean, last or cls to override it")
    return POOLING_MODES[modes[0]]
