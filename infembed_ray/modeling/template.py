"""How an instruction and a query become one text (paper, Eq. 3). The template travels inside the checkpoint."""

from __future__ import annotations

from infembed_ray.config import Template


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
