"""End-of-text tokens and token offsets of Hugging Face tokenizers."""

from __future__ import annotations

from typing import Any, cast

from tokenizers import processors

from infembed_ray.errors import InputError


def marks_the_end(tokenizer: Any) -> bool:
    """Return whether a tokenizer ends every text with a special token (EOS, [SEP])."""
    ids = tokenizer("a")["input_ids"]
    return bool(ids) and ids[-1] in tokenizer.all_special_ids


def add_eos(tokenizer: Any) -> None:
    """Make a tokenizer end every text with EOS, also truncated ones, and also after it is saved and loaded.

    The post-processor adds the token, and it is part of `tokenizer.json`.

    Raises:
        InputError: the tokenizer has no EOS token.
    """
    eos = tokenizer.eos_token
    if eos is None:
        raise InputError(f"append_eos=true: {type(tokenizer).__name__} has no EOS token; set append_eos=false")
    backend = tokenizer.backend_tokenizer
    now = backend.post_processor
    parts: list[Any] = [*cast(Any, now)] if isinstance(now, processors.Sequence) else [now] * (now is not None)
    first = tokenizer.convert_ids_to_tokens(tokenizer("")["input_ids"])  # BOS, if any
    with_eos = processors.TemplateProcessing(
        single=[*first, "$A", eos],
        pair=[*first, "$A", "$B", eos],
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in {*first, eos}],
    )
    # A sequence can have one template only; the new one has the tokens of the old one.
    others = [part for part in parts if not isinstance(part, processors.TemplateProcessing)]
    backend.post_processor = processors.Sequence([*others, with_eos])
    if {"add_bos_token", "add_eos_token"} & set(tokenizer.init_kwargs):
        # Tokenizers with these flags rebuild their post-processor when they are loaded.
        tokenizer.init_kwargs["add_eos_token"] = True


def tokens_before(encoded: Any, row: int, characters: int) -> int:
    """Return how many tokens lie wholly within the first `characters` of a text; 0 if a token crosses that border.

    Special tokens before the first character count.

    Args:
        encoded: output of the tokenizer.
        row: index of the text.
        characters: number of characters, at least 1.
    """
    first = encoded.char_to_token(row, characters)
    if first is None:  # the space between instruction and query may belong to no token
        first = encoded.char_to_token(row, characters + 1)
    if first is None or encoded.token_to_chars(row, first).start < characters:
        return 0
    return int(first)
