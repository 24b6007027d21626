"""Whole runs in batches, on a cluster."""

import json
from pathlib import Path
from typing import Any

import pytest

from infembed_ray.config.llm import Endpoint
from infembed_ray.errors import InputError
from infembed_ray.records import tables
from infembed_ray.storage.steps import Published
from infembed_ray.synthesis import batch_api
from infembed_ray.synthesis.distributed import run
from tests.support.stand_in_llm import StandIn, stand_in
from tests.synthesis.batch_checks import kill_when, stages
from tests.synthesis.batches import MISTAKEN, SEEDS, settings
from tests.synthesis.runs import answered_most

pytestmark = pytest.mark.integration


@pytest.fixture
def seeds_file(tmp_path: Path) -> Path:
    file = tmp_path / "seeds.jsonl"
    file.write_text("".join(json.dumps(vars(seed)) + "\n" for seed in SEEDS), encoding="utf-8")
    return file


def rows_but_prices(published: Published) -> list[list[dict[str, Any]]]:
    files = (tables.KEPT_FILE, tables.REJECTED_FILE, tables.DEAD_LETTER_FILE)
    rows = [tables.read_raw(published.path / file) for file in files]
    for row in (row for part in rows for row in part):
        row["provenance"].pop("usd")
        row["error"] = row.get("error", "").split(" [http")[0]  # the address of a response, which a batch lacks
    return rows


@pytest.mark.ray
def test_a_run_in_batches_publishes_the_same_rows_and_pays_for_nothing_twice(
    ray_cluster: None, seeds_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_api, "ATTEMPTS", 1)
    faults = {"batch_expired": 0.5, "batch_fault": 0.1, "bad_request": 0.01}
    with stand_in(mistaken=MISTAKEN, **faults) as server:
        batches = {"rest": "online"}
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
    ray_cluster: None, seeds_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_api, "ATTEMPTS", 1)
    with stand_in(batch_expired=0.1) as server:
        batches = {"rest": "dead_letter"}
        given = settings(server, seeds=str(seeds_file), output=str(tmp_path / "out"), batches=batches)
        done = run(given.model_copy(update={"max_dead_letters": 1.0}))
        assert all("batch" in entry for entry in server.log("answered"))
    dead = tables.read_raw(done.path / tables.DEAD_LETTER_FILE)
    assert len(dead) == done.manifest["batches"]["unanswered"]["batch_expired"] > 0
    assert {row["error"] for row in dead} == {
        "no batch answered: batch_expired: This request could not be executed in time."
    }


def test_a_pending_batch_is_not_asked_online(seeds_file: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with stand_in(batch_s=0.3) as server:
        kill_when(server, journal, lambda: stages(journal) == ["submitted"])
        server.release()
        given = settings(server, seeds=str(seeds_file), output=str(tmp_path / "out"), journal=str(journal))
        with pytest.raises(InputError, match=r"batches=null: 1 batches of an earlier run .* set batches=\{\}"):
            run(given.model_copy(update={"batches": None}))


def at(server: StandIn) -> Endpoint:
    return settings(server).endpoint
