import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sklearn.metrics import cohen_kappa_score

from infembed_ray.analysis.analyze import run
from infembed_ray.config.analysis import AnalyzeSettings
from infembed_ray.errors import InputError
from tests.analysis.samples import record
from tests.support.files import write_jsonl
from tests.support.rater_stub import expected_kappa, stub
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

CHOICES = "012345"


def made_rows(items: int) -> list[dict[str, Any]]:
    """Items with five passages, and an annotator."""
    rng = random.Random(0)
    return [
        {
            "item_id": f"i{n}",
            "instruction": f"instruction {n}",
            "query": f"query {n}",
            "passages": {str(place): f"passage {place} of {n}" for place in range(1, 6)},
            "ann": rng.choice(CHOICES),
        }
        for n in range(items)
    ]


def records(tmp_path: Path) -> str:
    """Records to analyze beside the study."""
    return str(write_jsonl(tmp_path / "records.jsonl", [vars(record(name)) for name in "ab"]))


def settings(tmp_path: Path, url: str, files: list[Path], raters: list[str], **more: Any) -> AnalyzeSettings:
    given = {label: {"model": label, "max_tokens": 100, "temperature": 0} for label in raters}
    endpoint = {"base_url": url, "api_key_env": None}
    study = {"files": list(map(str, files)), "raters": given, "endpoint": endpoint, **more}
    return AnalyzeSettings.from_mapping(
        {"records": records(tmp_path), "output": str(tmp_path / "out"), "agreement": study}
    )


def study_of(published: Any) -> dict[str, Any]:
    """The agreement of a published report."""
    report: dict[str, Any] = json.loads((published.path / "report.json").read_text())["agreement"]
    return report


def test_kappas_of_raters_of_known_error_rates_are_those_of_arithmetic_and_of_scikit_learn(tmp_path: Path) -> None:
    rows = made_rows(200)
    sheet = write_jsonl(tmp_path / "sheet.jsonl", rows)
    errors = {"perfect": 0.0, "good": 0.1, "poor": 0.5}
    truth = {row["item_id"]: row["ann"] for row in rows}
    with stub(rows, truth, errors) as (url, _):
        published = run(settings(tmp_path, url, [sheet], list(errors)))
    report = study_of(published)
    given = [json.loads(line) for line in (published.path / "answers.jsonl").read_text().splitlines()]
    pairs = {(pair["one"], pair["other"]): pair["kappa"]["value"] for pair in report["pairs"]}
    answers = [truth[row["item_id"]] for row in given]
    for model, error in errors.items():
        kappa = pairs["ann", model]
        # Standard error of kappa with known marginals: sqrt(p_o (1 - p_o) / n) / (1 - p_e), where p_e is about 1/5.
        sampling_error = math.sqrt(error * (1 - error) / len(rows)) / 0.8
        assert abs(kappa - expected_kappa(answers, error, CHOICES)) <= 3 * sampling_error + 1e-9
        assert kappa == pytest.approx(cohen_kappa_score(answers, [row[model] for row in given]))
    assert [rater["rater"] for rater in report["llm_raters"]] == ["perfect", "good", "poor"]
    assert report["references"] == ["ann"]
    assert report["among_references"]["value"] is None


def test_a_rater_that_leaves_too_many_items_unanswered_publishes_no_kappa(tmp_path: Path) -> None:
    rows = made_rows(40)
    sheet = write_jsonl(tmp_path / "sheet.jsonl", rows)
    truth = {row["item_id"]: row["ann"] for row in rows}
    with stub(rows, truth, {"judge": 0.2, "broken": 0.0}) as (url, asked):
        with pytest.raises(InputError) as failure:
            run(settings(tmp_path, url, [sheet], ["judge", "broken"]))
        (fault,) = failure.value.faults
        assert fault.setting == "agreement.raters.broken"
        assert "40 x broken: malformed answer" in fault.fault
        assert not (tmp_path / "out" / "latest").exists()
        answered = len(asked)
        run(settings(tmp_path, url, [sheet], ["judge"]))
        assert len(asked) == answered


