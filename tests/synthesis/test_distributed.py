import itertools
import json
import os
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

from infembed_ray import cli, records
from infembed_ray.config import SynthesizeSettings
from infembed_ray.errors import InputError
from infembed_ray.quickstart import sample
from infembed_ray.storage import Published
from infembed_ray.synthesis.distributed import _require_all_journaled, run
from infembed_ray.synthesis.journal import Journal
from infembed_ray.synthesis.sources import Source
from tests.stand_in_llm import StandIn, stand_in
from tests.synthesis.exchanges import unreadable

REPOSITORY = Path(__file__).parents[2]
FILES = (records.KEPT_FILE, records.REJECTED_FILE, records.DEAD_LETTER_FILE)


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


PLANTS = ("maple", "willow", "juniper", "bramble", "thistle", "clover", "heather", "mistletoe")
USES = ("honey", "timber", "baskets", "medicine", "fodder", "hedges", "charcoal", "shelter")
ROWS = [
    {
        "id": f"{plant}-{use}",
        "query": f"{plant} used for {use}",
        "passage": f"People have turned to {plant} for {use} since villages were founded near rivers, although those "
        f"who gather it nowadays mostly sell {use} from {plant} to neighbours.",
    }
    for plant in PLANTS
    for use in USES
]


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 seeds, no two alike."""
    file = tmp_path_factory.mktemp("seeds") / "seeds.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return file


def settings(seeds: Path, output: Path, server: StandIn | None = None, **values: Any) -> SynthesizeSettings:
    endpoint = {"base_url": server.url, "api_key_env": None, "timeout_s": 5} if server else {}
    given = {"seeds": str(seeds), "output": str(output), "in_flight": 16, "actors": 2, **values}
    return SynthesizeSettings.of({**given, "endpoint": {**endpoint, **values.get("endpoint", {})}})


def rows_of(published: Published) -> list[list[dict[str, Any]]]:
    return [records.read_raw(published.path / file) for file in FILES]


def answered_most(server: StandIn) -> int:
    """How often the request was answered that was answered most often."""
    return max(Counter(entry["request"] for entry in server.log("answered")).values())


def wait_for(condition: Callable[[], bool], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.ray
def test_a_finished_journal_needs_no_key_and_no_endpoint(
    ray_cluster: None, no_key: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a limit, too: the judge's distractors come from the whole file, so its requests stay the same."""
    arguments = [
        *("synthesize", f"seeds={sample.SEEDS}", f"output={tmp_path}", f"replay=[{sample.JOURNAL}]", "limit=30"),
        *("generator.model=bundled-sample", "generator.temperature=null", "judge.model=bundled-sample"),
    ]
    assert cli.main(arguments) == 0
    pointer = (tmp_path / "latest").read_text().strip()
    manifest = json.loads((tmp_path / pointer / "manifest.json").read_text())
    counts = manifest["counts"]
    assert (counts["seeds"], counts["calls"], counts["dead_letter"]) == (30, 0, 0)
    assert counts["kept"] + counts["rejected"] == 30
    assert counts["rejected"] == sum(manifest["rejected_by"].values()) > 0
    assert manifest["usd"] == 0
    assert not (tmp_path / "journal").exists()
    capsys.readouterr()
    assert cli.main(arguments) == 0
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.ray
def test_with_faults_of_every_kind_every_seed_is_kept_rejected_or_a_dead_letter(
    ray_cluster: None, seeds: Path, tmp_path: Path
) -> None:
    faults = {
        **{"rate_limited": 0.05, "server_error": 0.03, "hang": 0.005, "dropped": 0.03, "truncated": 0.03},
        **{"bad_request": 0.01, "refusal": 0.01, "empty": 0.01, "cut_off": 0.01, "malformed": 0.01, "mistaken": 0.1},
    }
    with stand_in(latency_s=0.01, jitter_s=0.02, retry_after_s=0.05, **faults) as server:
        first = run(settings(seeds, tmp_path / "out", server))
        answered = len(server.log("answered"))
        # Another output of the same: the journal answers, except what the endpoint never did.
        again = run(settings(seeds, tmp_path / "again", server, journal=str(tmp_path / "out" / "journal"), actors=1))
        assert answered_most(server) == 1
        bad_requests = server.log("bad_request")

    counts = first.manifest["counts"]
    kept, rejected, dead = rows_of(first)
    assert (counts["kept"], counts["rejected"], counts["dead_letter"]) == (len(kept), len(rejected), len(dead))
    assert min(len(kept), len(rejected), len(dead)) > 0
    order = [row["id"] for row in ROWS]
    assert sorted(row["id"] for rows in (kept, rejected, dead) for row in rows) == sorted(order)
    for rows in (kept, rejected, dead):
        assert [row["id"] for row in rows] == sorted((row["id"] for row in rows), key=order.index)

    assert counts["calls"] == answered
    assert counts["replayed"] == 0
    assert first.manifest["usd"] > 0
    journal = Journal(tmp_path / "out" / "journal")
    for row in dead:
        refused = journal.get(row["request_hash"]) is None
        assert refused == row["error"].startswith("HTTP 400")
    assert len([row for row in dead if row["error"].startswith("HTTP 400")]) == len(bad_requests) / 2

    assert rows_of(again) == rows_of(first)
    assert (again.manifest["counts"]["calls"], again.manifest["counts"]["replayed"]) == (0, answered)
    assert again.manifest["usd_replayed"] == pytest.approx(first.manifest["usd"])


