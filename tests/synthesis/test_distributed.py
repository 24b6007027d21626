import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from infembed_ray.cli import main as cli
from infembed_ray.config.synthesis import SynthesizeSettings
from infembed_ray.errors import InputError
from infembed_ray.llm.journal import Journal
from infembed_ray.llm.journal_store import directory_of
from infembed_ray.quickstart import sample
from infembed_ray.records import tables
from infembed_ray.storage import steps
from infembed_ray.storage.object_store import SCRATCH, Folder
from infembed_ray.storage.steps import Published
from infembed_ray.synthesis import distributed, preflight
from infembed_ray.synthesis.distributed import run
from tests.support import faulty_store, object_store
from tests.support.stand_in_llm import StandIn, stand_in
from tests.support.waiting import wait_until
from tests.synthesis.runs import FILES, ROWS, Held, alive, answered_most, rows_of, settings


@pytest.fixture(autouse=True)
def no_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let actors use Ray's idle workers: on a cluster of others they do not drain, which costs a new process."""
    monkeypatch.setenv("RAY_ADDRESS", "auto")


@pytest.fixture(scope="module")
def store(bucket: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[faulty_store.Proxy]:
    with pytest.MonkeyPatch.context() as patch, faulty_store.proxy() as proxy:
        patch.setenv(SCRATCH, str(tmp_path_factory.mktemp("scratch")))
        yield proxy


@pytest.fixture(scope="module")
def ray_cluster(store: faulty_store.Proxy, ray_cluster: None) -> None:
    """A cluster whose workers know the object store."""


def journal_at(kind: str, output: Path) -> tuple[str, Path]:
    """Return a new journal, and the directory of this machine with the segments that are being written."""
    if kind == "directory":
        return str(output / "journal"), output / "journal"
    folder = Folder(f"s3://{object_store.BUCKET}/{output.parent.name}/journal")
    return folder.uri, directory_of(folder)


def one_line(given: SynthesizeSettings) -> str:
    with pytest.raises(InputError) as error:
        run(given)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_the_budget_is_read_while_no_other_run_can_spend_it(
    seeds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    model = {"max_tokens": 64}
    given = settings(seeds, tmp_path, limits={"budget_usd": 1}, generator=model, judge=model)

    def begin_another_run(*_: object) -> float:
        with preflight.prepare(given)[2].publish():
            raise AssertionError("two runs write one output")

    monkeypatch.setattr(distributed.budget, "resume", begin_another_run)
    assert "has been writing this output" in one_line(given)


def test_without_a_key_the_answers_of_all_nodes_are_uploaded_before_the_journal_is_read(
    no_key: None, bucket: str, seeds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    settled: list[Any] = []
    monkeypatch.setattr(distributed, "_settle_journal", settled.append)
    assert "OPENAI_API_KEY" in one_line(settings(seeds, tmp_path / "out", journal=f"{bucket}/no-key"))
    assert settled == [Folder(f"{bucket}/no-key")]


# ------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.ray
def test_a_finished_journal_needs_no_key_and_no_endpoint(
    ray_cluster: None, no_key: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This includes a run with a limit: distractors come from the whole file, so the judge's requests do not change."""
    arguments = [
        *("synthesize", f"seeds={sample.SEEDS}", f"output={tmp_path}", f"replay=[{sample.JOURNAL}]", "limit=30"),
        *("generator.model=bundled-sample", "judge.model=bundled-sample"),
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
        first = run(settings(seeds, tmp_path / "out", server, max_dead_letters=1.0))
        answered = len(server.log("answered"))
        # A second output: the journal answers everything that the endpoint answered.
        same = {"journal": str(tmp_path / "out" / "journal"), "max_dead_letters": 1.0}
        again = run(settings(seeds, tmp_path / "again", server, actors=1, **same))
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
def test_a_model_that_refuses_every_request_stops_the_run_and_paid_answers_are_kept(
    ray_cluster: None, seeds: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with stand_in(refused_model="o4-mini") as server:
        message = one_line(settings(seeds, out, server, in_flight=4, actors=1))
        refused, answered = server.log("bad_request"), server.log("answered")
    assert (
        "refuses every request to o4-mini, also a short question (HTTP 400: This request is not acceptable. ["
        in message
    )
    assert "nothing is published" in message
    assert not (out / "latest").exists()
    assert len(refused) < 64
    assert len(Journal(out / "journal")) == len(answered)


@pytest.mark.ray
def test_a_run_that_keeps_nothing_fails_and_leaves_its_rejected_rows(
    ray_cluster: None, seeds: Path, tmp_path: Path
) -> None:
    with stand_in(mistaken=1.0) as server:
        message = one_line(settings(seeds, tmp_path, server, limit=9, max_dead_letters=1))
    assert message.startswith("0 of 9 seeds were kept (")
    assert "step judge_negative_query: the judge picked" in message
    assert not (tmp_path / "latest").exists()
    directory = Path(message.partition(" are in ")[2].partition(",")[0])
    rows = [row for file in FILES for row in tables.read_raw(directory / file)]
    assert len(rows) == 9


PRICES = "as_of: 2026-01-01\nmodels: {gpt-4o-mini: [1.0, 2.0], o4-mini: [10.0, 40.0]}\n"
BOUNDED = {"generator": {"model": "gpt-4o-mini", "max_tokens": 150}, "judge": {"model": "o4-mini", "max_tokens": 50}}


def spent_usd(server: StandIn) -> float:
    """Return the server's own count, including answers that never arrived."""
    price = {"gpt-4o-mini": (1e-6, 2e-6), "o4-mini": (10e-6, 40e-6)}
    return sum(
        price[entry["model"]][0] * entry["prompt_tokens"] + price[entry["model"]][1] * entry["completion_tokens"]
        for entry in server.log()
        if "prompt_tokens" in entry
    )


@pytest.mark.ray
def test_all_actors_keep_the_budget_and_a_higher_budget_resumes(ray_cluster: None, seeds: Path, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(PRICES)
    out, shared = tmp_path / "out", {**BOUNDED, "prices": str(tmp_path / "prices.yaml"), "actors": 2, "in_flight": 16}
    with stand_in(latency_s=0.1, rate_limited=0.3, retry_after_s=0.05, truncated=0.02) as server:
        with pytest.raises(InputError) as stopped:
            run(settings(seeds, out, server, **shared, limits={"budget_usd": 0.2}))
        message, spent = str(stopped.value), spent_usd(server)
        assert "\n" not in message
        assert message.startswith("limits.budget_usd=0.2: used up (0.1")
        assert "of 64 seeds are left undone and nothing is published" in message
        assert not (out / "latest").exists()
        assert 0.12 < spent <= 0.2

        whole = run(settings(seeds, out, server, **shared, limits={"budget_usd": 20}))
        assert answered_most(server) == 1
        assert whole.manifest["usd"] + whole.manifest["usd_replayed"] <= spent_usd(server)
    counts = whole.manifest["counts"]
    assert counts["kept"] + counts["rejected"] + counts["dead_letter"] == 64


# ------------------------------------------------------------------------------------------------- crashes


@pytest.fixture(scope="module")
def uninterrupted(ray_cluster: None, seeds: Path, tmp_path_factory: pytest.TempPathFactory) -> Published:
    """An undisturbed run."""
    with stand_in(mistaken=0.2) as server:
        return run(settings(seeds, tmp_path_factory.mktemp("uninterrupted"), server))


@pytest.mark.ray
@pytest.mark.parametrize("kind", [pytest.param("directory", marks=pytest.mark.slow), "object store"])
def test_a_killed_actor_is_replaced_without_repeating_an_answered_request(
    uninterrupted: Published, seeds: Path, tmp_path: Path, kind: str
) -> None:
    killed: list[int] = []
    journal, segments = journal_at(kind, tmp_path / "out")

    def kill_one(server: StandIn) -> None:
        with Held(server, segments, answers=100) as actors:
            os.kill(actors[0], signal.SIGKILL)
            wait_until(lambda: not alive(actors[0]))
            time.sleep(1)  # until the server has seen the dead actor's connections close
            killed.append(actors[0])

    with stand_in(latency_s=0.05, jitter_s=0.05, mistaken=0.2) as server:
        killer = threading.Thread(target=kill_one, args=(server,))
        killer.start()
        patient = {"timeout_s": 60}  # an answer that comes after its time-out would be in no journal
        published = run(settings(seeds, tmp_path / "out", server, journal=journal, endpoint=patient))
        killer.join()
        assert len(killed) == 1
        assert answered_most(server) == 1
    assert rows_of(published) == rows_of(uninterrupted)


@pytest.mark.ray
def test_the_death_of_the_coordinator_ends_the_run_with_one_line_and_the_journal_resumes_it(
    ray_cluster: None, seeds: Path, tmp_path: Path
) -> None:
    def kill_it(server: StandIn) -> None:
        wait_until(lambda: len(server.log("answered")) >= 50)
        [name] = [name for name in ray.util.list_named_actors() if name.startswith("synthesis-limits-")]
        ray.kill(ray.get_actor(name))

    with stand_in(latency_s=0.05, jitter_s=0.05) as server:
        killer = threading.Thread(target=kill_it, args=(server,))
        killer.start()
        message = one_line(settings(seeds, tmp_path, server, limits={"requests_per_minute": 10**6}))
        killer.join()
        assert "run the same command again, the journal resumes" in message
        assert run(settings(seeds, tmp_path, server)).manifest["counts"]["replayed"] >= 50


@pytest.mark.ray
def test_journal_and_output_in_an_object_store_give_the_same_files_and_any_number_of_actors_resumes(
    uninterrupted: Published, store: faulty_store.Proxy, seeds: Path, tmp_path: Path
) -> None:
    output = Folder(f"s3://{object_store.BUCKET}/whole")

    def refuse_writes_for_a_while(server: StandIn) -> None:
        wait_until(lambda: len(server.log("answered")) >= 50)
        store.decide = faulty_store.writes_refused
        time.sleep(2)
        store.decide = lambda request: faulty_store.FORWARD

    with stand_in(latency_s=0.05, jitter_s=0.05, mistaken=0.2) as server:
        refuser = threading.Thread(target=refuse_writes_for_a_while, args=(server,))
        refuser.start()
        first = run(settings(seeds, output.uri, server, journal_upload_s=0.2))
        refuser.join()
        shutil.rmtree(os.environ[SCRATCH])  # another machine
        again = run(settings(seeds, tmp_path, server, journal=f"{output}/journal", actors=3))
        assert answered_most(server) == 1
        answered = len(server.log("answered"))
    assert (first.manifest["counts"]["calls"], again.manifest["counts"]["replayed"]) == (answered, answered)
    assert {f"{first.manifest['identity']}/{file}" for file in FILES} < output.entries().keys()
    stored = steps.resolve_input(output.uri, "output")
    for file in FILES:
        assert (stored / file).read_bytes() == (uninterrupted.path / file).read_bytes()
        assert (again.path / file).read_bytes() == (uninterrupted.path / file).read_bytes()


@pytest.mark.ray
def test_too_many_dead_letters_publish_nothing_until_the_share_is_raised(
    ray_cluster: None, seeds: Path, tmp_path: Path
) -> None:
    with stand_in(bad_request=0.05) as server:
        with pytest.raises(InputError) as stopped:
            run(settings(seeds, tmp_path, server, limit=60))
        said = str(stopped.value)
        assert re.match(r"max_dead_letters=0.1: \d+ of 60 seeds \(\d+\.\d%\) are dead letters", said)
        assert re.search(r"\d+ x \w+: HTTP 400: This request is not acceptable\.", said)
        assert not (tmp_path / "latest").exists()
        answered = len(server.log("answered"))
        published = run(settings(seeds, tmp_path, server, limit=60, max_dead_letters=0.9))
        assert len(server.log("answered")) == answered
    counts = published.manifest["counts"]
    assert counts["dead_letter"] == len(rows_of(published)[2]) > 6
    assert counts["kept"] + counts["rejected"] + counts["dead_letter"] == 60
