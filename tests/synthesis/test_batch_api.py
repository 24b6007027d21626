import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infembed_ray import records
from infembed_ray.config.llm import Endpoint
from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.errors import InputError
from infembed_ray.llm.chat import Completion, Request, RunFailure, Unjournaled
from infembed_ray.llm.endpoint import parse_completion
from infembed_ray.llm.journal import Journal, replaying
from infembed_ray.records import Seed
from infembed_ray.storage import Published
from infembed_ray.synthesis import batch_api, batch_files
from infembed_ray.synthesis.batch_api import BatchReport
from infembed_ray.synthesis.distributed import run
from infembed_ray.synthesis.outcome import Outcome
from infembed_ray.synthesis.pipeline import synthesize
from tests.support import stand_in_answers
from tests.support.stand_in_llm import StandIn, stand_in
from tests.support.waiting import wait_until
from tests.synthesis.batches import MISTAKEN, POOL, SEEDS, fill, settings
from tests.synthesis.runs import answered_most

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]


def outcomes(given: SynthesizeSettings, directory: Path) -> list[Outcome | None]:
    """Return the rows' outcomes from the journal; None where it lacks an answer."""
    complete = replaying(Journal(directory))

    async def of(seed: Seed) -> Outcome | None:
        try:
            return await synthesize(seed, POOL, given, complete)
        except Unjournaled:
            return None

    async def of_all() -> list[Outcome | None]:
        return [await of(seed) for seed in SEEDS]

    return asyncio.run(of_all())


@pytest.fixture(scope="module")
def online() -> list[Outcome]:
    """Outcomes with answers at list price, without batches and journals."""

    async def complete(request: Request) -> Completion:
        body = json.loads(json.dumps(request.body))
        return parse_completion(json.dumps(stand_in_answers.completion(body, None, MISTAKEN)).encode())

    async def all_rows() -> list[Outcome]:
        return [await synthesize(seed, POOL, settings("http://nowhere"), complete) for seed in SEEDS]

    return asyncio.run(all_rows())


def assert_same_rows(got: list[Outcome | None], expected: list[Outcome]) -> None:
    """Compare all but the price, which is half of the online run's."""
    for mine, theirs in zip(got, expected, strict=True):
        assert mine is not None
        assert mine.kind == theirs.kind
        provenance, theirs_provenance = dict(mine.row["provenance"]), dict(theirs.row["provenance"])
        assert provenance.pop("usd") == pytest.approx(theirs_provenance.pop("usd") / 2)
        assert {**mine.row, "provenance": provenance} == {**theirs.row, "provenance": theirs_provenance}


def test_batches_give_the_rows_of_an_online_run_at_half_the_price(tmp_path: Path, online: list[Outcome]) -> None:
    with stand_in(mistaken=MISTAKEN) as server:
        given = settings(server)
        report = fill(given, tmp_path)
        assert_same_rows(outcomes(given, tmp_path), online)
        assert answered_most(server) == 1
        assert report.answered == len(server.log("answered")) == sum(outcome.paid.calls for outcome in online)
        assert report.batches == len(server.log("submitted")) == 8
        assert report.unanswered == {}
        assert report.usd == pytest.approx(sum(outcome.paid.usd or 0 for outcome in online) / 2)
        assert 0 < report.probe_usd < report.usd / 100
        assert {outcome.kind for outcome in online} == {"kept", "rejected"}

        again = fill(given, tmp_path)
        assert again == BatchReport()
        assert len(server.log("submitted")) == 8
    assert {path.suffix for path in (tmp_path / "batches").iterdir()} <= {".json", ""}


def test_batches_have_the_parameters_that_the_model_takes(tmp_path: Path) -> None:
    with stand_in(refused_parameters="gpt-4o-mini:max_completion_tokens,o4-mini:json_schema") as server:
        judge = {"model": "o4-mini", "max_tokens": 400, "structured": True}
        report = fill(settings(server, judge=judge), tmp_path)
        assert len(server.log("probed")) == 2
        assert len(server.log("refused_parameter")) == 2  # none of a batch's
    assert report.unanswered == {}
    assert report.answered > 20


