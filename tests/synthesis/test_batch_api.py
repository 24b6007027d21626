import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infembed_ray import records
from infembed_ray.config import Endpoint, SynthesizeSettings
from infembed_ray.errors import InputError
from infembed_ray.records import Seed
from infembed_ray.storage import Published
from infembed_ray.synthesis import batch_api
from infembed_ray.synthesis.batch_api import Report, answer_in_batches
from infembed_ray.synthesis.chat import Completion, Request, RunFailure, Unjournaled
from infembed_ray.synthesis.client import completion_of, replaying
from infembed_ray.synthesis.distributed import run
from infembed_ray.synthesis.journal import Journal
from infembed_ray.synthesis.steps import Outcome, synthesize
from tests import stand_in_llm
from tests.stand_in_llm import StandIn, stand_in

REPOSITORY = Path(__file__).parents[2]
MISTAKEN = 0.2
SEEDS = [
    Seed(
        f"{plant}-{use}",
        f"{plant} used for {use}",
        f"People have turned to {plant} for {use} since villages were founded near rivers, although those who gather "
        f"it nowadays mostly sell {use} from {plant} to neighbours.",
    )
    for plant in ("maple", "willow", "juniper", "bramble")
    for use in ("honey", "timber", "baskets", "medicine", "fodder")
]
POOL = [seed.passage for seed in SEEDS]


def settings(server: StandIn | str, **values: Any) -> SynthesizeSettings:
    url = server if isinstance(server, str) else server.url
    endpoint = {"base_url": url, "api_key_env": None, "timeout_s": 10, "max_retries": 3, **values.pop("endpoint", {})}
    batches = {"poll_s": 0.05, **values.pop("batches", {})}
    generator = {"model": "gpt-4o-mini", "max_tokens": 400}
    judge = {"model": "o4-mini", "max_tokens": 400}
    return SynthesizeSettings.of(
        {"seeds": "", "output": "", "endpoint": endpoint, "batches": batches, "generator": generator, "judge": judge}
        | values
    )


def fill(given: SynthesizeSettings, directory: Path, spent_usd: float = 0.0) -> Report:
    journal = Journal(directory)
    try:
        return asyncio.run(answer_in_batches(SEEDS, POOL, given, journal, directory / "batches", spent_usd))
    finally:
        journal.close()


def outcomes(given: SynthesizeSettings, directory: Path) -> list[Outcome | None]:
    """What the journal makes of the rows; None where it lacks an answer."""
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
    """What the rows come to with the model's answers at the list price, without batches or journals."""

    async def complete(request: Request) -> Completion:
        body = json.loads(json.dumps(request.body))
        return completion_of(json.dumps(stand_in_llm._completion(body, None, MISTAKEN)).encode())

    async def all_rows() -> list[Outcome]:
        return [await synthesize(seed, POOL, settings("http://nowhere"), complete) for seed in SEEDS]

    return asyncio.run(all_rows())


def assert_same_rows(got: list[Outcome | None], expected: list[Outcome]) -> None:
    """All equal but for the price, which is half of the online run's."""
    for mine, theirs in zip(got, expected, strict=True):
        assert mine is not None
        assert mine.kind == theirs.kind
        provenance, theirs_provenance = dict(mine.row["provenance"]), dict(theirs.row["provenance"])
        assert provenance.pop("usd") == pytest.approx(theirs_provenance.pop("usd") / 2)
        assert {**mine.row, "provenance": provenance} == {**theirs.row, "provenance": theirs_provenance}


def answered_most(server: StandIn) -> int:
    return max(Counter(entry["request"] for entry in server.log("answered")).values())


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


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
        assert {outcome.kind for outcome in online} == {"kept", "rejected"}

        again = fill(given, tmp_path)
        assert again == Report()
        assert len(server.log("submitted")) == 8
    assert {path.suffix for path in (tmp_path / "batches").iterdir()} <= {".json", ""}


def test_a_batch_holds_as_many_requests_as_it_may(tmp_path: Path) -> None:
    with stand_in() as server:
        fill(settings(server, batches={"max_requests": 8}), tmp_path)
        sizes = Counter(entry["batch"] for entry in server.log("answered"))
        first = [sizes[entry["batch"]] for entry in server.log("submitted")[:3]]
    assert sorted(first) == [4, 8, 8]
    assert max(sizes.values()) == 8


