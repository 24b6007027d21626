"""The limits that records must keep."""

import json

import pytest

from infembed_ray.analysis import gates
from infembed_ray.analysis.analyze import run
from infembed_ray.config.analysis import AnalyzeGates, AnalyzeSettings
from infembed_ray.errors import GateError
from tests.analysis.samples import publish, record

REPORT = {
    "funnel": {"seeds": 10, "kept": 4},
    "verdicts": [
        {"scenario": "positive", "judged": 8, "right": 6},
        {"scenario": "negative_query", "judged": 5, "right": 5},
    ],
    "duplicates": [{"kind": "passage", "distinct": 20, "near": 1}],
    "contaminations": [{"evaluation": "trec", "kind": "query", "texts": 10, "matching": 2}],
    "agreement": {"llm_raters": [{"rater": "new", "kappa": {"value": 0.6}}]},
}


@pytest.mark.parametrize(
    ("setting", "kept", "broken", "line"),
    [
        ("min_kept", 0.4, 0.41, "the share of seeds kept is 0.4, must be at least 0.41"),
        ("min_judged_right", 0.75, 0.8, "the judge's share of right answers, positive, is 0.75, must be at least 0.8"),
        ("max_near_duplicates", 0.05, 0.04, "the share of nearly equal passage texts is 0.05, must be at most 0.04"),
        ("max_contaminated", 0.2, 0.1, "the share of query texts in trec is 0.2, must be at most 0.1"),
        ("min_kappa", 0.6, 0.61, "the mean kappa of new is 0.6, must be at least 0.61"),
    ],
)
def test_a_broken_limit_names_the_setting_the_figure_and_its_value(setting, kept, broken, line):
    assert list(gates.failures(AnalyzeGates(**{setting: kept}), REPORT)) == []
    assert list(gates.failures(AnalyzeGates(**{setting: broken}), REPORT)) == [f"gates.{setting}={broken:g}: {line}"]


def test_a_limit_of_an_unknown_figure_is_broken():
    unknown = REPORT | {"funnel": {"seeds": None, "kept": 4}, "verdicts": [], "contaminations": [], "agreement": None}
    limits = AnalyzeGates(min_kept=0.1, min_judged_right=0.1, max_contaminated=0.5, min_kappa=0.1)
    found = list(gates.failures(limits, unknown))
    assert [line.partition("=")[0] for line in found] == [
        "gates.min_kept",
        "gates.min_judged_right",
        "gates.max_contaminated",
        "gates.min_kappa",
    ]
    assert all("is unknown" in line for line in found)


def test_a_broken_gate_fails_again_when_the_report_is_there_already(tmp_path):
    wanted = AnalyzeSettings(
        records=str(publish(tmp_path / "synthesis")), output=str(tmp_path / "report"), gates={"min_kept": 0.9}
    )
    for _ in range(2):
        with pytest.raises(GateError, match=r"gates\.min_kept=0\.9: the share of seeds kept is 0\.4286, "):
            run(wanted)
    lower = run(wanted.model_copy(update={"gates": AnalyzeGates(min_kept=0.4)}))
    assert not lower.fresh


def test_records_from_elsewhere_pass_without_limits(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(vars(record(name))) + "\n" for name in "ab"))
    run(AnalyzeSettings(records=str(file), output=str(tmp_path / "report")))