def test_a_batch_holds_at_most_max_requests(tmp_path: Path) -> None:
    with stand_in() as server:
        fill(settings(server, batches={"max_requests": 8}), tmp_path)
        sizes = Counter(entry["batch"] for entry in server.log("answered"))
        first = [sizes[entry["batch"]] for entry in server.log("submitted")[:3]]
    assert sorted(first) == [4, 8, 8]
    assert max(sizes.values()) == 8


def test_an_upload_holds_at_most_most_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_api, "MOST_BYTES", 20_000)
    with stand_in() as server:
        report = fill(settings(server), tmp_path)
        assert answered_most(server) == 1
    assert report.batches > 8
    assert report.unanswered == {}


# ------------------------------------------------------------------------------------------------------- crashes

_RUN = """
import asyncio, sys
from pathlib import Path
from tests.synthesis.batches import fill, settings
fill(settings(sys.argv[1]), Path(sys.argv[2]))
"""


def kill_when(server: StandIn, directory: Path, ready: Callable[[], bool]) -> None:
    """Run the batches in a process, hold the endpoint and kill the process once `ready()`."""
    command = [sys.executable, "-c", _RUN, server.url, str(directory)]
    with subprocess.Popen(command, cwd=REPOSITORY) as process:
        wait_until(ready)
        server.hold()
        process.send_signal(signal.SIGKILL)
        process.wait()


def stages(directory: Path) -> list[str]:
    found = []
    for path in sorted((directory / "batches").glob("*.json")):
        with contextlib.suppress(FileNotFoundError):  # a batch that was cut into smaller ones
            found.append(json.loads(path.read_text())["stage"])
    return found


@pytest.mark.parametrize("waves_before", [0, 2])
def test_a_run_killed_while_waiting_resumes_by_the_batch_id(
    tmp_path: Path, online: list[Outcome], waves_before: int
) -> None:
    with stand_in(mistaken=MISTAKEN, batch_s=0.3) as server:
        kill_when(server, tmp_path, lambda: sorted(stages(tmp_path)) == ["collected"] * waves_before + ["submitted"])
        server.release()
        assert len(batch_files.pending(tmp_path / "batches")) == 1
        assert len(server.log("submitted")) == waves_before + 1
        given = settings(server)
        report = fill(given, tmp_path)
        assert len(server.log("submitted")) == 8
        assert report.batches == 8 - waves_before
        assert batch_files.pending(tmp_path / "batches") == []
        assert answered_most(server) == 1
        assert_same_rows(outcomes(given, tmp_path), online)


def test_a_run_killed_before_it_knows_the_batch_id_finds_it_by_its_tag(tmp_path: Path, online: list[Outcome]) -> None:
    with stand_in(mistaken=MISTAKEN) as server:
        server.hold()  # the endpoint accepts a batch but does not answer
        kill_when(server, tmp_path, lambda: len(server.log("submitted")) == 1)
        assert stages(tmp_path) == ["submitting"]
        server.release()
        given = settings(server)
        fill(given, tmp_path)
        assert len(server.log("submitted")) == 8
        assert answered_most(server) == 1
        assert_same_rows(outcomes(given, tmp_path), online)


def test_a_submission_without_a_response_is_searched_for_and_not_repeated(tmp_path: Path) -> None:
    with stand_in() as server:
        server.hold()
        releasing = threading.Timer(1.0, server.release)
        releasing.start()
        report = fill(settings(server, endpoint={"timeout_s": 0.3}), tmp_path)
        releasing.join()
        assert report.batches == len(server.log("submitted")) == 8