def test_a_file_holds_as_many_bytes_as_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
from tests.synthesis.test_batch_api import fill, settings
fill(settings(sys.argv[1]), Path(sys.argv[2]))
"""


def kill_when(server: StandIn, directory: Path, ready: Callable[[], bool]) -> None:
    """Run the batches in a process of their own and kill it as soon as `ready()`."""
    command = [sys.executable, "-c", _RUN, server.url, str(directory)]
    with subprocess.Popen(command, cwd=REPOSITORY) as process:
        wait_for(ready)
        server.hold()
        process.send_signal(signal.SIGKILL)
        process.wait()


def stages(directory: Path) -> list[str]:
    return [json.loads(path.read_text())["stage"] for path in sorted((directory / "batches").glob("*.json"))]


@pytest.mark.parametrize("waves_before", [0, 2])
def test_a_run_killed_while_it_waits_is_resumed_by_the_batchs_id(
    tmp_path: Path, online: list[Outcome], waves_before: int
) -> None:
    with stand_in(mistaken=MISTAKEN, batch_s=0.3) as server:
        kill_when(server, tmp_path, lambda: sorted(stages(tmp_path)) == ["collected"] * waves_before + ["submitted"])
        server.release()
        assert len(batch_api.pending(tmp_path / "batches")) == 1
        assert len(server.log("submitted")) == waves_before + 1
        given = settings(server)
        report = fill(given, tmp_path)
        assert len(server.log("submitted")) == 8
        assert report.batches == 8 - waves_before
        assert batch_api.pending(tmp_path / "batches") == []
        assert answered_most(server) == 1
        assert_same_rows(outcomes(given, tmp_path), online)


def test_a_run_killed_before_it_knows_the_batchs_id_finds_it_by_its_tag(tmp_path: Path, online: list[Outcome]) -> None:
    with stand_in(mistaken=MISTAKEN) as server:
        server.hold()  # a batch is accepted, but the endpoint does not say so
        kill_when(server, tmp_path, lambda: len(server.log("submitted")) == 1)
        assert stages(tmp_path) == ["submitting"]
        server.release()
        given = settings(server)
        fill(given, tmp_path)
        assert len(server.log("submitted")) == 8
        assert answered_most(server) == 1
        assert_same_rows(outcomes(given, tmp_path), online)


def test_a_submission_without_an_answer_is_looked_for_and_not_repeated(tmp_path: Path) -> None:
    with stand_in() as server:
        server.hold()
        releasing = threading.Timer(1.0, server.release)
        releasing.start()
        report = fill(settings(server, endpoint={"timeout_s": 0.3}), tmp_path)
        releasing.join()
        assert report.batches == len(server.log("submitted")) == 8


def test_a_run_killed_while_it_collects_appends_only_what_is_missing(tmp_path: Path, online: list[Outcome]) -> None:
    """As after a crash in the middle of collecting: the batch is not marked as collected, half the journal is gone."""
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


def test_what_an_expired_batch_finished_is_kept_and_the_rest_is_left_to_the_online_run(tmp_path: Path) -> None:
    with stand_in(batch_expired=0.5) as server:
        given = settings(server)
        report = fill(given, tmp_path)
        assert report.answered == len(server.log("answered")) == len(Journal(tmp_path))
        assert report.answered == 10 + 5 + 2 + 1 + 0  # half of the rows go on to each next wave
        assert report.unanswered == {"batch_expired": 10 + 5 + 3 + 1 + 1}
        assert sum(report.unanswered.values()) == len(SEEDS)
        submitted = len(server.log("submitted"))
        assert fill(given, tmp_path) == Report()  # a rerun does not try batches again
        assert len(server.log("submitted")) == submitted
        assert answered_most(server) == 1


def test_a_faulty_row_is_left_to_the_online_run_and_the_others_go_on(tmp_path: Path) -> None:
    with stand_in(bad_request=0.03, batch_fault=0.03, seed=1) as server:
        given = settings(server)
        report = fill(given, tmp_path)
        faults = Counter(entry["ended"] for entry in server.log() if entry["ended"] not in ("answered", "submitted"))
        assert report.unanswered == {
            "invalid_request_error": faults["bad_request"],
            "server_error": faults["batch_fault"],
        }
        assert answered_most(server) == 1
        done = outcomes(given, tmp_path)
        assert done.count(None) == sum(report.unanswered.values()) > 0
        assert len(server.log("answered")) == report.answered


def test_useless_answers_are_answers(tmp_path: Path) -> None:
    with stand_in(refusal=0.05, cut_off=0.05, empty=0.05) as server:
        given = settings(server)
        assert fill(given, tmp_path).unanswered == {}
        assert answered_most(server) == 1
        kinds = Counter(outcome.kind for outcome in outcomes(given, tmp_path) if outcome)
    assert kinds["dead_letter"] > 0
    assert kinds.total() == len(SEEDS)


def test_a_batch_that_fails_its_validation_is_left_to_the_online_run(tmp_path: Path) -> None:
    with stand_in(batch_failed=1.0) as server:
        assert fill(settings(server), tmp_path).unanswered == {"the batch failed": len(SEEDS)}
        assert server.log("answered") == []
        assert len(server.log("submitted")) == 1


def test_a_batch_that_takes_too_long_is_cancelled_and_what_it_finished_is_kept(tmp_path: Path) -> None:
    with stand_in(batch_s=60) as server:
        report = fill(settings(server, batches={"patience_h": 0.2 / 3600}, limit=1), tmp_path)
        assert report.answered == len(server.log("answered")) == len(Journal(tmp_path)) > 0
        assert report.unanswered == {"batch_cancelled": len(SEEDS)}


def test_what_the_budget_does_not_cover_is_not_submitted(tmp_path: Path) -> None:
    with stand_in(mistaken=MISTAKEN) as server:
        whole = fill(settings(server), tmp_path / "whole").usd
        assert whole is not None
        submitted = len(server.log("submitted"))
        none = fill(settings(server, limits={"budget_usd": 1e-6}), tmp_path / "none")
        assert none.unanswered == {"the budget": len(SEEDS)}
        assert len(server.log("submitted")) == submitted
        spent = fill(settings(server, limits={"budget_usd": 1.0}), tmp_path / "spent", spent_usd=0.9999)
        assert spent.answered == 0
        part = fill(settings(server, limits={"budget_usd": 0.03}), tmp_path / "part")
        assert 0 < (part.usd or 0) <= 0.03
        assert part.unanswered["the budget"] > 0


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
        said = failure(settings(server.url + "/elsewhere"), tmp_path)
    assert "has no Batch API" in said
    assert stages(tmp_path) == ["prepared"]


def test_an_endpoint_that_is_not_there_ends_the_run_and_it_can_be_resumed(tmp_path: Path) -> None:
    with stand_in() as server:
        gone = settings(server, endpoint={"max_retries": 0})
    assert "the same command resumes" in failure(gone, tmp_path)
    with stand_in() as server:
        assert fill(settings(server), tmp_path).batches == 8


def test_a_batch_that_waits_at_another_endpoint_is_not_forgotten(tmp_path: Path) -> None:
    with stand_in(batch_s=0.3) as server:
        kill_when(server, tmp_path, lambda: stages(tmp_path) == ["submitted"])
        with stand_in() as other:
            said = failure(settings(other), tmp_path)
    assert f"a batch waits at {server.url}" in said


def test_a_directory_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "batches").touch()
    with stand_in() as server:
        assert "cannot be written" in failure(settings(server), tmp_path)


def test_two_runs_do_not_share_their_batches(tmp_path: Path) -> None:
    with stand_in(batch_s=60) as server:
        command = [sys.executable, "-c", _RUN, server.url, str(tmp_path)]
        with subprocess.Popen(command, cwd=REPOSITORY) as process:
            wait_for(lambda: stages(tmp_path) == ["submitted"])
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
@pytest.mark.parametrize("faults", [{}, {"batch_expired": 0.5, "batch_fault": 0.1, "bad_request": 0.01}])
def test_a_run_in_batches_publishes_what_the_online_run_does_and_pays_nothing_twice(
    ray_cluster: None, seeds_file: Path, tmp_path: Path, faults: dict[str, float]
) -> None:
    with stand_in(mistaken=MISTAKEN, **faults) as server:
        given = settings(server, seeds=str(seeds_file), output=str(tmp_path / "online"))
        online = run(given.model_copy(update={"batches": None}))
    with stand_in(mistaken=MISTAKEN, **faults) as server:
        in_batches = run(given.model_copy(update={"output": str(tmp_path / "batched"), "endpoint": at(server)}))
        assert answered_most(server) == 1
        answered, by_batches = server.log("answered"), in_batches.manifest["batches"]["answered"]
    assert rows_but_prices(in_batches) == rows_but_prices(online)
    counts = in_batches.manifest["counts"]
    assert counts["seeds"] == len(SEEDS)
    assert by_batches == len([entry for entry in answered if "batch" in entry]) == counts["replayed"]
    assert counts["calls"] == len(answered) - by_batches
    assert (counts["calls"] > 0) == bool(faults)
    spent = in_batches.manifest["usd"] + in_batches.manifest["batches"]["usd"]
    assert in_batches.manifest["usd_replayed"] == pytest.approx(in_batches.manifest["batches"]["usd"])
    assert (spent < online.manifest["usd"]) if faults else spent == pytest.approx(online.manifest["usd"] / 2)


@pytest.mark.ray
def test_a_batch_that_still_waits_is_not_asked_online(ray_cluster: None, seeds_file: Path, tmp_path: Path) -> None:
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


def test_a_line_of_a_batch_that_cannot_be_read_leaves_its_own_request_unanswered(tmp_path: Path) -> None:
    message = {"content": "half \ud83d"}
    body = {"choices": [{"message": message}], "usage": {"prompt_tokens": float("inf")}}
    lines = [
        json.dumps({"custom_id": "good", "response": {"status_code": 200, "body": body}}),
        '{"custom_id": "deep", "response": %s}' % ("[" * 10_000 + "]" * 10_000),
        json.dumps({"custom_id": "odd", "response": {"status_code": 400, "body": "no \ud83d"}, "error": "no"}),
        json.dumps({"custom_id": "bare", "response": {"status_code": 200}}),
    ]
    (tmp_path / "output").write_text("\n".join(lines) + "\n")
    said = batch_api._Answers()
    said.index(tmp_path / "output")
    good = said.completion("good")
    assert good is not None
    assert (good.text, good.prompt_tokens, good.batched) == ("half ?", 0, True)
    assert [said.completion(key) for key in ("deep", "odd", "bare")] == [None] * 3
    assert said.faults["odd"] == "HTTP 400"
