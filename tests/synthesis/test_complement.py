"""Dual views of kept records (`complement=true`)."""

import pytest

from infembed_ray.llm.chat import RowFailure
from infembed_ray.records import tables
from infembed_ray.synthesis.pipeline import CHEAP_JUDGE, STEPS
from tests.synthesis.scripted_model import JUDGING, SETTINGS, WRITING, Model, outcome
from tests.synthesis.test_pipeline import fits

COMPLEMENT = SETTINGS.model_copy(update={"complement": True})


def test_a_complement_does_not_change_its_record() -> None:
    model = Model()
    plain, got = outcome(Model()), outcome(model, COMPLEMENT)
    assert plain.complement is None
    assert got.complement is not None
    row = fits(got.complement, tables.COMPLEMENT)
    assert row["fault"] is None
    names = {"query": "query_positive", "positives": "hard_negative_document_1", "negatives": "document_positive"}
    assert [row[name] for name in names] == [got.row[name] for name in names.values()]
    assert {**got.row, "provenance": None} == {**plain.row, "provenance": None}
    assert list(model.asked) == [*WRITING, *JUDGING, "instruction_complement", "judge_complement"]
    assert list(model.asked) == [step for step in STEPS if not step.startswith(CHEAP_JUDGE)]
    assert f"Instruction: {row['instruction']}\n" in model.prompt("judge_complement")
    assert got.paid.calls == 10 == len(got.row["provenance"]["request_hashes"])
    assert got.row["provenance"]["judge"] == "o4-mini-2026-01-01"


@pytest.mark.parametrize(
    ("step", "answer", "fault"),
    [
        ("instruction_complement", "Instruction: Nothing", "fewer than 3 words"),
        ("instruction_complement", RowFailure("HTTP 500; tried 7 times"), "tried 7 times"),
        ("judge_complement", "Answer: none", "the judge picked none"),
        ("judge_complement", "The third.", "malformed answer"),
        ("instruction_complement", KeyError("surprise"), "KeyError: 'surprise'"),
    ],
)
def test_a_failed_complement_does_not_affect_its_record(step: str, answer: str | Exception, fault: str) -> None:
    got = outcome(Model(**{step: answer}), COMPLEMENT)
    assert got.kind == "kept"
    assert got.complement is not None
    row = fits(got.complement, tables.COMPLEMENT)
    assert fault in row["fault"]
    assert (row["instruction"] is None) == isinstance(answer, Exception)


def test_no_complement_is_asked_for_a_row_that_is_not_kept() -> None:
    model = Model(judge_positive="Answer: none")
    assert outcome(model, COMPLEMENT).complement is None
    assert "instruction_complement" not in model.asked
