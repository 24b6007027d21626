"""Cards with evaluation results, as the hub reads them: p-MRR only beside its controls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from huggingface_hub import ModelCard

from infembed_ray.evaluation import model_cards
from infembed_ray.evaluation.obedience import AS_GIVEN, BM25, CONDITIONS, CONSTANT
from infembed_ray.evaluation.paper.report import Report, of_evaluation
from infembed_ray.evaluation.results import Results
from tests.evaluation.paper import made

CARD = """---
tags:
- infembed_ray
model-index:
- name: mine
  results:
  - task: {type: retrieval}
    dataset: {type: held-out, name: held-out records}
    metrics:
    - {type: p_mrr, value: 0.25}
---

# A model

## Licence

None.
"""


def report(found: Results) -> Report:
    return of_evaluation("runs/x", found)


@pytest.fixture(scope="module")
def found() -> Results:
    evaluated = made.evaluation(made.records(), {"base": ("x", 0), "trained": ("y", 0.3)})
    conditions = {
        label: {"records": {c: {"p-MRR": dict.fromkeys(made.QUERIES, 0.01 * n)} for n, c in enumerate(asked)}}
        for label, asked in {"base": CONDITIONS, "trained": CONDITIONS, BM25: [AS_GIVEN], CONSTANT: [AS_GIVEN]}.items()
    }
    return replace(evaluated, obedience=conditions)


def test_a_card_has_every_figure_and_beside_p_mrr_all_of_its_controls(found: Results) -> None:
    card = ModelCard(model_cards.with_results(CARD, report(found), "trained"))

    named = {
        result.metric_name: result.metric_value for result in card.data.eval_results if result.dataset_type == "records"
    }
    for figure, values in found.scores["trained"]["records"].items():
        assert named[figure] == pytest.approx(fmean(values.values()))
    controls = [
        *(f"p-MRR, {condition}" for condition in CONDITIONS if condition != AS_GIVEN),
        "p-MRR of BM25",
        "p-MRR of constant",
    ]
    assert [named[control] for control in controls] == [*(0.01 * n for n in range(1, len(CONDITIONS))), 0.0, 0.0]
    section = card.text.split("## Evaluation")[1].split("### Obedience, records")[1]
    rows = [line.split(" | ")[0].strip("| ") for line in section.splitlines() if line.startswith("| ")]
    assert rows[2:] == ["*trained*", *CONDITIONS, f"*{BM25}*", AS_GIVEN, f"*{CONSTANT}*", AS_GIVEN]
    assert "| base" not in card.text
    assert "Differences are to 'base'" in card.text


def test_a_card_without_controls_has_no_p_mrr(found: Results) -> None:
    card = ModelCard(model_cards.with_results(CARD, report(replace(found, obedience={})), "trained"))

    assert not [r for r in card.data.eval_results if r.dataset_type == "records" and "p_mrr" in r.metric_type]
    assert "p-MRR x100" not in card.text
    assert "MAP@1000" in card.text


def test_a_card_keeps_its_text_and_the_results_of_training_and_is_replaced_by_another_evaluation(
    found: Results,
) -> None:
    once = model_cards.with_results(CARD, report(found), "trained")
    card = ModelCard(once)

    assert card.text.split("## Evaluation")[0].split() == ["#", "A", "model", "##", "Licence", "None."]
    assert card.data.eval_results[0].metric_value == 0.25
    assert card.data.model_name == "mine"
    assert ModelCard(model_cards.with_results(once, report(found), "trained")).text == card.text
    assert len(ModelCard(model_cards.with_results(once, report(found), "trained")).data.eval_results) == len(
        card.data.eval_results
    )


def test_only_our_checkpoints_get_a_card(found: Results, tmp_path: Path) -> None:
    for name, text in (("ours", CARD), ("theirs", CARD.replace("infembed_ray", "other"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "README.md").write_text(text, encoding="utf-8")
    (tmp_path / "none").mkdir()

    model_cards.write(tmp_path / "cards", report(found), {"trained": tmp_path / "ours", "base": tmp_path / "theirs"})
    model_cards.write(tmp_path / "nothing", report(found), {"base": tmp_path / "none"})

    assert [file.name for file in (tmp_path / "cards").iterdir()] == ["trained.md"]
    assert not (tmp_path / "nothing").exists()


def test_a_damaged_card_is_left_out_with_a_warning(
    found: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("---\ntags: [infembed_ray\n---\n\n# Ours\n", encoding="utf-8")

    model_cards.write(tmp_path / "cards", report(found), {"trained": tmp_path})

    assert "models.trained: its README.md gets no results" in "".join(capsys.readouterr())
    assert not (tmp_path / "cards").exists()
