"""Tables as text, Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import asdict, fields
from itertools import groupby

from infembed_ray.evaluation.paper.sheets import Line, Number, Sheet
from infembed_ray.evaluation.tables import MARK, WIDTH

_NUMBER = [field.name for field in fields(Number)]


def as_markdown(sheet: Sheet) -> str:
    """Format a table, ours in bold beside the paper's, with remarks on errors in the paper's print."""
    above = [over for over, _ in sheet.columns]
    header = [sheet.of, *(" ".join(filter(None, (over, name))) for over, name in sheet.columns)]
    rows = [header, ["---"] + ["---:"] * len(above)]
    for section, lines in groupby(sheet.lines, key=lambda line: line.section):
        if section:
            rows.append([f"*{section}*"] + [""] * len(above))
        for line in lines:
            label = (f"**{line.label}**" if line.ours and sheet.mixed else line.label) + _seeds(line)
            rows.append([label, *(_markdown(number) for number in line.numbers)])
    table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    remarks = [f"- † {remark}" for remark in sheet.remarks]
    return "\n".join([*table, *(["", *remarks] if remarks else [])])


def as_text(sheet: Sheet) -> str:
    """Format means and differences for a terminal or a log, in tables of at most `WIDTH` characters per line."""
    header = [sheet.of, *(" ".join(filter(None, column)) for column in sheet.columns)]
    rows = [header, *([line.label, *map(_plain, line.numbers)] for line in sheet.lines)]
    first, *others = [[cell.ljust(max(map(len, column))) for cell in column] for column in zip(*rows, strict=True)]
    parts = [[first]]
    for column in others:  # each part begins with the labels
        if len(parts[-1]) > 1 and sum(len(c[0]) + 2 for c in parts[-1]) + len(column[0]) > WIDTH:
            parts.append([first])
        parts[-1].append(column)
    blocks = []
    for part in parts:
        lines = ["  ".join(row).rstrip() for row in zip(*part, strict=True)]
        rule = "  ".join("-" * len(column[0]) for column in part)
        blocks.append("\n".join([sheet.name, lines[0], rule, *lines[1:]]))
    return "\n\n".join(blocks)


def as_csv(sheets: Iterable[Sheet]) -> str:
    """Format all tables as one, with one line per number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["table", "section", "row", "source", "seeds", "column", *_NUMBER])
    for sheet in sheets:
        for line in sheet.lines:
            source = "ours" if line.ours else "paper"
            for number, column in zip(line.numbers, sheet.columns, strict=True):
                if number is not None:
                    place = (sheet.name, line.section, line.label, source, line.seeds if line.ours else "")
                    values = asdict(number) | {
                        "significant": None if number.p is None else str(number.significant).lower()
                    }
                    writer.writerow([*place, " ".join(filter(None, column)), *values.values()])
    return text.getvalue()


def as_latex(sheets: Iterable[Sheet], note: str) -> str:
    """Format all tables for `\\input` (packages booktabs and graphicx); ours in bold beside the paper's, without intervals."""
    parts = [f"% {note}", *(_latex(sheet) for sheet in sheets)]
    return "\n\n".join(parts) + "\n"


def _latex(sheet: Sheet) -> str:
    wide = len(sheet.columns)
    lines = []
    if any(over for over, _ in sheet.columns):
        spans = [(over, len(list(same))) for over, same in groupby(sheet.columns, key=lambda column: column[0])]
        lines.append(
            " & ".join(["", *(f"\\multicolumn{{{n}}}{{c}}{{{_escaped(over)}}}" for over, n in spans)]) + " \\\\"
        )
    lines.append(" & ".join([sheet.of, *(_escaped(name) for _, name in sheet.columns)]) + " \\\\")
    lines.append("\\midrule")
    for section, of_section in groupby(sheet.lines, key=lambda line: line.section):
        if section:
            lines.append(f"\\multicolumn{{{wide + 1}}}{{l}}{{\\textit{{{_escaped(section)}}}}} \\\\")
        for line in of_section:
            bold = line.ours and sheet.mixed
            # A row that begins with a bracket or a star would be an argument of the preceding \\.
            label = f"\\textbf{{{_escaped(line.label)}}}" if bold else "{}" + _escaped(line.label)
            lines.append(" & ".join([label, *(_latex_number(n, bold) for n in line.numbers)]) + " \\\\")
    remarks = [f"\\par\\footnotesize $\\dagger$ {_escaped(remark)}" for remark in sheet.remarks]
    caption = ": ".join(filter(None, (sheet.name, sheet.title)))
    return "\n".join(
        [
            "\\begin{table}",
            "\\centering",
            f"\\caption{{{_escaped(caption)}}}",
            f"\\resizebox{{\\linewidth}}{{!}}{{\\begin{{tabular}}{{l{'r' * wide}}}",
            "\\toprule",
            *lines,
            "\\bottomrule",
            "\\end{tabular}}",
            *remarks,
            "\\end{table}",
        ]
    )


def _latex_number(number: Number | None, bold: bool) -> str:
    if number is None:
        return "--"
    value = f"\\textbf{{{number.value}}}" if bold else number.value
    marks = ("\\dagger" if number.remark else "") + ("*" if number.significant else "")
    return f"{value}$^{{{marks}}}$" if marks else value


_SPECIAL = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "$<$", ">": "$>$"}
)


def _escaped(text: str) -> str:
    return text.translate(_SPECIAL)


def _markdown(number: Number | None) -> str:
    if number is None:
        return "—"
    parts = [number.value + ("†" if number.remark else "")]
    if number.low is not None:
        parts.append(f"[{number.low}, {number.high}]")
    if number.stdev_over_seeds is not None:
        parts.append(f"± {number.stdev_over_seeds}")
    if number.difference is not None:
        parts.append(number.difference + ("\\*" if number.significant else ""))
    return " ".join(parts)


def _plain(number: Number | None) -> str:
    if number is None:
        return "n/a"
    return " ".join(filter(None, (number.value, number.difference))) + (MARK if number.significant else "")


def _seeds(line: Line) -> str:
    return f" ({line.seeds} seeds)" if line.seeds > 1 else ""
