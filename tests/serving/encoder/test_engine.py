"""The encoding engine as its callers use it, against the encoder called by itself."""

import asyncio
import pickle
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.tokenizer import Tokens
from infembed_ray.retrieval.updates.write_ahead_log import ChangeError
from infembed_ray.serving import schema
from infembed_ray.serving.encoder.batching import BatchingEngine, DeadlineExceeded, Embedded, QueueFull
from infembed_ray.serving.encoder.engine import EncodingEngine
from tests.modeling import backbones

INSTRUCTIONS = ["For nurses, in plain words.", "no brand names", None]
QUERIES = ["how is aspirin dosed", "bread", "what does a passage about bread say", "words " * 30]


@pytest.fixture(scope="module", params=["modernbert", "qwen2"])
def path(request, tmp_path_factory):
    return backbones.write(request.param, tmp_path_factory.mktemp(request.param))


def load(path, **values):
    return EncodingEngine.load(path, ServeSettings(index="none", **{"dtype": "float32"} | values))


async def test_concurrent_callers_get_the_vectors_of_their_texts(path):
    encoder = InstructionEncoder.from_pretrained(path)
    engine = load(path)
    pairs = [(query, instruction) for query in QUERIES for instruction in INSTRUCTIONS]
    asked = [engine.embed([q, q + " !"], [i] * 2, 60.0) for q, i in pairs]
    asked.append(engine.embed(QUERIES, None))
    *singles, passages = await asyncio.gather(*asked)
    for (query, instruction), embedded in zip(pairs, singles, strict=True):
        tokens = encoder.tokenize_queries([query, query + " !"], [instruction] * 2)
        np.testing.assert_allclose(embedded.vectors, encoder.embed(tokens), atol=1e-5)
        assert embedded.tokens == sum(map(len, tokens))
    np.testing.assert_allclose(passages.vectors, encoder.encode_passages(QUERIES), atol=1e-5)
    counters = engine.batching.counters
    assert (engine.batching.waiting, counters.texts, counters.failed) == (0, 28, 0)
    if encoder.causal:
        assert engine.prefixes is not None
        assert (engine.prefixes.misses, engine.prefixes.hits) == (2, 16 - 2)


async def test_a_request_that_would_wait_too_long_is_rejected_before_tokenising(path, monkeypatch):
    engine = load(path)
    tokenized = []
    monkeypatch.setattr(engine._tokenizer, "tokenize_passages", tokenized.append)
    monkeypatch.setattr(engine.batching, "_wait_s", lambda sequences: 9.0)
    with pytest.raises(QueueFull):
        await engine.embed(["text"], None, timeout_s=10)
    assert (tokenized, engine.batching.counters.refused) == ([], 1)


async def test_the_time_out_includes_tokenising(path, monkeypatch):
    engine = load(path)
    before = engine.batching.counters.texts
    tokenize = engine._tokenizer.tokenize_passages

    def slowly(texts):
        time.sleep(0.05)
        return tokenize(texts)

    monkeypatch.setattr(engine._tokenizer, "tokenize_passages", slowly)
    with pytest.raises(DeadlineExceeded):
        await engine.embed(["late"], None, 0.02)
    assert engine.batching.counters.texts == before
    assert engine.batching.counters.expired == 1
    assert len((await engine.embed(["in time"], None, 60.0)).vectors) == 1


def slow_tokenizer(engine, monkeypatch, pause_s):
    """Make every call of the cutter to the tokenizer slower; returns the numbers of texts of its calls."""
    backend, calls = engine._tokenizer.backend, []

    def encode_batch(texts, **options):
        calls.append(len(texts))
        time.sleep(pause_s)
        return backend.encode_batch(texts, **options)

    slow = SimpleNamespace(
        no_truncation=backend.no_truncation, no_padding=backend.no_padding, encode_batch=encode_batch
    )
    monkeypatch.setattr(engine, "_tokenizer", replace(engine._tokenizer, backend=slow))
    return calls


@pytest.mark.parametrize("texts", [["x " * 20_000], ["short"] * 100], ids=["a long text", "many texts"])
async def test_the_time_out_includes_cutting_which_stops_then(path, monkeypatch, texts):
    engine = load(path)
    calls = slow_tokenizer(engine, monkeypatch, 0.1)
    before = engine.batching.counters.texts
    with pytest.raises(DeadlineExceeded, match=r"not answered within 0\.25 s"):
        await engine.embed(texts, None, 0.25, (32, 8))
    assert len(calls) <= 4
    assert (engine.batching.counters.texts, engine.batching.counters.expired) == (before, 1)
    monkeypatch.undo()
    began = time.monotonic()
    assert (await engine.embed(["in time"], None, 60.0, (32, 8))).chunks == [[0, 7]]
    assert time.monotonic() - began < 5


async def test_a_request_stores_a_limited_number_of_chunks_and_encodes_no_more(path, monkeypatch):
    engine = load(path)
    monkeypatch.setattr(schema, "MAX_DOCUMENTS", 5)
    counted, long = len((await engine.embed(["x " * 60], None, None, (32, 0))).chunks[0]) // 2, "x " * 1_000
    assert 1 < counted <= 5
    before = engine.batching.counters.texts
    with pytest.raises(
        ChangeError, match=r"^documents\.1\.text: .* chunks up to here, and a request stores at most 5; "
    ) as error:
        await engine.embed(["short", long, long], None, None, (32, 0))
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    assert engine.batching.counters.texts == before
    assert len((await engine.embed([long, long], None, None)).vectors) == 2  # not cut


async def test_a_tokenizer_panic_leaves_no_caller_waiting() -> None:
    class Panic(BaseException):
        """As those of Rust come to Python."""

    class Panicking:
        def tokenize_queries(self, texts: list[str], instructions: list[str | None]) -> list[Tokens]:
            return []

        def tokenize_passages(self, texts: list[str]) -> list[Tokens]:
            if "bad" in texts:
                raise Panic("index out of bounds")
            return [Tokens([1, 2]) for _ in texts]

    batching = BatchingEngine(lambda sequences: np.ones((len(sequences), 2), np.float32))
    engine = EncodingEngine(Panicking(), batching)
    asked = [engine.embed([text], None, 5.0) for text in ("a", "bad", "b")]
    good, bad, well = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 5)
    assert isinstance(good, Embedded)
    assert isinstance(well, Embedded)
    assert isinstance(bad, RuntimeError)
    assert "index out of bounds" in str(bad)


def test_another_checkpoint_than_the_planned_one_is_rejected(path):
    with pytest.raises(InputError) as refusal:
        EncodingEngine.load(path, ServeSettings(index="none", dtype="float32"), fingerprint="0123")
    assert refusal.value.faults[0].setting == "model"
