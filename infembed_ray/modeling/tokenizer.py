"""From texts to token ids: text format, truncation and special tokens. Needs neither torch nor transformers."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

from tokenizers import Encoding, Tokenizer, processors

from infembed_ray.config.training import Template
from infembed_ray.errors import InputError

Side = Literal["query", "passage"]
_TEMPLATES: dict[Template, str] = {
    "instruction_first": "{0} {1}",
    "query_first": "{1} {0}",
    "instruct_query": "Instruct: {0}\nQuery: {1}",
}
"""Template -> text of (instruction, query). The first is the paper's "<Instruction> <Query>" (Eq. 3). Under causal attention
it also lets queries share the encoding of their instruction."""


@dataclass(frozen=True)
class TextFormat:
    """How texts become token sequences. It is part of the checkpoint, so all stages use the same."""

    template: Template = "instruction_first"
    query_prefix: str = ""
    """Text before instruction and query, for example e5's `query: `."""
    passage_prefix: str = ""
    query_length: int = 256
    """Token limit of instruction and query together, with special tokens."""
    passage_length: int = 512
    """Token limit of a passage, with special tokens."""


def render(template: Template, instruction: str | None, query: str) -> str:
    """Return the text of (instruction, query); without an instruction, the query alone."""
    return _TEMPLATES[template].format(instruction, query) if instruction else query


@dataclass(frozen=True, slots=True)
class Tokens:
    """The token ids of one text.

    Attributes:
        ids: token ids with special tokens, without padding.
        side: query or passage; separate encoders embed them differently.
        instruction: number of leading ids that belong to the instruction, which all queries under it share; 0 without an
            instruction, or if the instruction does not come first.
        segments: segment of each token (`token_type_ids`) of a cross-encoder's pair; empty: none.
    """

    ids: list[int]
    side: Side = "passage"
    instruction: int = 0
    segments: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class TextTokenizer:
    """Tokenizes queries and passages. Not thread-safe, because truncation is state of the backend.

    Attributes:
        backend: the fast tokenizer.
        text: template, prefixes and lengths.
        pad_id: token of a text that has none, because pooling needs at least one.
        separate: tokenize instruction and query separately (Interaction II).
        truncation_side: end of a text that is cut: `right` or `left`.
    """

    backend: Tokenizer
    text: TextFormat
    pad_id: int
    separate: bool = False
    truncation_side: str = "right"

    def tokenize_queries(self, queries: Sequence[str], instructions: Sequence[str | None]) -> list[Tokens]:
        """Tokenize (instruction, query) texts, truncated to `query_length`; mark instructions that come first."""
        text = self.text
        if self.separate:
            return self._tokenize_separately(queries, instructions)
        firsts = [len(text.query_prefix + i) if i and text.template == "instruction_first" else 0 for i in instructions]
        texts = [text.query_prefix + render(text.template, i, q) for q, i in zip(queries, instructions, strict=True)]
        return self.tokenize(texts, "query", text.query_length, firsts)

    def _tokenize_separately(self, queries: Sequence[str], instructions: Sequence[str | None]) -> list[Tokens]:
        """Tokenize instruction and query separately, each truncated to `query_length`, and join them."""
        texts = list(dict.fromkeys([*queries, *filter(None, instructions)]))
        tokens = self.tokenize([self.text.query_prefix + t for t in texts], "query", self.text.query_length)
        ids: dict[str | None, list[int]] = {None: []}
        ids |= {text: t.ids for text, t in zip(texts, tokens, strict=True)}
        pairs = zip(queries, instructions, strict=True)
        return [Tokens(ids[i or None] + ids[q], "query", len(ids[i or None])) for q, i in pairs]

    def tokenize_passages(self, passages: Sequence[str]) -> list[Tokens]:
        """Tokenize passages, truncated to `passage_length`."""
        return self.tokenize([self.text.passage_prefix + p for p in passages], "passage", self.text.passage_length)

    def tokenize(self, texts: Sequence[str], side: Side, length: int, firsts: Sequence[int] = ()) -> list[Tokens]:
        """Tokenize texts as they are, truncated to `length`; the first `firsts[row]` characters are the instruction."""
        cut: dict[str, Any] = {"max_length": length, "stride": 0, "strategy": "longest_first"}
        cut["direction"] = self.truncation_side
        if self.backend.truncation != cut:
            self.backend.enable_truncation(**cut)
        if self.backend.padding is not None:
            self.backend.no_padding()
        with only_texts(texts):
            # The fast function does not say which characters a token has.
            encoded = (self.backend.encode_batch if any(firsts) else self.backend.encode_batch_fast)(list(texts))
        return [
            Tokens(one.ids or [self.pad_id], side, tokens_before(one, firsts[row]) if firsts and firsts[row] else 0)
            for row, one in enumerate(encoded)
        ]


@contextmanager
def only_texts(texts: Iterable[str]) -> Iterator[None]:
    """Raise InputError if a tokenizer refuses texts: Python's may have lone surrogates, which UTF-8 cannot hold."""
    try:
        yield
    except TypeError as error:
        bad = next((t for t in texts if not isinstance(t, str) or re.search("[\ud800-\udfff]", t)), "")
        fault = f"{ascii(bad)[:80]} is no text of Unicode"
        raise InputError.of("texts", None, fault, "remove lone surrogates, or give str") from error


def end_texts(tokenizer: Any, append_eos: bool | None, last_is_pooled: bool) -> None:
    """Make a tokenizer end every text with EOS, also truncated ones and after it is saved, unless a special token does.

    Args:
        append_eos: whether to do so; None: if its config has `add_eos_token`, or if it has an EOS and `last_is_pooled`.

    Raises:
        InputError: it has no EOS.
    """
    eos, ids = tokenizer.eos_token, tokenizer("a")["input_ids"]
    if append_eos is None:
        append_eos = (last_is_pooled and eos is not None) or bool(tokenizer.init_kwargs.get("add_eos_token"))
    if not append_eos or (ids and ids[-1] in tokenizer.all_special_ids):
        return
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


def tokens_before(encoded: Encoding, characters: int) -> int:
    """Return how many tokens lie wholly within the first characters, at least one, of a tokenized text.

    0 if a token crosses that border. Special tokens before the first character count.
    """
    first = encoded.char_to_token(characters)
    if first is None:  # the space between instruction and query may belong to no token
        first = encoded.char_to_token(characters + 1)
    if first is None:
        return 0
    characters_of_it = encoded.token_to_chars(first)
    return first if characters_of_it is not None and characters_of_it[0] >= characters else 0