def test_a_run_killed_while_collecting_appends_only_what_is_missing(tmp_path: Path, online: list[Outcome]) -> None:
    """Simulate a crash while collecting: reset the batch to `submitted` after its answers were journaled."""
    with stand_in(mistaken=MISTAKEN, batch_s=0.3) as server:
        kill_when(server, tmp_path, lambda: stages(tmp_path) == ["submitted"])
        server.release()
        given = settings(server)
        state = next((tmp_path / "batches").glob("*.json"))
        requests = state.with_suffix(".requests").read_bytes()
        fill(given, tmp_path)
        whole = [segment.read_bytes() for segment in tmp_path.glob("*.jsonl")]
        state.write_text(json.dumps({**json.loads(state.read_text()), "stage": "submitted"}))
        state.with_suffix(".requests").write_bytes(requests)
        assert fill(given, tmp_path).answered == len(SEEDS)
        assert [segment.read_bytes() for segment in tmp_path.glob("*.jsonl")] == whole
        assert len(server.log("submitted")) == 8
        assert_same_rows(outcomes(given, tmp_path), online)


# -------------------------------------------------------------------------------------------- what is not answered


def batched(directory: Path) -> Counter[str]:
    """Return, for each request without an answer, how many batches it was in."""
    states = [json.loads(path.read_text()) for path in (directory / "batches").glob("*.json")]
    return Counter(key for state in states for key in {**state["unanswered"], **state["refused"]})


def test_what_a_batch_leaves_unanswered_is_batched_again_until_all_is_answered(
    tmp_path: Path, online: list[Outcome]
) -> None:
    with stand_in(mistaken=MISTAKEN, batch_fault=0.3) as server:
        given = settings(server, batches={"attempts": 20})
        report = fill(given, tmp_path)
        assert (report.unanswered, report.left_out) == ({}, {})
        assert report.batches > 8
        assert max(batched(tmp_path).values()) > 1
        assert answered_most(server) == 1
        assert_same_rows(outcomes(given, tmp_path), online)


def test_a_request_is_in_at_most_attempts_batches_and_then_stops_the_run(tmp_path: Path) -> None:
    with stand_in(batch_expired=0.5) as server:
        given = settings(server, batches={"attempts": 2})
        said = failure(given, tmp_path)
        assert "batches.rest=stop: there are" in said
        assert "batch_expired" in said
        assert "set batches.attempts=4" in said
        assert "batches.rest=online" in said
        assert " USD" in said
        assert set(batched(tmp_path).values()) == {1, 2}
        assert len(server.log("answered")) == len(Journal(tmp_path)) > len(SEEDS)
        submitted = len(server.log("submitted"))
        assert failure(given, tmp_path).partition(" (")[0] == said.partition(" (")[0]
        assert len(server.log("submitted")) == submitted  # a rerun does not try again
        assert "batches.attempts=6" in failure(settings(server, batches={"attempts": 4}), tmp_path)
        assert len(server.log("submitted")) > submitted
        assert max(batched(tmp_path).values()) == 4
        assert answered_most(server) == 1


def test_the_rest_becomes_dead_letters_or_is_asked_online_only_if_the_settings_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stand_in(batch_expired=0.5) as server:
        report = fill(settings(server, batches={"attempts": 1, "rest": "dead_letter"}), tmp_path)
        assert report.answered == len(server.log("answered")) == 10 + 5 + 2 + 1 + 0  # half the rows reach the next wave
        assert report.unanswered == {"batch_expired": 10 + 5 + 3 + 1 + 1}
        assert set(report.left_out) == set(batched(tmp_path))
        assert set(report.left_out.values()) == {"batch_expired"}
        asked = fill(settings(server, batches={"attempts": 1, "rest": "online"}), tmp_path)
        assert (asked.answered, asked.unanswered, asked.left_out) == (0, report.unanswered, {})
        printed = "".join(capsys.readouterr())
        assert "batches.rest=online: 20 requests that no batch answered (batch_expired: 20)" in printed
        assert "at full price, about" in printed


def test_a_refused_request_is_not_batched_again_and_does_not_stop_the_others(tmp_path: Path) -> None:
    with stand_in(bad_request=0.05, seed=1) as server:
        given = settings(server)
        report = fill(given, tmp_path)
        refused = len([entry for entry in server.log() if entry["ended"] == "bad_request"])
        assert report.unanswered == {"invalid_request_error": refused}
        assert len(report.left_out) == refused > 0
        assert set(batched(tmp_path).values()) == {1}
        assert outcomes(given, tmp_path).count(None) == refused
        assert fill(given, tmp_path).left_out == report.left_out