@pytest.mark.ray
def test_an_answer_that_cannot_be_read_or_written_costs_its_own_row_at_most(
    ray_cluster: None, seeds: Path, tmp_path: Path
) -> None:
    bad = {"surrogate": ROWS[3]["query"], "infinite_usage": ROWS[7]["query"], "deep": ROWS[11]["query"]}
    with stand_in(**bad) as server:
        first = run(settings(seeds, tmp_path / "out", server, limit=60))
        sent = len(server.log())
        journal = str(tmp_path / "out" / "journal")
        again = run(settings(seeds, tmp_path / "again", server, limit=60, journal=journal))
        assert len(server.log()) == sent
        assert answered_most(server) == 1
    counts = first.manifest["counts"]
    assert counts["kept"] + counts["rejected"] + counts["dead_letter"] == 60
    assert rows_of(again) == rows_of(first)
    kept, rejected, dead = ({row["id"]: row for row in rows} for rows in rows_of(first))
    assert ROWS[7]["id"] in {**kept, **rejected}
    assert "?" in str({**kept, **rejected}[ROWS[3]["id"]])
    assert "unreadable answer" in dead[ROWS[11]["id"]]["error"]


@pytest.mark.ray
def test_a_model_that_refuses_every_request_stops_the_run_and_what_was_paid_is_kept(
    ray_cluster: None, seeds: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with stand_in(refused_model="o4-mini") as server:
        message = one_line(settings(seeds, out, server, in_flight=4, actors=1))
        refused, answered = server.log("bad_request"), server.log("answered")
    assert message.startswith(
        "judge.model=o4-mini: step judge_negative_query failed alike for all of the first 20 rows"
    )
    assert "(HTTP 400: This request is not acceptable.)" in message
    assert "nothing is published" in message
    assert not (out / "latest").exists()
    assert len(refused) < 64
    with stand_in() as server:
        whole = run(settings(seeds, out, server))
        assert not {entry["request"] for entry in server.log()} & {entry["request"] for entry in answered}
    assert whole.manifest["counts"]["replayed"] == len(answered)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        (
            {"refused_model": "o4-mini"},
            "judge.model=o4-mini: step judge_negative_query failed alike for all of the first 9",
        ),
        ({"mistaken": 1.0}, "step judge_negative_query: the judge picked"),
    ],
    ids=["refused", "rejected"],
)
def test_a_run_that_keeps_nothing_fails_and_its_rejected_rows_can_be_read(
    ray_cluster: None, seeds: Path, tmp_path: Path, behaviour: dict[str, Any], said: str
) -> None:
    with stand_in(**behaviour) as server:
        message = one_line(settings(seeds, tmp_path, server, limit=9))
    assert message.startswith("0 of 9 seeds were kept (")
    assert said in message
    assert not (tmp_path / "latest").exists()
    directory = Path(message.partition(" are in ")[2].partition(",")[0])
    rows = [row for file in FILES for row in records.read_raw(directory / file)]
    assert len(rows) == 9


# ------------------------------------------------------------------------------------------------- crashes


