"""Text format: template (paper, Eq. 3), prefixes and token limits. It is saved in the checkpoint."""

from dataclasses import dataclass

from infembed_ray.config.training import Template


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
    """Return the text of (instruction, query); without an instruction, the query alone.

    `instruction_first` is the paper's "<Instruction> <Query>". Under causal attention it also lets queries share the
    encoding of their instruction.
    """
    if not instruction:
        return query
    if template == "instruction_first":
        return f"{instruction} {query}"
    if template == "query_first":
        return f"{query} {instruction}"
    return f"Instruct: {instruction}\nQuery: {query}"
