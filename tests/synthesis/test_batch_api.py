import re
from collections import Counter
from pathlib import Path

import pytest

from infembed_ray.llm import budget, prices
from infembed_ray.llm.journal import Journal
from infembed_ray.synthesis import batch_api
from infembed_ray.synthesis.batch_api import BatchReport
from tests.support.stand_in_llm import stand_in
from tests.synthesis.batch_checks import QUOTA, assert_same_rows, failure, most_enqueued, online, outcomes
from tests.synthesis.batches import MISTAKEN, SEEDS, fill, settings
from tests.synthesis.runs import answered_most

pytestmark = pytest.mark.integration


def test_batches_give_the_rows_of_an_online_run_at_half_the_price(tmp_path: Path) -> None:
    with stand_in(mistaken=MISTAKEN) as server:
        given = settings(server)
        report = fill(given, tmp_path)
        assert_same_rows(outcomes(given, tmp_path), online())
        assert answered_most(server) == 1
        assert report.answered == len(server.log("answered")) == sum(outcome.paid.calls for outcome in online())
        assert report.batches == len(server.log("submitted")) == 8
        assert report.unanswered == {}
        assert report.usd == pytest.approx(sum(outcome.paid.usd or 0 for outcome in online()) / 2)
        assert {outcome.kind for outcome in online()} == {"kept", "rejected"}

        again = fill(given, tmp_path)
        assert again == BatchReport()
        assert len(server.log("submitted")) == 8
    assert {path.name for path in (tmp_path / "batches").iterdir()} == {".lock"}


def test_a_batch_teaches_the_parameters_that_the_model_takes(tmp_path: Path) -> None:
    with stand_in(refused_parameters="gpt-4o-mini:max_completion_tokens,o4-mini:json_schema") as server:
        judge = {"model": "o4-mini", "max_tokens": 400, "structured": True}
        report = fill(settings(server, judge=judge), tmp_path)
        assert len(SEEDS) < len(server.log("bad_request")) <= 2 * len(SEEDS)  # one batch of each model
    assert report.unanswered == {}
    assert report.answered > 20


@pytest.mark.parametrize(("bound", "value"), [("MOST_REQUESTS", 8), ("MOST_BYTES", 20_000)])
def test_a_batch_has_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int) -> None:
    monkeypatch.setattr(batch_api, bound, value)
    with stand_in() as server:
        report = fill(settings(server), tmp_path)
        assert answered_most(server) == 1
        assert bound == "MOST_BYTES" or max(Counter(entry["batch"] for entry in server.log("answered")).values()) == 8
    assert report.batches > 8
    assert report.unanswered == {}


# -------------------------------------------------------------------------------------------- what is not answered


def test_what_a_batch_leaves_unanswered_is_batched_again_until_all_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_api, "ATTEMPTS", 20)
    with stand_in(mistaken=MISTAKEN, batch_fault=0.3) as server:
        given = settings(server)
        report = fill(given, tmp_path)
        assert (report.unanswered, report.left_out) == ({}, {})
        assert report.batches > 8
        assert answered_most(server) == 1
        assert_same_rows(outcomes(given, tmp_path), online())


def test_a_request_is_in_few_batches_and_then_stops_the_run_and_a_rerun_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_api, "ATTEMPTS", 2)
    with stand_in(batch_expired=0.5) as server:
        said = failure(settings(server), tmp_path)
        for part in ("batches.rest=stop: there are", "batch_expired", "batches.rest=online"):
            assert part in said
        assert len(server.log("answered")) == len(Journal(tmp_path)) > len(SEEDS)
        submitted = len(server.log("submitted"))
        failure(settings(server), tmp_path)
        assert len(server.log("submitted")) > submitted
        assert answered_most(server) == 1


def test_the_rest_becomes_dead_letters_or_is_asked_online_only_if_the_settings_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_api, "ATTEMPTS", 1)
    with stand_in(batch_expired=0.5) as server:
        report = fill(settings(server, batches={"rest": "dead_letter"}), tmp_path)
        assert report.answered == len(server.log("answered")) == 10 + 5 + 2 + 1 + 0  # half the rows reach the next wave
        assert report.unanswered == {"batch_expired": 10 + 5 + 3 + 1 + 1}
        assert len(report.left_out) == 20
        assert all(why.startswith("batch_expired: ") for why in report.left_out.values())
        assert fill(settings(server, batches={"rest": "online"}), tmp_path).left_out == {}
        printed = "".join(capsys.readouterr())
        assert "batches.rest=online: " in printed
        assert "at full price" in printed


