"""How texts are written before they are tokenised: template (paper, Eq. 3), prefixes, lengths.

All of it travels inside the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from infembed_ray.config import Template


@dataclass(frozen=True)
class TextFormat:
    """How raw texts become token sequences. Part of the checkpoint, so that no two stages can disagree."""

    template: Template = "instruction_first"
    query_prefix: str = ""
    """Written before instruction and query, for example e5's `query: `."""
    passage_prefix: str = ""
    query_length: int = 256
    """Most tokens of instruction + query, special tokens included."""
    passage_length: int = 512
    """Most tokens of a passage, special tokens included."""


def render(template: Template, instruction: str | None, query: str) -> str:
    """The text of (instruction, query); without an instruction, the query alone.

    `instruction_first` is the paper's "<Instruction> <Query>". It is also what lets several queries share one
    encoded instruction under causal attention.
    """
    if not instruction:
        return query
    if template == "instruction_first":
        return f"{instruction} {query}"
    if template == "query_first":
        return f"{query} {instruction}"
    return f"Instruct: {instruction}\nQuery: {query}"