def test_what_another_endpoint_refused_is_asked_at_the_new_one(tmp_path: Path) -> None:
    with stand_in(bad_request=1.0) as server:
        assert len(fill(settings(server, endpoint={"probe": False}), tmp_path).left_out) == len(SEEDS)
    with stand_in() as server:
        report = fill(settings(server), tmp_path)
        assert (report.left_out, report.batches) == ({}, 8)


def test_refused_cut_off_and_empty_answers_count_as_answers(tmp_path: Path) -> None:
    with stand_in(refusal=0.05, cut_off=0.05, empty=0.05) as server:
        given = settings(server)
        assert fill(given, tmp_path).unanswered == {}
        assert answered_most(server) == 1
        kinds = Counter(outcome.kind for outcome in outcomes(given, tmp_path) if outcome)
    assert kinds["dead_letter"] > 0
    assert kinds.total() == len(SEEDS)


def test_a_batch_that_fails_its_validation_is_tried_again_and_not_asked_online(tmp_path: Path) -> None:
    with stand_in(batch_failed=1.0) as server:
        report = fill(settings(server, batches={"rest": "dead_letter"}), tmp_path)
        assert report.unanswered == {"the batch failed": len(SEEDS)}
        assert server.log("answered") == []
        assert len(server.log("submitted")) == 3


def test_a_batch_beyond_its_patience_is_cancelled_and_its_answers_are_kept(tmp_path: Path) -> None:
    with stand_in(batch_s=60) as server:
        patient = {"patience_h": 0.2 / 3600, "attempts": 1, "rest": "dead_letter"}
        report = fill(settings(server, batches=patient), tmp_path)
        assert report.answered == len(server.log("answered")) == len(Journal(tmp_path)) > 0
        assert report.unanswered == {"batch_cancelled": len(SEEDS)}


def test_batches_beyond_the_budget_are_not_submitted(tmp_path: Path) -> None:
    with stand_in(mistaken=MISTAKEN) as server:
        whole = fill(settings(server), tmp_path / "whole").usd
        assert whole is not None
        submitted = len(server.log("submitted"))
        for rest in ("stop", "dead_letter"):
            none = settings(server, limits={"budget_usd": 1e-6}, batches={"rest": rest})
            assert f"limits.budget_usd=1e-06: the budget is used up; there are {len(SEEDS)} requests" in failure(
                none, tmp_path / "none"
            )
        assert len(server.log("submitted")) == submitted
        online = {"rest": "online"}
        spent = settings(server, limits={"budget_usd": 1.0}, batches=online)
        assert fill(spent, tmp_path / "spent", spent_usd=0.9999).answered == 0
        part = fill(settings(server, limits={"budget_usd": 0.6 * whole}, batches=online), tmp_path / "part")
        assert 0 < (part.usd or 0) <= 0.6 * whole
        assert part.unanswered["the budget"] > 0


# ----------------------------------------------------------------------------------- the quota of enqueued tokens

QUOTA = 4_000
"""Prompt tokens, of four bytes, that the endpoint enqueues; a wave has over 20,000."""


def most_enqueued(server: StandIn) -> int:
    return max(entry["in_queue"] for entry in server.log("enqueued"))


@pytest.mark.parametrize("how", ["told", "learned", "without a number", "refused at once"])
def test_batches_follow_one_another_within_the_quota_and_nothing_is_left(
    tmp_path: Path, online: list[Outcome], how: str
) -> None:
    refusal = {"enqueued_refusal": "Too many tokens are enqueued."} if how == "without a number" else {}
    with stand_in(
        mistaken=MISTAKEN,
        batch_s=0.05,
        enqueued_tokens=QUOTA,
        enqueued_status=429 if how == "refused at once" else 0,
        **refusal,
    ) as server:
        given = settings(server, batches={"enqueued_tokens": QUOTA if how == "told" else None, "attempts": 1})
        report = fill(given, tmp_path)
        assert (report.unanswered, report.left_out) == ({}, {})
        assert most_enqueued(server) <= QUOTA
        assert report.refused_for_quota == len(server.log("over_enqueued_tokens"))
        assert (report.refused_for_quota == 0) == (how == "told")
        assert report.refused_for_quota < 20
        assert answered_most(server) == 1
        assert all("batch" in entry for entry in server.log("answered"))  # nothing at full price
        assert_same_rows(outcomes(given, tmp_path), online)


