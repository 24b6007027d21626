"""Loads what others trained: configurations, tokenizers, models and adapters of transformers and peft.

No other module calls `from_pretrained` of these libraries. transformers asks on the terminal whether to run
the code of a model, initializes missing weights at random, and only warns; here both are errors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from tokenizers import Tokenizer

from infembed_ray.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

_LISTED = 3
"""Maximum number of weights that a message names."""
_PLAIN = (
    "cannot be loaded from a directory or from the hub",
    "check the spelling, the tokenizer's files and the network",
)


def unloadable(setting: str, error: Exception, problem: str = _PLAIN[0], remedy: str = _PLAIN[1]) -> InputError:
    """Return the InputError for an exception while a model was loaded; `problem` and `remedy` if not for remote code."""
    said = " ".join(str(error).split())
    if "trust_remote_code" in said:
        return remote_code(setting)
    return InputError(f"{setting}: {problem} ({said[:200]}); {remedy}")


def remote_code(setting: str, what: str = "trust_remote_code", remedy: str = "") -> InputError:
    """Return the InputError for a model that names code of its own, by `what`; `remedy` is a further way out."""
    ways = "serve it behind an OpenAI-compatible /v1/embeddings and evaluate that, or convert it to a class of transformers"
    return InputError.of(setting, None, f"needs remote code ({what}), which infembed never runs", remedy + ways)


@contextmanager
def _loading(setting: str, *problem_and_remedy: str) -> Iterator[None]:
    """Turn the errors of the libraries into InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # tokenizers raises no narrower class, and transformers any of Python's
        raise unloadable(setting, error, *problem_and_remedy) from error


def config(
    model: str, setting: str, subfolder: str = "", revision: str | None = None, native: bool = False, remedy: str = ""
) -> Any:
    """Load the configuration of a backbone.

    Args:
        model, subfolder, revision: directory or hub name, folder of the backbone in it, commit of a hub's model.
        setting: name and value of the setting, for messages.
        native: accept a model that names code of its own, if transformers has a class for its type.
        remedy: how the user accepts it.

    Raises:
        InputError: there is none, it needs remote code, or its weights are not those of a whole model in full precision.
    """
    from transformers import AutoConfig

    require_no_adapters(model, setting, subfolder, revision)
    with _loading(setting):
        loaded = AutoConfig.from_pretrained(model, subfolder=subfolder, revision=revision, trust_remote_code=False)
    if not native and (own := getattr(loaded, "auto_map", None)):
        raise remote_code(setting, f"auto_map has {', '.join(own)}", remedy)
    if quantized := getattr(loaded, "quantization_config", None):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else type(quantized).__name__
        raise InputError(f"{setting}: its weights are quantized ({method}); give the model in full precision")
    # The kernels are a choice of this machine; a name like org/kernel would be code from the hub.
    loaded._attn_implementation = None
    return loaded


def require_no_adapters(model: str, setting: str, subfolder: str = "", revision: str | None = None) -> None:
    """Raise InputError if a directory has adapters: transformers would put them over the weights of another one."""
    saved = read_json(model, join(subfolder, "adapter_config.json"), revision)
    if saved:
        base = saved.get("base_model_name_or_path")
        fault = f"has adapters (adapter_config.json) of {base}, and a model is read from its own files alone"
        remedy = "give the base and set `adapter` of evaluate, or merge them (peft's merge_and_unload)"
        raise InputError.of(setting, None, fault, remedy)


def require_one_backbone(config: Any, model: str, remedy: str) -> None:
    """Raise InputError for an encoder-decoder, and for what reads more than texts."""
    decodes = config.is_encoder_decoder or getattr(type(config), "is_encoder_decoder", False)
    if decodes or not hasattr(config, "hidden_size"):
        kind = "an encoder-decoder" if decodes else f"not a text model ({config.model_type})"
        raise InputError.of("model", model, f"is {kind}, and one backbone of texts is needed", remedy)


