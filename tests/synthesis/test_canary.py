"""Whole runs with a canary and a cheap judge."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from infembed_ray.errors import InputError
from infembed_ray.records import tables
from infembed_ray.synthesis import distributed
from infembed_ray.synthesis.distributed import run
from tests.support.stand_in_llm import stand_in
from tests.synthesis.runs import answered_most, rows_of, settings

ERRORS = "gpt-4o-mini=0.2,o4-mini=0.0"


@pytest.mark.ray
def test_the_run_ends_after_the_canary_and_the_same_command_goes_on_without_paying_twice(
    ray_cluster: None, seeds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(distributed, "this_process", lambda: None)
    with stand_in(latency_s=0.01, mistaken_models=ERRORS, poor=0.2) as server:
        given = settings(
            seeds,
            tmp_path,
            server,
            canary={"seeds": 16, "stop": True},
            cheap_judge={"model": "gpt-4o-mini", "max_tokens": 500, "audit": 0.5},
            actors=1,
            limits={"budget_usd": 1},
            generator={"max_tokens": 500},
            judge={"max_tokens": 500},
        )
        with pytest.raises(
            InputError, match=r"^canary\.stop=true: the run ends after its forecast; nothing is published"
        ):
            run(given)
        answered = len(server.log("answered"))
        assert len({entry["request"] for entry in server.log("answered")}) == answered
        directory = next(tmp_path.glob(".*.partial")) / distributed.CANARY
        recorded = json.loads((directory / "forecast.json").read_text())
        assert recorded["counts"]["seeds"] == 16 == recorded["sampled"]
        assert recorded["counts"]["calls"] == answered
        assert recorded["calls"][0] == pytest.approx(4 * answered)
        assert len(tables.read_raw(directory / tables.KEPT_FILE)) == recorded["counts"]["kept"]
        assert "forecast for 64 seeds from 16: " in capsys.readouterr().out

        canary = given.canary.model_copy(update={"stop": False})  # type: ignore[union-attr]
        published = run(given.model_copy(update={"canary": canary}))
        assert answered_most(server) == 1
        assert published.manifest["canary"]["counts"]["replayed"] == answered
        assert published.manifest["canary"]["usd"] == recorded["usd"]
        assert published.manifest["canary"]["hours"] is None
        counts = published.manifest["counts"]
        assert counts["seeds"] == 64
        assert counts["calls"] + counts["replayed"] == len(server.log("answered"))
    kept, rejected, dead = rows_of(published)
    assert not dead
    rows = [row["provenance"] for row in kept + rejected]
    judged = Counter(frozenset(filter(None, row["judged_by"].values())) for row in rows)
    assert all(judged[frozenset(names)] for names in (("cheap_judge",), ("cheap_judge", "judge"), ("judge",)))
    facts = published.manifest["cheap_judge"]
    audited = [row for row in rows if row["audit"]]
    assert facts["audited"] == len(audited) > 0
    assert sum(facts["settled"].values()) + sum(facts["in_doubt"].values()) == 64
    funnel = published.manifest["funnel"]
    assert funnel["cheap_judge_negative_query"]["reached"] == 64
    ended = Counter(row["step"] for row in rejected)
    assert {step: funnel[step]["rejected"] for step in ended} == ended


@pytest.mark.ray
def test_the_canary_of_a_run_in_batches_is_asked_online_and_forecasts_the_price_of_batches(
    ray_cluster: None, seeds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "this_process", lambda: None)
    with stand_in() as server:
        given = settings(seeds, tmp_path, server, canary={"seeds": 10}, batches={"poll_s": 0.05}, limit=30)
        manifest = run(given).manifest
        assert answered_most(server) == 1
        online = [entry for entry in server.log("answered") if "batch" not in entry]
        assert len(server.log("probed")) == 2  # each model once, though the canary, the batches and the run ask them
    canary = manifest["canary"]
    assert len(online) == canary["counts"]["calls"]
    assert manifest["counts"]["calls"] == 0
    assert manifest["batches"]["answered"] == manifest["counts"]["replayed"] - len(online)
    assert canary["usd"][0] == pytest.approx(30 / 10 * canary["usd_paid"] / 2)