def test_batches_wait_for_other_jobs_of_the_account(tmp_path: Path) -> None:
    with stand_in(enqueued_tokens=40_000, enqueued_elsewhere_s=1.0) as server:
        report = fill(settings(server), tmp_path)
        assert report.refused_for_quota > 0
        assert report.unanswered == {}
    with stand_in(enqueued_tokens=40_000, enqueued_elsewhere_s=60.0) as server:
        given = settings(server, batches={"patience_h": 0.5 / 3600})
        assert "other jobs have used the quota of gpt-4o-mini" in failure(given, tmp_path / "b")
        assert "collected" not in stages(tmp_path / "b")


def test_a_limit_below_every_request_sends_one_at_a_time(tmp_path: Path) -> None:
    with stand_in(enqueued_tokens=QUOTA) as server:
        report = fill(settings(server, batches={"enqueued_tokens": 10}), tmp_path)
        assert report.batches == report.answered == len(server.log("answered"))
        assert report.unanswered == {}


def test_a_run_killed_at_any_stage_under_a_quota_pays_for_nothing_twice(tmp_path: Path, online: list[Outcome]) -> None:
    """Kill it at its first upload, refusal, submission, answer and collection, then let it end."""
    reached = {
        "prepared": lambda server: "prepared" in stages(tmp_path),
        "refused": lambda server: len(server.log("over_enqueued_tokens")) > 0,
        "submitted": lambda server: "submitted" in stages(tmp_path),
        "answered": lambda server: len(server.log("answered")) > 0,
        "collected": lambda server: stages(tmp_path).count("collected") > 2,
    }
    with stand_in(mistaken=MISTAKEN, batch_s=0.3, batch_fault=0.1, enqueued_tokens=QUOTA) as server:
        for ready in reached.values():
            kill_when(server, tmp_path, lambda ready=ready: ready(server))
            server.release()
        given = settings(server, batches={"attempts": 20})
        assert fill(given, tmp_path).unanswered == {}
        assert answered_most(server) == 1
        assert most_enqueued(server) <= QUOTA
        assert all("batch" in entry for entry in server.log("answered"))
        assert_same_rows(outcomes(given, tmp_path), online)


# ------------------------------------------------------------------------------------------------- what ends a run


def failure(given: SynthesizeSettings, directory: Path) -> str:
    with pytest.raises(RunFailure) as error:
        fill(given, directory)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_refused_key_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_KEY", "mine")
    with stand_in(key="another") as server:
        said = failure(settings(server, endpoint={"api_key_env": "STAND_IN_KEY"}), tmp_path)
    assert "endpoint.api_key_env=STAND_IN_KEY" in said
    assert "refuses its key" in said


def test_an_endpoint_without_batches_says_so(tmp_path: Path) -> None:
    with stand_in() as server:
        said = failure(settings(server.url + "/elsewhere", endpoint={"probe": False}), tmp_path)
    assert "has no Batch API" in said
    assert stages(tmp_path) == ["prepared"]


def test_an_unreachable_endpoint_ends_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    with stand_in() as server:
        gone = settings(server, endpoint={"patience_s": 0})
    assert "the same command resumes" in failure(gone, tmp_path)
    with stand_in() as server:
        assert fill(settings(server), tmp_path).batches == 8


def test_a_batch_pending_at_another_endpoint_ends_the_run(tmp_path: Path) -> None:
    with stand_in(batch_s=0.3) as server:
        kill_when(server, tmp_path, lambda: stages(tmp_path) == ["submitted"])
        with stand_in() as other:
            said = failure(settings(other), tmp_path)
    assert f"a batch waits at {server.url}" in said


def test_a_directory_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "batches").touch()
    with stand_in() as server:
        assert "cannot be written" in failure(settings(server), tmp_path)