def tokenizer(
    model: str, setting: str, subfolder: str = "", revision: str | None = None, native: bool = False, remedy: str = ""
) -> Any:
    """Load a fast tokenizer that has a padding token; arguments and errors as of `config`.

    It gives the ids of `tokenizer.json`: transformers builds tokenizers of its classes from parts of that file only. It also
    drops `add_eos_token` of `tokenizer_config.json`, which `init_kwargs` keep here.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    options: dict[str, Any] = {"subfolder": subfolder, "revision": revision, "trust_remote_code": False}
    file = cached(model, join(subfolder, "tokenizer.json"), revision)
    loaded: Any = None
    with _loading(setting):
        saved = Tokenizer.from_file(file) if file else None
        try:
            loaded = AutoTokenizer.from_pretrained(model, **options)
        except Exception as error:
            if saved is None or "trust_remote_code" in str(error):
                raise
        if saved and not (loaded and loaded.is_fast and _same_ids(loaded, saved)):
            loaded = PreTrainedTokenizerFast.from_pretrained(model, **options)
            loaded.rebuilt = True
            if not _same_ids(loaded, saved):
                raise ValueError("transformers changes the tokens of its tokenizer.json")
    if not native and "auto_map" in loaded.init_kwargs:
        raise remote_code(setting, "auto_map of its tokenizer_config.json", remedy)
    if not loaded.is_fast:
        raise InputError(f"{setting}: its tokenizer is not a fast one; convert it to a tokenizer.json")
    if loaded.pad_token is None and loaded.eos_token is None:
        remedy = "name one in tokenizer_config.json (pad_token)"
        raise InputError.of(setting, None, "its tokenizer has no padding token", remedy)
    loaded.pad_token = loaded.pad_token or loaded.eos_token
    if read_json(model, join(subfolder, "tokenizer_config.json"), revision).get("add_eos_token"):
        loaded.init_kwargs["add_eos_token"] = True
    return loaded


_PROBE = "Ein Café, naïve ﬁn İ ß: 3.14 e-mail  two\tspaces\n日本語 한국어 🙂 don't x_y"


def _same_ids(loaded: Any, saved: Tokenizer) -> bool:
    """Return whether a loaded tokenizer gives the ids of its file for probes: a text, and words of the vocabulary."""
    words = sorted(saved.get_vocab(with_added_tokens=False))
    sample = " ".join(words[:: len(words) // 512 + 1])
    for backend in (loaded.backend_tokenizer, saved):
        backend.no_truncation()
        backend.no_padding()
    texts = (_PROBE, f" {_PROBE.upper()} ", sample, sample.swapcase(), "a")
    return all(loaded.backend_tokenizer.encode(text).ids == saved.encode(text).ids for text in texts)


def require_portable(tokenizer: Any, config: Any, model: str) -> None:
    """Raise InputError if transformers would read the tokenizer of a trained copy by a class that gives other tokens."""
    from transformers.models.auto import tokenization_auto as auto

    overruled = getattr(auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", ())
    if getattr(tokenizer, "rebuilt", False) and config.model_type in overruled:
        fault = f"transformers reads copies by its tokenizer class for {config.model_type}, which gives other tokens"
        raise InputError.of("model", model, fault, "train another backbone, or give it the tokenizer of its family")


def require_embedded(tokenizer: Any, model: Any, setting: str) -> None:
    """Raise InputError if a tokenizer has tokens for which a model has no embedding."""
    embedded = model.get_input_embeddings().num_embeddings
    if beyond := sorted(token for token, id in tokenizer.get_vocab().items() if id >= embedded):
        counts = f"its tokenizer has {len(tokenizer)} tokens but the model embeds {embedded}"
        causes = f"it is another model's, or {_listed(beyond)} were added without resize_token_embeddings"
        remedy = "give the tokenizer that the model was trained with"
        raise InputError.of(setting, None, f"{counts}: {causes}", remedy)


def weights(
    kind: str, model: str, setting: str, new_head: bool = False, with_weights: bool = True, **options: Any
) -> Any:
    """Load a model with its weights.

    Args:
        kind: auto class of transformers, such as `AutoModel`.
        model, setting: as of `config`.
        new_head: accept that the layers over the backbone have no weights; they are then random.
        with_weights: False: read none, and build the model by `config` and `dtype` on torch's meta device.
        options: options of `from_pretrained`.

    Raises:
        InputError: weights are missing, damaged, of another shape, or not finite.
    """
    import torch
    import transformers

    made = getattr(transformers, kind)
    if not with_weights:
        with torch.device("meta"):
            return made.from_config(options["config"], dtype=options["dtype"], trust_remote_code=False)
    # Shapes that differ are among the findings then; otherwise they are an error with a table.
    checked: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True, "trust_remote_code": False}
    remedy = "give a directory with config.json, tokenizer and safetensors, or a reachable hub name"
    with _loading(setting, "cannot be loaded", remedy):
        loaded, info = made.from_pretrained(model, **options, **checked)
    # Embeddings do not use the layer that BERT's family has over [CLS], and a new head is trained with it.
    pooled, required = kind != "AutoModel" and not new_head, f"{loaded.base_model_prefix}." if new_head else ""
    missing = {name for name in info["missing_keys"] if pooled or "pooler" not in name.split(".")}
    missing = {name for name in missing if name.startswith(required)}
    shapes = [f"{name} {tuple(file)} instead of {tuple(needed)}" for name, file, needed in info["mismatched_keys"]]
    for problem, names in (("has no weights for", missing), ("has weights of another shape:", shapes)):
        if names:
            fault = f"{problem} {_listed(sorted(names))}, which would be random"
            remedy = "give the whole checkpoint, or a model that was trained as such a one"
            raise InputError.of(setting, None, fault, remedy)
    quantized = "quantization_config" in options  # 4 bits are finite, whatever the weights were
    files = weight_files(model, options.get("subfolder", "")) if quantized else ()
    require_finite(setting, _stored(files) if quantized else loaded.named_parameters())
    return loaded


def require_finite(setting: str, named: Iterable[tuple[str, Tensor]]) -> None:
    """Check that parameters are finite, as those on the meta device are; InputError otherwise."""
    if faults := [name for name, value in named if not is_finite(value)]:
        raise not_finite(setting, faults)


def not_finite(setting: str, names: Sequence[str]) -> InputError:
    """Return the InputError for weights of these names that are not finite."""
    fault = f"weights are infinite or NaN: {_listed(names)}; the training diverged or the files are damaged"
    return InputError.of(setting, None, fault, "give another checkpoint, or train again with a lower learning_rate")


def is_finite(value: Tensor) -> bool:
    """Return whether all values of a tensor are finite; integers, empty tensors and those on the meta device are."""
    import torch

    if value.is_meta or not value.numel() or not value.is_floating_point():
        return True
    wide = value.detach() if value.dtype.itemsize > 1 else value.detach().float()
    return bool(torch.isfinite(torch.stack(wide.aminmax())).all())  # without a mask as large as the tensor


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def with_adapters(model: Any, path: str) -> Any:
    """Merge saved LoRA adapters into a model's weights.

    Raises:
        InputError: the path holds no adapters, or adapters of another model.
    """
    from peft import PeftModel, get_peft_model_state_dict, load_peft_weights

    setting = f"adapter={path}"
    remedy = "give the adapters' directory, with *.safetensors, and the model they were trained over"
    with _loading(setting, "no adapters of this model", remedy):
        adapted = PeftModel.from_pretrained(model, path)
        saved = load_peft_weights(path, device="cpu").keys()
        needed = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
        for problem, names in (("no weights for", needed - saved), ("weights of another model:", saved - needed)):
            if names:  # of which peft only warns
                raise ValueError(f"{problem} {_listed(sorted(names))}")
    require_finite(setting, ((n, p) for n, p in adapted.named_parameters() if "lora_" in n))
    return adapted.merge_and_unload()


def join(folder: str, name: str) -> str:
    """Return the name of a file in a folder of a model; the empty folder is the model's own."""
    return f"{folder}/{name}" if folder else name


