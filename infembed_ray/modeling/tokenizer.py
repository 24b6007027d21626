"""What the encoder asks of a Hugging Face tokenizer beyond token ids."""

from __future__ import annotations

from typing import Any, cast

from tokenizers import processors

from infembed_ray.errors import InputError


def marks_the_end(tokenizer: Any) -> bool:
    """Does it end every text with a special token of its own (EOS, [SEP])?"""
    ids = tokenizer("a")["input_ids"]
    return bool(ids) and ids[-1] in tokenizer.all_special_ids


def add_eos(tokenizer: Any) -> None:
    """Make it end every text with EOS, also a text that is cut; it stays so when it is saved.

    The post-processor does it, which is part of `tokenizer.json`: whoever loads the saved tokenizer gets the same ids.

    Raises:
        InputError: it has no EOS token.
    """
    eos = tokenizer.eos_token
    if eos is None:
        raise InputError(f"append_eos=true: {type(tokenizer).__name__} has no EOS token; set append_eos=false")
    backend = tokenizer.backend_tokenizer
    now = backend.post_processor
    parts: list[Any] = [*cast(Any, now)] if isinstance(now, processors.Sequence) else [now] * (now is not None)
    first = tokenizer.convert_ids_to_tokens(tokenizer("")["input_ids"])  # BOS, where there is one
    with_eos = processors.TemplateProcessing(
        single=[*first, "$A", eos],
        pair=[*first, "$A", "$B", eos],
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in {*first, eos}],
    )
    # Two templates in a sequence do not work: the one that was there gives way, its tokens being in the new one.
    others = [part for part in parts if not isinstance(part, processors.TemplateProcessing)]
    backend.post_processor = processors.Sequence([*others, with_eos])
    if {"add_bos_token", "add_eos_token"} & set(tokenizer.init_kwargs):
        # Tokenizers with these flags build their post-processor anew whenever they are loaded.
        tokenizer.init_kwargs["add_eos_token"] = True


def tokens_before(encoded: Any, row: int, characters: int) -> int:
    """How many tokens lie wholly within the first `characters` of a text; 0 if one lies on that border.

    Special tokens before the first character count.

    Args:
        encoded: what the tokenizer made of some texts.
        row: which of them.
        characters: at least 1.
    """
    first = encoded.char_to_token(row, characters)
    if first is None:  # the space between instruction and query may be no part of any token
        first = encoded.char_to_token(row, characters + 1)
    if first is None or encoded.token_to_chars(row, first).start < characters:
        return 0
    return int(first)
