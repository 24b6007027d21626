"""The comparison table: one row a model, differences to the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infembed_ray.evaluation.scoring import Figures
from infembed_ray.evaluation.tasks import NOTATION

_HEADER = ("model", "p-MRR x100", *(f"nDCG@10 {NOTATION[kind]}" for kind in NOTATION), "MAP@1000")


def as_text(models: Mapping[str, Figures]) -> str:
    """The table for a terminal or a log: aligned columns, no colour."""
    lines = [_HEADER, *_rows(models)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    aligned = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    ]
    aligned.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(aligned)


def as_markdown(models: Mapping[str, Figures]) -> str:
    """The table in Markdown."""
    lines = [_HEADER, ["---"] + ["---:"] * (len(_HEADER) - 1), *_rows(models)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _rows(models: Mapping[str, Figures]) -> list[Sequence[str]]:
    baseline = next(iter(models.values()))
    return [
        (
            label,
            _cell(figures.p_mrr, baseline.p_mrr, figures is baseline, scale=100, decimals=1),
            *(
                _cell(figures.ndcg_at_10[kind], baseline.ndcg_at_10[kind], figures is baseline, scale=1, decimals=3)
                for kind in NOTATION
            ),
            _cell(figures.map_at_1000, baseline.map_at_1000, figures is baseline, scale=1, decimals=3),
        )
        for label, figures in models.items()
    ]


def _cell(value: float | None, baseline: float | None, is_baseline: bool, scale: int, decimals: int) -> str:
    if value is None:
        return "n/a"
    text = f"{value * scale:.{decimals}f}"
    if is_baseline or baseline is None:
        return text
    return f"{text} ({(value - baseline) * scale:+.{decimals}f})"