def weight_files(model: str, folder: str) -> list[Path]:
    """Return the safetensors files of a backbone in a folder of a model, without those that are missing."""
    listed = ["model.safetensors"]
    if cached(model, join(folder, listed[0])) is None:  # transformers prefers it too
        index = read_json(model, join(folder, "model.safetensors.index.json"))
        listed = sorted(set(index["weight_map"].values())) if index else []
    paths = (cached(model, join(folder, file)) for file in listed)
    return [Path(file) for file in paths if file]


def _stored(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors of files one by one."""
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is no mapping)
                yield name, file.get_tensor(name)


def cached(model: str, file: str, revision: str | None = None) -> str | None:
    """Return the path of a file of a directory or of a hub's model; None if the model has no such file."""
    if Path(model).is_dir():
        return local if Path(local := f"{model}/{file}").is_file() else None
    from transformers.utils import cached_file

    return cached_file(
        model,
        file,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def read_json(model: str, name: str, revision: str | None = None, kind: type = dict) -> Any:
    """Read a JSON file of a model, empty if it has none; InputError if it is damaged or not of this kind."""
    file = cached(model, name, revision)
    try:
        value = json.loads(Path(file).read_text(encoding="utf-8")) if file else kind()
        if isinstance(value, kind):
            return value
        error: Any = f"it holds a {type(value).__name__}, not a {kind.__name__}"
    except ValueError as invalid:
        error = invalid
    raise InputError(f"model={model}: {name} is damaged ({error}); copy or download it again")