def test_a_second_run_on_the_same_batches_is_refused(tmp_path: Path) -> None:
    with stand_in(batch_s=60) as server:
        command = [sys.executable, "-c", _RUN, server.url, str(tmp_path)]
        with subprocess.Popen(command, cwd=REPOSITORY) as process:
            wait_until(lambda: stages(tmp_path) == ["submitted"])
            assert "another run has batches there" in failure(settings(server), tmp_path)
            process.kill()


# ------------------------------------------------------------------------------------------------- the whole stage


@pytest.fixture
def seeds_file(tmp_path: Path) -> Path:
    file = tmp_path / "seeds.jsonl"
    file.write_text("".join(json.dumps(records.columns_of(seed)) + "\n" for seed in SEEDS), encoding="utf-8")
    return file


def rows_but_prices(published: Published) -> list[list[dict[str, Any]]]:
    files = (records.KEPT_FILE, records.REJECTED_FILE, records.DEAD_LETTER_FILE)
    rows = [records.read_raw(published.path / file) for file in files]
    for row in (row for part in rows for row in part):
        row["provenance"].pop("usd")
    return rows


@pytest.mark.ray
def test_a_run_in_batches_publishes_the_same_rows_and_pays_for_nothing_twice(
    ray_cluster: None, seeds_file: Path, tmp_path: Path
) -> None:
    faults = {"batch_expired": 0.5, "batch_fault": 0.1, "bad_request": 0.01}
    with stand_in(mistaken=MISTAKEN, **faults) as server:
        batches = {"attempts": 1, "rest": "online"}
        given = settings(server, seeds=str(seeds_file), output=str(tmp_path / "online"), batches=batches)
        online = run(given.model_copy(update={"batches": None}))
    with stand_in(mistaken=MISTAKEN, **faults) as server:
        in_batches = run(given.model_copy(update={"output": str(tmp_path / "batched"), "endpoint": at(server)}))
        assert answered_most(server) == 1
        answered, by_batches = server.log("answered"), in_batches.manifest["batches"]["answered"]
    assert rows_but_prices(in_batches) == rows_but_prices(online)
    counts = in_batches.manifest["counts"]
    assert counts["seeds"] == len(SEEDS)
    assert by_batches == len([entry for entry in answered if "batch" in entry]) == counts["replayed"]
    assert counts["calls"] == len(answered) - by_batches > 0
    assert in_batches.manifest["usd_replayed"] == pytest.approx(in_batches.manifest["batches"]["usd"])
    assert in_batches.manifest["usd"] + in_batches.manifest["batches"]["usd"] < online.manifest["usd"]


@pytest.mark.ray
def test_a_run_in_batches_makes_dead_letters_of_the_rest_and_asks_nothing_online(
    ray_cluster: None, seeds_file: Path, tmp_path: Path
) -> None:
    with stand_in(batch_expired=0.1) as server:
        batches = {"attempts": 1, "rest": "dead_letter"}
        done = run(settings(server, seeds=str(seeds_file), output=str(tmp_path / "out"), batches=batches))
        assert all("batch" in entry for entry in server.log("answered"))
    dead = records.read_raw(done.path / records.DEAD_LETTER_FILE)
    assert len(dead) == done.manifest["batches"]["unanswered"]["batch_expired"] > 0
    assert {row["error"] for row in dead} == {"no batch answered: batch_expired"}


@pytest.mark.ray
def test_a_pending_batch_is_not_asked_online(ray_cluster: None, seeds_file: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with stand_in(batch_s=0.3) as server:
        kill_when(server, journal, lambda: stages(journal) == ["submitted"])
        server.release()
        given = settings(server, seeds=str(seeds_file), output=str(tmp_path / "out"), journal=str(journal))
        with pytest.raises(InputError, match=r"batches=null: 1 batches of an earlier run .* set batches=\{\}"):
            run(given.model_copy(update={"batches": None}))
        assert run(given).manifest["counts"]["calls"] == 0
        assert answered_most(server) == 1


def at(server: StandIn) -> Endpoint:
    return settings(server).endpoint
