"""The replicas' own logic, and shards on several nodes; `test_distributed` runs all replicas in Serve."""

import logging
import math
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.retrieval import shard_files
from infembed_ray.retrieval.index import Index
from infembed_ray.retrieval.shard_files import FileChecksums, ShardFacts
from infembed_ray.retrieval.updates.write_ahead_log import ChangeError, Delete, Put
from infembed_ray.retrieval.versions import change_log
from infembed_ray.serving.encoder.batching import Counters, Embedded
from infembed_ray.serving.http.errors import EXCEPTION_HANDLERS
from infembed_ray.serving.release import ApiArguments, IndexArguments, ReleaseSpec
from infembed_ray.serving.replicas import EncoderReplica, Ingress, MetricsReporter, ShardSearch, encoder_metrics
from infembed_ray.serving.routing.encoder_calls import EncoderInputs
from infembed_ray.storage.object_store import SCRATCH, Folder
from infembed_ray.storage.steps import output_files
from tests.retrieval.test_index import write_index
from tests.retrieval.vectors import unit_vectors
from tests.serving.routing.test_blue_green import World

SETTINGS = ServeSettings(index="index")


class Engine:
    """An engine whose vectors are the lengths of the texts."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def embed(
        self, texts: list[str], instructions: list[str | None] | None, timeout_s: float, chunks: tuple[int, int] | None
    ) -> Embedded:
        self.calls.append((texts, instructions, chunks))
        return Embedded(np.array([[len(text)] for text in texts], np.float32), sum(map(len, texts)))


def encoder_replica(engine: Any) -> Any:
    encoder: Any = object.__new__(EncoderReplica)
    encoder._engine = engine
    encoder._metrics = type("Silent", (), {"start": lambda self: None})()
    return encoder


async def test_requests_of_one_call_are_embedded_separately() -> None:
    engine = Engine()
    items = [EncoderInputs(["a", "bb"], [None, "I"]), EncoderInputs(["ccc", "d"], None, (64, 8))]
    answers = await encoder_replica(engine).embed_many(items, 1.0)
    assert engine.calls == items  # otherwise they would share one place in its queue
    assert [answer.vectors.ravel().tolist() for answer in answers] == [[1, 2], [3, 1]]


async def test_the_api_reports_what_the_encoder_refuses_to_store() -> None:
    class Refusing(Engine):
        async def embed(self, *_: Any) -> Embedded:
            raise ChangeError("documents.0.text: too many chunks")

    (fault,) = await encoder_replica(Refusing()).embed_many([EncoderInputs(["a"], None, (64, 8))], 1.0)
    error = EXCEPTION_HANDLERS[type(fault)](None, fault)
    assert (error.status, error.error.param, str(error)) == (400, "documents", "documents.0.text: too many chunks")


async def test_an_error_that_cannot_be_unpickled_becomes_its_message(caplog: pytest.LogCaptureFixture) -> None:
    class OnlyHere(Exception):
        def __init__(self, one: int, other: int) -> None:  # does not survive pickling
            super().__init__("both")

    class Faulty(Engine):
        async def embed(self, texts: list[str], *rest: Any) -> Embedded:
            if texts == ["a"]:
                raise OnlyHere(1, 2)
            return await super().embed(texts, *rest)

    items = [EncoderInputs(["a"], None), EncoderInputs(["bb"], [None])]
    fault, well = await encoder_replica(Faulty()).embed_many(items, 1.0)
    assert type(fault) is RuntimeError
    assert str(pickle.loads(pickle.dumps(fault))) == "OnlyHere: both"
    assert well.vectors.tolist() == [[2]]
    assert "OnlyHere" in caplog.text  # in full


def test_an_ingress_replica_without_the_configured_keys_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFEMBED_API_KEYS", raising=False)
    replica: Any = Ingress.__mro__[1]  # without Serve's wrapper
    with pytest.raises(RuntimeError, match="would be open"):
        replica(ApiArguments(locked=True, settings=SETTINGS), None)


@pytest.fixture
def requests(bucket: str) -> Iterator[list[str]]:
    """Method and path of the requests to the object store."""
    found: list[str] = []

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            request = re.search(r"([A-Z]+ [^ ?]+)\S* HTTP", record.getMessage())
            assert request is not None
            found.append(request[1])

    server, notes = logging.getLogger("werkzeug"), Notes()
    level = server.level
    server.addHandler(notes)
    server.setLevel(logging.INFO)
    yield found
    server.setLevel(level)
    server.removeHandler(notes)


@pytest.fixture
def stored(bucket: str, tmp_path: Path) -> Folder:
    """An index of two shards in an object store."""
    root = write_index(tmp_path / "v1", unit_vectors(400, 16), 2)
    folder = Folder.open(f"{bucket}/{tmp_path.name}/v1", "index")
    for file in output_files(root):
        folder.upload(file, file.relative_to(root).as_posix())
    return folder


def shard_replica(folder: Folder, number: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> ShardSearch:
    """A replica that does not follow the log."""
    monkeypatch.setattr(ShardSearch, "_follow_log", lambda self: None)
    monkeypatch.setenv(SCRATCH, str(cache))
    return ShardSearch(IndexArguments(index=folder.uri, version="v1", settings=SETTINGS), number)


async def test_a_replica_reads_only_its_own_shard_in_blocks_and_a_second_start_reads_none(
    stored: Folder, requests: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "BLOCK", 4096)
    facts = Index.describe(stored.uri).facts.shards[1]
    blocks = {name: math.ceil(of_file.size / 4096) for name, of_file in facts.checksums.items()}
    measured = {name: FileChecksums.measure(tmp_path / "v1" / facts.name / name) for name in facts.checksums}
    monkeypatch.setattr(ShardFacts, "from_json", lambda values: replace(facts, checksums=measured, name=values["name"]))
    requests.clear()
    replica = shard_replica(stored, 1, tmp_path / "cache", monkeypatch)
    answer = await replica.document("p1")
    assert (answer.text, await replica.document("p0")) == ("text 1", None)
    read = Counter(request for request in requests if request.startswith("GET") and "/shard-" in request)
    path = stored.base.removeprefix("s3:/")
    assert read == {f"GET {path}/{facts.name}/{name}": count for name, count in blocks.items()}
    assert max(blocks.values()) > 3

    requests.clear()
    shard_replica(stored, 1, tmp_path / "cache", monkeypatch)
    assert [request for request in requests if "/shard-" in request] == []
    assert f"GET {path}/manifest.json" in requests
    assert len(requests) <= 12


def test_a_replica_of_a_damaged_shard_does_not_start_and_names_the_file(
    stored: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.upload(tmp_path / "v1" / "manifest.json", "shard-00000/index.faiss")
    with pytest.raises(InputError, match=rf"^index={stored}: shard-00000/index.faiss is corrupted"):
        shard_replica(stored, 0, tmp_path / "cache", monkeypatch)
    assert shard_replica(stored, 1, tmp_path / "cache", monkeypatch) is not None
    with pytest.raises(InputError, match=r"holds version v1 now, .* start `serve` again"):
        ShardSearch(IndexArguments(index=stored.uri, version="other", settings=SETTINGS), 0)


async def test_a_document_is_read_after_every_acknowledged_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShardSearch, "_follow_log", lambda self: None)
    root = write_index(tmp_path / "v1", unit_vectors(20, 16), 1)
    arguments = IndexArguments(index=str(root), version="v1", settings=SETTINGS)
    replica = ShardSearch(arguments, 0)
    log = change_log(root, Index.describe(str(root)).facts)
    for number in range(30):
        log.append([Put("p1", f"new {number}", unit_vectors(1, 16)[0], {}), Delete("p2")])
        assert (await replica.document("p1")).text == f"new {number}"
    assert (await replica.document("p2")) is None
    (tmp_path / "changes").rename(tmp_path / "lost")  # the shard answers from what it has applied
    assert (await replica.document("p1")).text == "new 29"


def test_metrics_of_an_encoder_show_what_runs_it_and_what_it_did() -> None:
    prefixes = SimpleNamespace(bytes=7, hits=3, misses=1)
    batching = SimpleNamespace(waiting=2, counters=Counters(texts=5))
    engine: Any = SimpleNamespace(dtype="bfloat16", prefixes=prefixes, batching=batching)
    value = MetricsReporter(lambda: encoder_metrics(engine)).registry.get_sample_value
    assert value("infembed_encoder_dtype", {"dtype": "bfloat16"}) == 1
    assert value("infembed_encoder_texts_total") == 5
    assert (value("infembed_encoder_waiting"), value("infembed_encoder_prefix_bytes")) == (2, 7)
    assert value("infembed_encoder_prefix_hits_total") == 3


def test_metrics_of_an_ingress_show_its_query_caches_and_collections(tmp_path: Path) -> None:
    replica: Any = Ingress.__mro__[1]  # without Serve's wrapper
    ingress = replica(ApiArguments(locked=False, settings=SETTINGS), None)
    value = ingress._reporter.registry.get_sample_value
    assert value("infembed_query_cache_hits_total") is None  # no release yet
    spec = ReleaseSpec(api="a", collections={"index": World(tmp_path).spec})
    encoder = SimpleNamespace(query_cache=SimpleNamespace(bytes=9, hits=2, misses=1))
    ingress._served = spec, {"index": SimpleNamespace(encoder=encoder, reranker=None)}
    assert value("infembed_query_cache_hits_total") == 2
    assert value("infembed_query_cache_bytes") == 9
    labels = {"collection": "index", "release": spec.fingerprint, "index_version": "v1"}
    assert value("infembed_collection_info", labels | {"application": spec.default.index.application}) == 1
