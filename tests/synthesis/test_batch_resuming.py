"""Batches of killed runs."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from infembed_ray.synthesis import batch_api, batch_files
from tests.support.stand_in_llm import stand_in
from tests.support.waiting import wait_until
from tests.synthesis.batch_checks import (
    QUOTA,
    RUN,
    assert_same_rows,
    failure,
    kill_when,
    most_enqueued,
    online,
    outcomes,
    stages,
)
from tests.synthesis.batches import MISTAKEN, SEEDS, fill, settings
from tests.synthesis.runs import REPOSITORY, answered_most

pytestmark = pytest.mark.integration


def test_a_run_killed_while_waiting_resumes_by_the_batch_id(tmp_path: Path) -> None:
    with stand_in(mistaken=MISTAKEN, batch_s=0.3) as server:
        kill_when(server, tmp_path, lambda: len(server.log("submitted")) == 3 and stages(tmp_path) == ["submitted"])
        server.release()
        assert len(batch_files.pending(tmp_path / "batches")) == 1
        assert len(server.log("submitted")) == 3
        given = settings(server)
        report = fill(given, tmp_path)
        assert len(server.log("submitted")) == 8
        assert report.batches == 6
        assert batch_files.pending(tmp_path / "batches") == []
        assert answered_most(server) == 1
        assert_same_rows(outcomes(given, tmp_path), online())


def test_a_run_killed_before_it_knows_the_batch_id_finds_it_by_its_tag(tmp_path: Path) -> None:
    with stand_in(mistaken=MISTAKEN) as server:
        server.hold()  # the endpoint accepts a batch but does not answer
        kill_when(server, tmp_path, lambda: len(server.log("submitted")) == 1)
        assert stages(tmp_path) == ["submitting"]
        server.release()
        given = settings(server)
        fill(given, tmp_path)
        assert len(server.log("submitted")) == 8
        assert answered_most(server) == 1
        assert_same_rows(outcomes(given, tmp_path), online())


def test_a_submission_without_a_response_is_searched_for_and_not_repeated(tmp_path: Path) -> None:
    with stand_in() as server:
        server.hold()
        releasing = threading.Timer(1.0, server.release)
        releasing.start()
        report = fill(settings(server, endpoint={"timeout_s": 0.3}), tmp_path)
        releasing.join()
        assert report.batches == len(server.log("submitted")) == 8


def test_a_run_killed_while_collecting_appends_only_what_is_missing(tmp_path: Path) -> None:
    """Simulate a crash while collecting: reset the batch to `submitted` after its answers were journaled."""
    with stand_in(mistaken=MISTAKEN, batch_s=0.3) as server:
        kill_when(server, tmp_path, lambda: stages(tmp_path) == ["submitted"])
        server.release()
        given = settings(server)
        state = next((tmp_path / "batches").glob("*.json"))
        submitted, requests = state.read_text(), state.with_suffix(".requests").read_bytes()
        fill(given, tmp_path)
        whole = [segment.read_bytes() for segment in tmp_path.glob("*.jsonl")]
        state.write_text(submitted)
        state.with_suffix(".requests").write_bytes(requests)
        assert fill(given, tmp_path).answered == len(SEEDS)
        assert [segment.read_bytes() for segment in tmp_path.glob("*.jsonl")] == whole
        assert len(server.log("submitted")) == 8
        assert_same_rows(outcomes(given, tmp_path), online())


def test_a_run_killed_at_any_stage_under_a_quota_pays_for_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill it at its first refusal, submission, answer and collection, then let it end."""
    monkeypatch.setattr(batch_api, "ATTEMPTS", 20)
    reached = {
        "refused": lambda server: len(server.log("over_enqueued_tokens")) > 0,
        "submitted": lambda server: "submitted" in stages(tmp_path),
        "answered": lambda server: len(server.log("answered")) > 0,
        "collected": lambda server: len({entry["batch"] for entry in server.log("answered")}) > 2,
    }
    with stand_in(mistaken=MISTAKEN, batch_s=0.3, batch_fault=0.1, enqueued_tokens=QUOTA) as server:
        for ready in reached.values():
            kill_when(server, tmp_path, lambda ready=ready: ready(server))
            server.release()
        given = settings(server)
        assert fill(given, tmp_path).unanswered == {}
        assert answered_most(server) == 1
        assert most_enqueued(server) <= QUOTA
        assert all("batch" in entry for entry in server.log("answered"))
        assert_same_rows(outcomes(given, tmp_path), online())


def test_a_batch_pending_at_another_endpoint_ends_the_run(tmp_path: Path) -> None:
    with stand_in(batch_s=0.3) as server:
        kill_when(server, tmp_path, lambda: stages(tmp_path) == ["submitted"])
        with stand_in() as other:
            said = failure(settings(other), tmp_path)
    assert f"a batch waits at {server.url}" in said


def test_a_second_run_on_the_same_batches_is_refused(tmp_path: Path) -> None:
    with stand_in(batch_s=60) as server:
        command = [sys.executable, "-c", RUN, server.url, str(tmp_path)]
        with subprocess.Popen(command, cwd=REPOSITORY) as process:
            wait_until(lambda: stages(tmp_path) == ["submitted"])
            assert "another run has batches there" in failure(settings(server), tmp_path)
            process.kill()