def test_a_refused_request_is_not_batched_again_and_does_not_stop_the_others(tmp_path: Path) -> None:
    with stand_in(bad_request=0.05, seed=1) as server:
        given = settings(server)
        report = fill(given, tmp_path)
        refused = len([entry for entry in server.log() if entry["ended"] == "bad_request"])
        assert report.unanswered == {"invalid_request_error": refused}
        assert len(report.left_out) == refused > 0
        assert outcomes(given, tmp_path).count(None) == refused


@pytest.mark.parametrize("rest", ["stop", "dead_letter", "online"])
def test_a_batch_that_fails_its_validation_stops_the_run_and_is_not_submitted_again(tmp_path: Path, rest: str) -> None:
    with stand_in(batch_failed=1.0) as server:
        said = failure(settings(server, batches={"rest": rest}), tmp_path)
        assert re.search(
            r"batches: batch \S+: failed.*, 0 of 20 answered; mend the cause and run the same command", said
        )
        assert (server.log("answered"), len(server.log("submitted"))) == ([], 1)
    with stand_in() as server:
        assert fill(settings(server), tmp_path).batches == 8


def test_batches_beyond_the_budget_are_not_submitted(tmp_path: Path) -> None:
    with stand_in(mistaken=MISTAKEN) as server:
        whole = fill(settings(server), tmp_path / "whole").usd
        assert whole is not None
        submitted = len(server.log("submitted"))
        none = settings(server, limits={"budget_usd": 1e-6}, batches={"rest": "online"})
        said = f"limits.budget_usd=1e-06: the budget is used up; {len(SEEDS)} requests are left"
        assert said in failure(none, tmp_path / "none")
        assert "used up" in failure(settings(server, limits={"budget_usd": 1.0}), tmp_path / "spent", spent_usd=0.9999)
        assert len(server.log("submitted")) == submitted
        assert "used up" in failure(settings(server, limits={"budget_usd": 0.6 * whole}), tmp_path / "part")
        assert 0.3 * whole < budget.spent_usd(tmp_path / "part", prices.load()) <= 0.6 * whole


# ----------------------------------------------------------------------------------- the quota of enqueued tokens


@pytest.mark.parametrize("how", ["learned", "without a number", "refused at once"])
def test_batches_follow_one_another_within_the_quota_and_nothing_is_left(tmp_path: Path, how: str) -> None:
    refusal = {"enqueued_refusal": "Too many tokens are enqueued."} if how == "without a number" else {}
    with stand_in(
        mistaken=MISTAKEN,
        batch_s=0.05,
        enqueued_tokens=QUOTA,
        enqueued_status=429 if how == "refused at once" else 0,
        **refusal,
    ) as server:
        given = settings(server)
        report = fill(given, tmp_path)
        assert (report.unanswered, report.left_out) == ({}, {})
        assert most_enqueued(server) <= QUOTA
        assert report.refused_for_quota == len(server.log("over_enqueued_tokens"))
        assert 0 < report.refused_for_quota < 40
        assert answered_most(server) == 1
        assert all("batch" in entry for entry in server.log("answered"))  # nothing at full price
        assert_same_rows(outcomes(given, tmp_path), online())


def test_batches_wait_for_other_jobs_of_the_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in(enqueued_tokens=40_000, enqueued_elsewhere_s=1.0) as server:
        report = fill(settings(server), tmp_path)
        assert report.refused_for_quota > 0
        assert report.unanswered == {}
    with stand_in(enqueued_tokens=40_000, enqueued_elsewhere_s=60.0) as server:
        monkeypatch.setattr(batch_api, "ADMISSION_S", 0.5)
        assert "other jobs have used the quota of gpt-4o-mini" in failure(settings(server), tmp_path / "b")


# ------------------------------------------------------------------------------------------------- what ends a run


def test_a_refused_key_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_KEY", "mine")
    with stand_in(key="another") as server:
        said = failure(settings(server, endpoint={"api_key_env": "STAND_IN_KEY"}), tmp_path)
    assert "endpoint.api_key_env=STAND_IN_KEY" in said
    assert "refuses its key" in said


def test_an_endpoint_without_batches_says_so(tmp_path: Path) -> None:
    with stand_in() as server:
        said = failure(settings(server.url + "/elsewhere"), tmp_path)
    assert "has no Batch API" in said


def test_an_unreachable_endpoint_ends_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    with stand_in() as server:
        gone = settings(server, endpoint={"patience_s": 0})
    assert "the same command resumes" in failure(gone, tmp_path)
    with stand_in() as server:
        assert fill(settings(server), tmp_path).batches == 8
