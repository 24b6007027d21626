"""What a caller changes of a model's description of itself, and the defaults of what neither says."""

from typing import Any, TypedDict

from infembed_ray.config.training import Interaction, Pooling, PoolingMode, Template
from infembed_ray.errors import InputError
from infembed_ray.modeling.checkpoint import Description
from infembed_ray.modeling.template import TextFormat
from infembed_ray.modeling.tokenizer import add_eos, marks_the_end


class Overrides(TypedDict, total=False):
    """What replaces the description that comes with a model: the settings of `infembed train` by these names, and
    `dimensions`, the number of leading components that make the embedding (Matryoshka). A missing key and None keep the
    model's own value.

    Attributes:
        pooling: default mean for encoders and bidirectional decoders, last for decoders.
        query_length, passage_length: token limits; default as of `TextFormat`, or the model's `max_seq_length` if that
            is less. Never more than the backbone has positions.
        append_eos: default only if the last token is pooled, the tokenizer has an EOS and does not end texts with a
            special token yet, and the model is not made for embedding.
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


def end_texts(tokenizer: Any, append_eos: bool | None, mode: PoolingMode, saved: Description) -> None:
    """Make the tokenizer end texts with EOS if that is asked for, or if the default is to do so."""
    if append_eos is None:
        append_eos = mode == "last" and tokenizer.eos_token is not None and not saved.finished
    if append_eos and not marks_the_end(tokenizer):
        add_eos(tokenizer)


def checked_dimensions(dimensions: int | None, backbone: Any, path: str) -> int | None:
    """Return `dimensions`; raise InputError if the backbone has fewer."""
    hidden = int(backbone.config.hidden_size)
    if dimensions is not None and not 0 < dimensions <= hidden:
        raise InputError(f"dimensions={dimensions}: embeddings of {path} have {hidden}; set 1 to {hidden}")
    return dimensions


def text_format(saved: Description, overrides: Overrides, backbone: Any, tokenizer: Any) -> TextFormat:
    """Combine overrides, the model's own description, and the defaults, in this order."""
    default = TextFormat()
    positions = min(getattr(backbone.config, "max_position_embeddings", 1 << 30), tokenizer.model_max_length)
    limit = saved.max_length or positions
    query_length = overrides.get("query_length") or saved.query_length or min(default.query_length, limit)
    passage_length = overrides.get("passage_length") or saved.passage_length or min(default.passage_length, limit)
    return TextFormat(
        template=overrides.get("template") or saved.template or default.template,
        query_prefix=_first(overrides.get("query_prefix"), saved.query_prefix, default.query_prefix),
        passage_prefix=_first(overrides.get("passage_prefix"), saved.passage_prefix, default.passage_prefix),
        query_length=min(query_length, positions),
        passage_length=min(passage_length, positions),
    )


def _first(*values: str | None) -> str:
    """Return the first value that is not None; an empty prefix is a prefix."""
    return next(value for value in values if value is not None)
