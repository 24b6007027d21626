"""An index in Milvus Lite, built on Ray and served over HTTP."""

import asyncio
import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infembed_ray.cli.main import main
from infembed_ray.config.retrieval import IndexSettings
from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.retrieval import distributed as building
from infembed_ray.retrieval.answers import ScoreQuery
from infembed_ray.retrieval.filters import FilterError
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.milvus import Milvus, MilvusAddress
from infembed_ray.retrieval.updates.live_shard import ShardQuery
from infembed_ray.retrieval.updates.write_ahead_log import Delete, Put
from infembed_ray.retrieval.versions import IndexFacts
from infembed_ray.serving.distributed import run, serving
from infembed_ray.serving.plan import Plan
from infembed_ray.serving.release import IndexArguments
from infembed_ray.serving.replicas import StoreSearch
from infembed_ray.serving.service import Document, ReplicaLost
from tests.serving.http_client import ask, found
from tests.serving.indexes import AGAIN, PASSAGES, YEARS
from tests.support.files import write_jsonl
from tests.support.milvus import milvus_lite
from tests.support.ports import free_port

TEXT = "The Kalmar Union joined Denmark, Norway and Sweden under one crown in 1397."


@pytest.mark.slow
def test_an_index_in_milvus_is_built_served_changed_and_rolled_back(
    tmp_path: Path,
    minilm: str,
    settings: ServeSettings,
    ray_cluster: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with milvus_lite(tmp_path / "milvus") as server:
        address = f"{server}/passages"
        rows = [{"id": id, "text": text, **YEARS[id]} for id, text in PASSAGES.items()]
        given: dict[str, Any] = {"model": minilm, "output": address, "factory": "FLAT", "work": str(tmp_path / "work")}
        given |= {"corpus": str(write_jsonl(tmp_path / "one.jsonl", rows)), "metadata": {"year": "integer"}}
        index = IndexSettings(**given)

        with monkeypatch.context() as patch:  # interrupted when all is encoded
            patch.setattr(building, "_insert", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                building.run(index)
        engine = Milvus(MilvusAddress.parse(address, "index"))
        assert engine.versions() == []
        with pytest.raises(InputError, match="no index there"):
            Plan.resolve(settings.model_copy(update={"index": address}))
        with monkeypatch.context() as patch:
            patch.setattr(building, "_MAX_BLOCKS", 0)  # nothing is encoded again, so no dataset is made
            first = building.run(index)
        assert first.fresh
        assert first.address == address
        assert not building.run(index).fresh

        api_settings = settings.model_copy(update={"index": address})
        with serving(api_settings) as api:
            _search_and_change(api, first.manifest["identity"])
            more = [*rows, *({"id": id, "text": text, "year": None} for id, text in AGAIN.items())]
            corpus = str(write_jsonl(tmp_path / "two.jsonl", more))
            second = building.run(index.model_copy(update={"corpus": corpus}))
            assert _version(api) == first.manifest["identity"]  # the alias is read when `serve` is run
            run(api_settings)
            assert _version(api) == second.manifest["identity"]
            assert "asthma-costs-again" in found(api, "asthma costs", top_k=5)
            assert main(["index", "use", address, first.manifest["identity"][:6]]) == 0
            run(api_settings)
            assert _version(api) == first.manifest["identity"]
        assert main(["index", "versions", address]) == 0
        listed = capsys.readouterr().out.splitlines()[-2:]
        assert [line.split()[-1] for line in listed] == ["12", "24"]
        assert listed[0].startswith("latest")


def _search_and_change(api: str, version: str) -> None:
    status, answer, _ = ask(f"{api}/v1/search", {"query": "asthma", "top_k": 12})
    assert status == 200, answer
    assert answer["index_version"] == version
    body = {"query": "asthma", "instruction": "For clinicians: no history.", "top_k": 12, "explain": True}
    status, explained, _ = ask(f"{api}/v1/search", body)
    assert status == 200, explained
    passages = explained["explanation"]["passages"]
    assert [passage["id"] for passage in passages] == [hit["id"] for hit in explained["hits"]]
    np.testing.assert_allclose([p["score"] for p in passages], [h["score"] for h in explained["hits"]], atol=1e-5)
    assert {p["id"]: p["rank_without"] for p in passages} == {
        hit["id"]: rank for rank, hit in enumerate(answer["hits"], start=1)
    }
    assert {hit["id"]: (hit["text"], hit["metadata"]) for hit in answer["hits"]} == {
        id: (text, YEARS[id]) for id, text in PASSAGES.items()
    }
    assert found(api, "asthma", filter={"year": {"lt": 1900}})[0] == "asthma-history"
    document = {"id": 'history/"kalmar"', "text": TEXT, "metadata": {"year": 1397}}
    status, answer, _ = ask(f"{api}/v1/documents", {"documents": [document]}, "PUT")
    assert status == 200, answer
    searched = ask(f"{api}/v1/search", {"query": "Kalmar Union", "top_k": 1})[1]
    assert searched["hits"][0]["id"] == document["id"]
    assert searched["sequence"] >= answer["sequence"]
    kept = ask(f"{api}/v1/documents/history/%22kalmar%22")[1]
    assert (kept["text"], kept["metadata"]) == (TEXT, {"year": 1397})
    assert ask(f"{api}/v1/documents", {"ids": [document["id"]]}, "DELETE")[0] == 200
    assert document["id"] not in found(api, "Kalmar Union")
    assert ask(f"{api}/v1/documents/history/%22kalmar%22")[0] == 404
    long = {"documents": [{"id": "long", "text": "é" * 40_000}]}
    status, answer, _ = ask(f"{api}/v1/documents", long, "PUT")
    assert (status, answer["error"]["param"]) == (400, "documents")
    assert "Milvus stores 65535" in answer["error"]["message"]
    assert ask(f"{api}/readyz")[0] == 200


def _version(api: str) -> str:
    return str(ask(f"{api}/v1/search", {"query": "x", "top_k": 1})[1]["index_version"])


@pytest.mark.integration
def test_a_replica_answers_as_a_shard_does_and_is_lost_with_its_engine(tmp_path: Path, settings: ServeSettings) -> None:
    vectors = np.eye(3, 4, dtype=np.float32)
    facts = IndexFacts(
        encoder="e",
        model="m",
        template="t",
        dimension=4,
        passages=0,
        metadata={"year": "integer"},
        shards=[],
        lineage="l",
    )

    async def answers(port: int, address: str) -> None:
        arguments = IndexArguments(index=address, version="a" * 12, settings=settings)
        replica = StoreSearch(arguments, 0)
        await replica.change([Put(f"d{n}", f"text {n}", vectors[n], {"year": 2000 + n}) for n in range(3)])
        await replica.change([Delete("d0")])
        asked = [
            ShardQuery(vectors[1:], 1),
            ShardQuery(vectors[:1], 5, {"year": 2002}),
            ShardQuery(vectors, 1, {"yaer": 1}),
        ]
        both, filtered, wrong = await replica.search_many(asked)
        assert [[hit.id for hit in hits] for hits in both.hits] == [["d1"], ["d2"]]
        assert [(hit.id, hit.text, hit.metadata) for hit in filtered.hits[0]] == [("d2", "text 2", {"year": 2002})]
        assert isinstance(wrong, FilterError)
        some = ScoreQuery(["d0", "d2", "d1"], vectors[1:])
        scores = await replica.scores_many([some, ScoreQuery(["d1"], vectors[:2])])
        np.testing.assert_array_equal(scores[0], [[np.nan, 0, 1], [np.nan, 1, 0]])
        np.testing.assert_array_equal(scores[1], [[0], [1]])
        assert await replica.document("d1") == Document("d1", "text 1", {"year": 2001})
        assert await replica.document("d0") is None
        assert await replica.ready()
        stopped.close()
        with pytest.raises(ReplicaLost):
            await replica.search_many(asked[:1])
        with milvus_lite(tmp_path, port):
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:  # gRPC waits between two attempts to connect
                with contextlib.suppress(ReplicaLost):
                    assert (await replica.search_many(asked[:1]))[0].hits == both.hits
                    return
                await asyncio.sleep(0.2)
            pytest.fail("the replica does not connect again")

    with contextlib.ExitStack() as stopped:
        port = free_port()
        address = f"{stopped.enter_context(milvus_lite(tmp_path, port))}/docs"
        engine = Milvus(MilvusAddress.parse(address, "index"))
        engine.begin("a" * 12, facts.metadata, 4, "FLAT")
        engine.finish("a" * 12, {"created": "2026", "index": facts.as_json()})
        asyncio.run(answers(port, address))


@pytest.mark.integration
def test_a_foreign_encoder_and_several_writers_are_refused(
    tmp_path: Path, minilm: str, settings: ServeSettings
) -> None:
    with milvus_lite(tmp_path) as server:
        served = settings.model_copy(update={"index": f"{server}/passages"})
        described = Plan.resolve(settings)
        engine = Milvus(MilvusAddress.parse(served.index, "index"))
        facts = replace(Index.describe(settings.index).facts, shards=[], passages=0)
        for identity, encoder in (("a" * 12, "0123"), ("b" * 12, facts.encoder)):
            engine.begin(identity, facts.metadata, facts.dimension, None)
            made = replace(facts, encoder=encoder)
            engine.finish(identity, {"created": identity, "index": made.as_json()})
            if encoder == "0123":
                with pytest.raises(InputError, match=r"index=milvus\+http.*built by another encoder \(0123"):
                    Plan.resolve(served)
        plan = Plan.resolve(served)
        assert (plan.release.default.index.index, plan.release.default.index.version) == (served.index, "b" * 12)
        assert plan.release.default.changes is None
        assert plan.release.default.shards == ("store",)
        assert plan.release.encoders.keys() == described.release.encoders.keys()
        with pytest.raises(InputError, match=r"shard_replicas=2: .* takes one writer at a time"):
            Plan.resolve(served.model_copy(update={"shard_replicas": 2}))