class Held:
    """Holds the endpoint once it has answered some requests, so that a kill finds all others unanswered."""

    def __init__(self, server: StandIn, journal: Path, answers: int) -> None:
        self._server, self._journal, self._answers = server, journal, answers

    def __enter__(self) -> list[int]:
        wait_for(lambda: len(self._server.log("answered")) >= self._answers)
        self._server.hold()
        wait_for(lambda: self._journaled() == len(self._server.log("answered")))
        return [int(segment.stem.split("-")[-2]) for segment in self._journal.glob("*.jsonl")]

    def __exit__(self, *_: object) -> None:
        self._server.release()

    def _journaled(self) -> int:
        return sum(segment.read_bytes().count(b"\n") for segment in self._journal.glob("*.jsonl"))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def uninterrupted(
    ray_cluster: None, seeds: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[list[dict[str, Any]]]:
    """The rows of a run that nothing disturbs."""
    with stand_in(mistaken=0.2) as server:
        return rows_of(run(settings(seeds, tmp_path_factory.mktemp("uninterrupted"), server)))


@pytest.mark.ray
def test_actors_of_a_killed_driver_journal_what_is_in_flight_and_send_nothing_more(
    uninterrupted: list[list[dict[str, Any]]], seeds: Path, tmp_path: Path
) -> None:
    with stand_in(latency_s=0.05, jitter_s=0.05, mistaken=0.2) as server:
        output = tmp_path / "out"
        arguments = ["synthesize", f"seeds={seeds}", f"output={output}", "in_flight=16", "actors=2"]
        arguments += [f"endpoint.base_url={server.url}", "endpoint.api_key_env=null"]
        command = [sys.executable, "-m", "infembed_ray.cli", *arguments]
        driver = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with driver, Held(server, output / "journal", answers=150) as actors:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
            time.sleep(3)  # Ray by itself ends the actors sooner
            assert any(alive(pid) for pid in actors)  # one without a request in flight has ended
            released = time.time()  # until then, the requests in flight held all slots
        wait_for(lambda: not any(alive(pid) for pid in actors))
        assert not (output / "latest").exists()
        answered = len(server.log("answered"))
        assert len(server.log()) == answered
        assert sum(entry["arrived"] > released for entry in server.log()) == 0

        resumed = run(settings(seeds, output, server))
        assert answered_most(server) == 1
    assert resumed.manifest["counts"]["replayed"] == answered > 150
    assert rows_of(resumed) == uninterrupted


@pytest.mark.ray
def test_a_killed_actor_is_replaced_without_repeating_an_answered_request(
    uninterrupted: list[list[dict[str, Any]]], seeds: Path, tmp_path: Path
) -> None:
    killed: list[int] = []

    def kill_one(server: StandIn) -> None:
        with Held(server, tmp_path / "out" / "journal", answers=100) as actors:
            os.kill(actors[0], signal.SIGKILL)
            wait_for(lambda: not alive(actors[0]))
            time.sleep(1)  # until the server has seen the dead process' connections close: it must not answer them
            killed.append(actors[0])

    with stand_in(latency_s=0.05, jitter_s=0.05, mistaken=0.2) as server:
        killer = threading.Thread(target=kill_one, args=(server,))
        killer.start()
        published = run(settings(seeds, tmp_path / "out", server))
        killer.join()
        assert len(killed) == 1
        assert answered_most(server) == 1
    assert rows_of(published) == uninterrupted


@pytest.mark.ray
def test_a_refused_key_ends_the_run_with_one_line_and_the_journal_resumes_it(
    ray_cluster: None, seeds: Path, tmp_path: Path
) -> None:
    wrong = {"api_key_env": "HOME"}  # set in every worker, and no key of this endpoint
    with stand_in() as server:
        run(settings(seeds, tmp_path / "out", server, limit=8))
    with stand_in(key="right") as server:
        with pytest.raises(InputError, match=r"^endpoint.api_key_env=HOME: .* refuses its key .*resumes$") as error:
            run(settings(seeds, tmp_path / "out", server, endpoint={**wrong, "base_url": server.url}))
        assert "\n" not in str(error.value)
        assert 1 <= len(server.log("refused_key")) <= 2 * 16
        assert len(server.log()) == len(server.log("refused_key"))
    with stand_in() as server:
        whole = run(settings(seeds, tmp_path / "out", server))
    assert whole.manifest["counts"]["seeds"] == 64
    assert whole.manifest["counts"]["replayed"] == 8 * 8


# ------------------------------------------------------------------------------------------------- the limits

PRICES = "as_of: 2026-01-01\nmodels: {gpt-4o-mini: [1.0, 2.0], o4-mini: [10.0, 40.0]}\n"
BOUNDED = {"generator": {"model": "gpt-4o-mini", "max_tokens": 150}, "judge": {"model": "o4-mini", "max_tokens": 50}}


def spent_usd(server: StandIn) -> float:
    """By the server's own count, answers that never arrived included."""
    price = {"gpt-4o-mini": (1e-6, 2e-6), "o4-mini": (10e-6, 40e-6)}
    return sum(
        price[entry["model"]][0] * entry["prompt_tokens"] + price[entry["model"]][1] * entry["completion_tokens"]
        for entry in server.log()
        if "prompt_tokens" in entry
    )


@pytest.mark.ray
def test_a_budget_is_kept_by_all_actors_and_a_higher_one_resumes(
    ray_cluster: None, seeds: Path, tmp_path: Path
) -> None:
    (tmp_path / "prices.yaml").write_text(PRICES)
    out, shared = tmp_path / "out", {**BOUNDED, "prices": str(tmp_path / "prices.yaml"), "actors": 4, "in_flight": 8}
    with stand_in(latency_s=0.1, rate_limited=0.3, retry_after_s=0.05, truncated=0.02) as server:
        with pytest.raises(InputError) as stopped:
            run(settings(seeds, out, server, **shared, limits={"budget_usd": 0.2}))
        message, spent = str(stopped.value), spent_usd(server)
        assert "\n" not in message
        assert message.startswith("limits.budget_usd=0.2: used up (0.1")
        assert "of 64 seeds are left undone and nothing is published" in message
        assert not (out / "latest").exists()
        assert 0.12 < spent <= 0.2

        with pytest.raises(InputError, match=r"budget_usd=0\.2: used up"):
            run(settings(seeds, out, server, **shared, limits={"budget_usd": 0.2}))
        assert spent_usd(server) <= 0.2

        whole = run(settings(seeds, out, server, **shared, limits={"budget_usd": 20}))
        assert answered_most(server) == 1
        assert whole.manifest["usd"] + whole.manifest["usd_replayed"] <= spent_usd(server)
    counts = whole.manifest["counts"]
    assert counts["kept"] + counts["rejected"] + counts["dead_letter"] == 64


@pytest.mark.ray
@pytest.mark.slow  # its lower bound is a rate: an idle machine's business
def test_all_actors_together_keep_the_requests_of_a_window_and_those_in_flight(
    ray_cluster: None, seeds: Path, tmp_path: Path
) -> None:
    with stand_in(latency_s=0.02) as server:
        limits = {"requests_per_minute": 3000, "window_s": 3, "in_flight": 20}
        published = run(settings(seeds, tmp_path / "out", server, limits=limits))
        log = server.log()
    assert max(entry["in_flight"] for entry in log) <= 20
    arrivals = sorted(entry["arrived"] for entry in log)
    most = max(sum(0 <= other - first < 3 for other in arrivals) for first in arrivals)
    assert 0.8 * 150 <= most <= 150
    traffic = published.manifest["traffic"]
    assert traffic["answered"] == sum(entry["ended"] == "answered" for entry in log)
    assert traffic["latency_s"]["p50"] >= 0.02


@pytest.mark.ray
def test_the_manifest_says_what_came_to_each_step_and_what_it_stopped(
    ray_cluster: None, seeds: Path, tmp_path: Path
) -> None:
    with stand_in(mistaken=0.3, refusal=0.02) as server:
        manifest = run(settings(seeds, tmp_path / "out", server)).manifest
    funnel = list(manifest["funnel"].values())
    assert funnel[0]["reached"] == 64
    for step, following in itertools.pairwise(funnel):
        assert following["reached"] == step["reached"] - step["rejected"] - step["dead_letter"]
    last = funnel[-1]
    assert manifest["counts"]["kept"] == last["reached"] - last["rejected"] - last["dead_letter"]
    assert sum(step["rejected"] for step in funnel) == manifest["counts"]["rejected"] > 0


# ------------------------------------------------------------------------------------------------- bad input


def one_line(given: SynthesizeSettings) -> str:
    with pytest.raises(InputError) as error:
        run(given)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_without_a_key_it_says_how_many_seeds_need_which_models(no_key: None, seeds: Path, tmp_path: Path) -> None:
    message = one_line(settings(seeds, tmp_path / "out"))
    assert "endpoint.api_key_env=OPENAI_API_KEY: not set" in message
    assert "64 of 64 seeds need requests to gpt-4o-mini" in message
    assert "export OPENAI_API_KEY" in message
    assert "for a local server, set endpoint.base_url to its URL and endpoint.api_key_env=null" in message
    local = one_line(settings(seeds, tmp_path / "out", endpoint={"base_url": "http://localhost:8000/v1"}))
    assert "if http://localhost:8000/v1 needs no key, set endpoint.api_key_env=null" in local


def test_without_a_key_seeds_that_the_journal_answers_are_not_counted(no_key: None, tmp_path: Path) -> None:
    lines = sample.JOURNAL.read_bytes().splitlines(keepends=True)
    partly = tmp_path / "partly.jsonl"
    partly.write_bytes(b"".join(line for line in lines if b'"row": "sleep-01"' not in line))
    given = settings(
        sample.SEEDS,
        tmp_path / "out",
        replay=[str(partly)],
        generator={"model": "bundled-sample"},
        judge={"model": "bundled-sample"},
    )
    assert "1 of 144 seeds need requests to bundled-sample" in one_line(given)


def test_without_a_key_a_journal_that_cannot_be_read_is_named_in_one_line(tmp_path: Path) -> None:
    replayed = tmp_path / "replayed.jsonl"
    replayed.write_bytes(sample.JOURNAL.read_bytes())
    journal = Journal(tmp_path / "journal", [replayed])
    unreadable(replayed)
    models = {"generator": {"model": "bundled-sample"}, "judge": {"model": "bundled-sample"}}
    given = settings(sample.SEEDS, tmp_path / "out", **models)
    source = Source(given)
    with pytest.raises(InputError, match=r"^journal=.*cannot be read \(Is a directory\)$"):
        _require_all_journaled(given, source, 144, source.survey().pool, journal)


def test_bad_settings_are_refused_in_one_line_before_any_work(seeds: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    keyless = {"api_key_env": None}
    assert "seeds=" in one_line(settings(tmp_path / "nowhere.jsonl", out))
    assert "replay=" in one_line(settings(seeds, out, replay=[str(tmp_path / "nowhere")]))
    assert "distractors=64" in one_line(settings(seeds, out, distractors=64))
    assert "endpoint.base_url=localhost" in one_line(settings(seeds, out, endpoint={"base_url": "localhost"}))
    assert "column question is missing" in one_line(settings(seeds, out, columns={"query": "question"}))
    steps = {"judge_positiv": {"model": "o3"}}
    assert "steps.judge_positiv: no such step: did you mean judge_positive?" in one_line(
        settings(seeds, out, endpoint=keyless, steps=steps)
    )
    blocked = tmp_path / "file"
    blocked.touch()
    assert "journal=" in one_line(settings(seeds, out, journal=str(blocked / "journal"), endpoint=keyless))
    assert not any(path.suffix == ".partial" for path in out.iterdir())


def test_limits_that_cannot_be_kept_are_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, seeds: Path, tmp_path: Path
) -> None:
    def refused(**values: Any) -> str:
        return one_line(settings(seeds, tmp_path / "out", endpoint={"api_key_env": None}, **values))

    budget = {"limits": {"budget_usd": 5}}
    assert "judge.max_tokens=null puts no bound" in refused(**{**BOUNDED, "judge": {"model": "o4-mini"}}, **budget)
    unknown = {**BOUNDED, "judge": {"model": "my-own", "max_tokens": 9}}
    assert "no price is known of judge.model=my-own" in refused(**unknown, **budget)
    assert "tokens_per_minute=9000: generator.max_tokens=null" in refused(limits={"tokens_per_minute": 9000})
    assert "prices=" in refused(prices=str(tmp_path / "nowhere.yaml"))
    (tmp_path / "prices.yaml").write_text("gpt-4o-mini: 3\n")
    assert "no price table" in refused(prices=str(tmp_path / "prices.yaml"))
    assert "more_endpoints.0.base_url=ftp" in refused(more_endpoints=[{"base_url": "ftp://x", "api_key_env": None}])


@pytest.mark.ray
def test_answers_in_json_complements_and_repairs_pass_through_the_whole_run(
    ray_cluster: None, seeds: Path, tmp_path: Path
) -> None:
    with stand_in(malformed=0.15) as server:
        models = {"generator": {"model": "a", "structured": True}, "judge": {"model": "b", "structured": True}}
        published = run(settings(seeds, tmp_path / "out", server, complement=True, **models))
        assert answered_most(server) == 1
        answered = len(server.log("answered"))
    kept, rejected, dead = rows_of(published)
    assert len(kept) + len(rejected) + len(dead) == len(ROWS)
    assert published.manifest["counts"]["calls"] == answered
    # Malformed twice in a row: two or three of a hundred requests, eight or ten requests a row.
    assert len(dead) < len(ROWS) / 2
    assert all("malformed answer" in row["error"] for row in dead)
    assert any("repair=1" in row["provenance"]["prompt_version"] for row in kept)
    complements = records.read_raw(published.path / records.COMPLEMENTS_FILE)
    assert [row["id"] for row in complements] == [row["id"] for row in kept]
    assert [row["fault"] for row in complements].count(None) > len(kept) / 2