def test_figure_4_is_printed_and_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = made_rows(40)
    sheet = write_jsonl(tmp_path / "sheet.jsonl", [{k: v for k, v in row.items() if k != "ann"} for row in rows])
    one = write_jsonl(tmp_path / "one.jsonl", [{"item_id": row["item_id"], "ann": row["ann"]} for row in rows])
    truth = {row["item_id"]: row["ann"] for row in rows}
    with stub(rows, truth, {"judge": 0.2}) as (url, asked):
        wanted = settings(tmp_path, url, [one, sheet], ["judge"])
        published = run(wanted)
        first = len(asked)
        assert run(wanted).fresh is False
        assert len(asked) == first
    assert "mean Cohen's kappa of judge (judge), 40 of 40 items" in capsys.readouterr().out
    assert [rater["answered"] for rater in study_of(published)["llm_raters"]] == [40]
    assert "LLM raters with the reference raters" in (published.path / "report.html").read_text()


PRICED = "gpt-4o-mini"
"""A model of the bundled price table."""


def test_a_killed_run_pays_for_no_answer_twice_and_keeps_its_budget(tmp_path: Path) -> None:
    rows = made_rows(50)
    sheet = write_jsonl(tmp_path / "sheet.jsonl", rows)
    truth = {row["item_id"]: row["ann"] for row in rows}
    with stub(rows, truth, {PRICED: 0.0}, pause_s=0.1) as (url, asked):
        limits = {"budget_usd": 4, "requests_per_minute": 600, "window_s": 0.5}
        wanted = settings(tmp_path, url, [sheet], [PRICED], limits=limits)
        config = write_jsonl(tmp_path / "config.yaml", [wanted.model_dump(mode="json")])
        run_killed = subprocess.Popen([sys.executable, "-m", "infembed_ray.cli", "analyze", "--config", str(config)])
        try:
            wait_until(lambda: len(asked) >= 10 or run_killed.poll() is not None, 120)
            assert run_killed.poll() is None
        finally:
            run_killed.kill()
            run_killed.wait()
        with pytest.raises(InputError, match="budget_usd"):  # less than what was paid
            run(settings(tmp_path, url, [sheet], [PRICED], limits={"budget_usd": 1e-4}))
        published = run(wanted)
        assert study_of(published)["llm_raters"][0]["answered"] == 50
        assert len(asked) <= 50 + 5  # those in flight at the kill


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        ({"query": None}, {}, "row 1: needs item_id, instruction, query and passages"),
        ({"passages": {"2": "a", "1": "b"}}, {}, "row 1: passages are 2, 1; number them 1, 2"),
        ({}, {"raters": {"ann": {"model": "m"}}}, "agreement.raters.ann: "),
        ({}, {"endpoint": {"base_url": "localhost"}}, "agreement.endpoint.base_url=localhost: "),
        ({}, {"limits": {"tokens_per_minute": 5}}, "agreement.raters.new.max_tokens=null"),
        ({"ann": None}, {}, "0 raters; agreement needs at least 1"),
        ({"ann": "6"}, {}, "column ann, item i0: '6' is no answer"),
        ({"source": "web"}, {}, "column source, item i0: 'web' is no answer"),
        ({"passages": {}}, {}, "row 1: passages are missing"),
    ],
)
def test_bad_input_is_rejected_before_a_request(
    tmp_path: Path, change: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    sheet = write_jsonl(tmp_path / "sheet.jsonl", [{**row, **change} for row in made_rows(1)])
    study = {"raters": {"new": {"model": "m"}}, "files": [str(sheet)], **more}
    given = {"records": records(tmp_path), "output": str(tmp_path / "out"), "agreement": study}
    with pytest.raises(InputError, match=message):
        run(AnalyzeSettings.from_mapping(given))


def test_answers_need_the_items_that_they_are_about(tmp_path: Path) -> None:
    answers = write_jsonl(tmp_path / "ann.jsonl", [{"item_id": "i0", "ann": "1"}])
    with pytest.raises(InputError, match=r"agreement.files: no file has a column `passages`"):
        run(settings(tmp_path, "http://127.0.0.1:1/v1", [answers], ["m"]))
    sheet = write_jsonl(tmp_path / "sheet.jsonl", made_rows(2))
    other = write_jsonl(tmp_path / "ben.jsonl", [{"item_id": "i9", "ben": "1"}])
    with pytest.raises(InputError, match=r"agreement.files: ben answers i9"):
        run(settings(tmp_path, "http://127.0.0.1:1/v1", [sheet, other], ["m"]))
