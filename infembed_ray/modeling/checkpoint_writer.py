"""Writes model directories, which `checkpoint` describes and loads."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from infembed_ray.modeling import pretrained
from infembed_ray.modeling.checkpoint import OWN_CONFIG, POOLING_MODES, ROUTER_CONFIG, ROUTES, SHARED, Description
from infembed_ray.storage import durable

_SHARD = "4GB"
"""Maximum size of a file of weights that are read from elsewhere; one file is in memory at a time."""


class Stored(Protocol):
    """A tensor that is read when it is needed."""

    def contiguous(self) -> Tensor:
        """Read it."""


def write(
    path: Path,
    description: Description,
    backbones: Sequence[Any],
    tokenizer: Any,
    weights: Sequence[Mapping[str, Stored]] | None = None,
) -> None:
    """Write a sentence-transformers directory.

    Args:
        path: directory to write, created if missing.
        description: what to write; `towers` follows from the backbones.
        backbones, tokenizer: one Hugging Face model, or those of queries and passages, and their tokenizer.
        weights: name -> fp32 parameter of each backbone, if the backbones are on the meta device.
    """
    towers = SHARED if len(backbones) == 1 else tuple(f"{route}_0_Transformer" for route in ROUTES)
    longest = max(description.query_length or 0, description.passage_length or 0)
    for number, (tower, backbone) in enumerate(zip(towers, backbones, strict=True)):
        write_backbone(path / tower, backbone, tokenizer, longest, weights[number] if weights else None)
    pooling = _write_modules(path, towers, description)
    durable.replace_json(
        path / pooling / "config.json",
        {
            "word_embedding_dimension": int(backbones[0].config.hidden_size),
            **{key: mode == description.pooling for key, mode in POOLING_MODES.items() if key.startswith("pooling_")},
            "include_prompt": True,
        },
    )
    durable.replace_json(
        path / "config_sentence_transformers.json",
        {
            "prompts": {"query": description.query_prefix, "document": description.passage_prefix},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
            "truncate_dim": description.dimensions,
        },
    )
    own = ("template", "interaction", "query_length", "passage_length", "exclusion_weight")
    durable.replace_json(path / OWN_CONFIG, {name: getattr(description, name) for name in own})


def _write_weights(folder: Path, backbone: Any, weights: Mapping[str, Stored]) -> None:
    """Write configuration and weights as `save_pretrained` does, with one file's weights in memory at a time."""
    state = backbone.state_dict()
    pattern = "model{suffix}.safetensors"
    shards = split_torch_state_dict_into_shards(state, max_shard_size=_SHARD, filename_pattern=pattern)
    for file, names in shards.filename_to_tensors.items():
        tensors = {name: (weights[name] if state[name].is_meta else state[name]).contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        durable.replace_json(folder / "model.safetensors.index.json", index)
    backbone.config.dtype = "float32"
    backbone.config.architectures = [type(backbone).__name__]
    backbone.config.save_pretrained(folder)


def write_backbone(
    folder: Path, model: Any, tokenizer: Any, longest: int, weights: Mapping[str, Stored] | None
) -> None:
    """Write a Hugging Face model, with the tokenizer of its texts of at most `longest` tokens; `weights` as of `write`."""
    pretrained.require_portable(tokenizer, model.config, str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    vars(model.config).pop("auto_map", None)  # the class of transformers was trained, not code of its base model
    if weights is None:
        model.save_pretrained(folder)
    else:
        _write_weights(folder, model, weights)
    tokenizer.init_kwargs.pop("auto_map", None)
    tokenizer.save_pretrained(folder)
    loading: dict[str, Any] = {"max_seq_length": longest, "do_lower_case": False}
    if getattr(model.config, "is_causal", None) is False:
        # Without padding, transformers' SDPA ignores `is_causal` of a decoder's config.
        loading["model_args"] = {"attn_implementation": "eager"}
    durable.replace_json(folder / "sentence_bert_config.json", loading)


def _write_modules(path: Path, towers: Sequence[str], description: Description) -> str:
    """Write the list of modules, and their folders; return the folder of the pooling."""
    if len(towers) == 1:
        pooling = "1_Pooling"
        modules = {"": "Transformer", pooling: "Pooling", "2_Normalize": "Normalize"}
    else:
        pooling = "query_1_Pooling"  # one pooling for both routes
        modules = {"": "Router", "1_Normalize": "Normalize"}
        durable.replace_json(
            path / ROUTER_CONFIG,
            {
                "types": {**dict.fromkeys(towers, _type("Transformer")), pooling: _type("Pooling")},
                "structure": {route: [tower, pooling] for route, tower in zip(ROUTES, towers, strict=True)},
                "parameters": {"default_route": "document", "allow_empty_key": True, "route_mappings": {}},
            },
        )
    if description.interaction == "cross_attention":
        # This makes sentence-transformers refuse the model, instead of loading the backbone alone.
        modules["interaction"] = "CrossAttention"
    numbered = enumerate(modules.items())
    listed = [{"idx": i, "name": str(i), "path": folder, "type": _type(kind)} for i, (folder, kind) in numbered]
    durable.replace_json(path / "modules.json", listed)
    for name in (pooling, *list(modules)[1:]):
        (path / name).mkdir(exist_ok=True)
    return pooling


def _type(kind: str) -> str:
    if kind == "CrossAttention":
        return "infembed_ray.modeling.interaction.CrossAttention"
    return f"sentence_transformers.models.{kind}"
