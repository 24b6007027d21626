"""Model cards with the results of an evaluation, to replace a checkpoint's own `README.md` on the hub.

A card names p-MRR only of tasks with obedience controls, and with all of them beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from infembed_ray.errors import in_one_line
from infembed_ray.evaluation.obedience import AS_GIVEN, BM25, CONSTANT
from infembed_ray.evaluation.paper import formats
from infembed_ray.evaluation.paper.report import Report
from infembed_ray.evaluation.paper.sheets import CONTROLLED, Line, Sheet
from infembed_ray.evaluation.results import Results
from infembed_ray.evaluation.retrievers.runs import file_name
from infembed_ray.modeling import model_card
from infembed_ray.progress import say
from infembed_ray.storage.places import Place, read_text

FOLDER = "model_cards"
"""Folder of an evaluation's cards, one file per model: `LABEL.md`."""
P_MRR = "p-MRR"
_HEADING = "## Evaluation\n"
_ABOUT = (
    "Measured by `infembed evaluate`. p-MRR shows obedience only beside its controls: the same "
    "queries without an instruction, under generic, foreign, exchanged and paraphrased ones, BM25 and a constant scorer."
)


def write(directory: Path, report: Report, checkpoints: Mapping[str, Place]) -> None:
    """Write the cards of our checkpoints, given by the labels of their models; other cards are left alone."""
    for label, place in checkpoints.items():
        card = read_text(place / model_card.FILE)
        if card is None or model_card.TAG not in card:
            continue
        try:
            text = with_results(card, report, label)
        except (ValueError, yaml.YAMLError) as error:
            say(f"evaluate: warning: models.{label}: its {model_card.FILE} gets no results ({in_one_line(error)})")
            continue
        directory.mkdir(exist_ok=True)
        (directory / f"{file_name(label)}.md").write_text(text, encoding="utf-8")


def with_results(card: str, report: Report, label: str) -> str:
    """Return a card with an `Evaluation` section and with the figures where the hub reads them (`model-index`).

    Args:
        card: text of a `README.md`, whose results of training stay.
        report: of one evaluation.
        label: the model in it.
    """
    from huggingface_hub import ModelCard

    made = ModelCard(card)
    data: Any = made.data
    old = [r for r in data.eval_results or () if r.dataset_type == "held-out"]
    data.eval_results = [*old, *_figures(report.collection.results, label)]
    data.model_name = data.model_name or label
    body, _, _ = made.text.partition(_HEADING)
    tables = [f"### {sheet.name}\n\n{formats.as_markdown(sheet)}" for sheet in _sheets(report, label)]
    made.text = "\n\n".join([body.rstrip("\n"), _HEADING.rstrip("\n"), f"{_ABOUT} {report.note}", *tables]) + "\n"
    return str(made)


def _figures(found: Results, label: str) -> Iterator[Any]:
    """Yield the means of every task, p-MRR only with its controls."""
    from huggingface_hub import EvalResult

    obeyed = found.obedience_means
    for task, means in found.figures[label].items():
        controls = obeyed.get(label, {}).get(task, {})
        named = {name: mean for name, mean in means.items() if controls or name != P_MRR}
        named |= {f"{P_MRR}, {c}": figures.get(P_MRR) for c, figures in controls.items() if c != AS_GIVEN}
        for reference in (BM25, CONSTANT) if controls else ():
            named[f"{P_MRR} of {reference}"] = obeyed.get(reference, {}).get(task, {}).get(AS_GIVEN, {}).get(P_MRR)
        for name, mean in named.items():
            if mean is not None:
                kind = re.split("[ ,]", name)[0].lower().replace("-", "_").replace("@", "_at_")
                yield EvalResult("retrieval", task, task, kind, mean, metric_name=name)


def _sheets(report: Report, label: str) -> Iterator[Sheet]:
    """Yield the tables of the evaluation, with the rows that are about the model or its controls."""
    found = report.collection.results
    with_p_mrr = {task for task, asked in found.tasks.items() if P_MRR in {figure.name for figure in asked.figures}}
    shown = with_p_mrr <= found.obedience.get(label, {}).keys()
    for sheet in report.ours:
        kept = [number for number, (_, name) in enumerate(sheet.columns) if shown or P_MRR not in name]
        lines = [line for line in sheet.lines if _is_about(label, line, sheet)]
        if lines and kept:
            numbered = tuple(replace(line, numbers=tuple(line.numbers[n] for n in kept)) for line in lines)
            yield replace(sheet, columns=tuple(sheet.columns[n] for n in kept), lines=numbered)


def _is_about(label: str, line: Line, sheet: Sheet) -> bool:
    """Whether a row is the model's, or that of a reference that is asked as given."""
    if sheet.of != CONTROLLED:
        return line.label == label
    return line.section == label or (line.section in (BM25, CONSTANT) and line.label == AS_GIVEN)
