"""The encoding engine as its callers use it, against the encoder called by itself."""

import asyncio
import time

import numpy as np
import pytest

from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.tokenizer import Tokens
from infembed_ray.serving.encoder.batching import BatchingEngine, DeadlineExceeded, Embedded, EmptySequence, QueueFull
from infembed_ray.serving.encoder.engine import EncodingEngine
from tests.modeling import backbones

INSTRUCTIONS = ["For nurses, in plain words.", "no brand names", None]
QUERIES = ["how is aspirin dosed", "bread", "what does a passage about bread say", "words " * 30]


@pytest.fixture(scope="module", params=["modernbert", "qwen2"])
def path(request, tmp_path_factory):
    return backbones.write(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def load(path, **values):
    return EncodingEngine.load(path, ServeSettings(index="none", **{"dtype": "float32"} | values))


def test_concurrent_callers_get_the_vectors_of_their_texts(path):
    encoder = InstructionEncoder.from_pretrained(path)

    async def run():
        engine = load(path, batch_tokens=512)
        pairs = [(query, instruction) for query in QUERIES for instruction in INSTRUCTIONS]
        asked = [engine.embed([q, q + " !"], "query", i, 60.0) for q, i in pairs]
        asked.append(engine.embed(QUERIES, "passage"))
        asked.append(engine.embed_queries(*map(list, zip(*pairs, strict=True))))
        *singles, passages, together = await asyncio.gather(*asked)
        for (query, instruction), found in zip(pairs, singles, strict=True):
            tokens = encoder.tokenize_queries([query, query + " !"], [instruction] * 2)
            np.testing.assert_allclose(found.vectors, encoder.embed(tokens), atol=1e-5)
            assert found.tokens == sum(map(len, tokens))
        np.testing.assert_allclose(passages.vectors, encoder.encode_passages(QUERIES), atol=1e-5)
        queries, instructions = map(list, zip(*pairs, strict=True))
        np.testing.assert_allclose(together.vectors, encoder.encode_queries(queries, instructions), atol=1e-5)

        facts = engine.facts
        assert facts.candidate.runtime in ("torch", "onnx")
        assert (facts.waiting, facts.counters.texts, facts.counters.failed) == (0, 40, 0)
        assert 0 < facts.counters.batches <= 40
        assert facts.counters.seconds > 0
        if encoder.causal:
            assert facts.prefix_misses == 2
            assert facts.prefix_hits == 16 + 8 - 2
            assert facts.prefix_bytes > 0

    asyncio.run(run())


def test_token_arrays_are_embedded_as_the_text_they_decode_to(path):
    async def run():
        engine = load(path, runtime="torch")
        ids = InstructionEncoder.from_pretrained(path).tokenizer("how is aspirin dosed")["input_ids"]
        from_ids = await engine.embed([ids, ids], "query", INSTRUCTIONS[0])
        from_text = await engine.embed(["how is aspirin dosed"] * 2, "query", INSTRUCTIONS[0])
        np.testing.assert_allclose(from_ids.vectors, from_text.vectors, atol=1e-6)
        assert from_ids.tokens == from_text.tokens

    asyncio.run(run())


def test_a_request_that_would_wait_too_long_is_rejected_before_tokenising(path, monkeypatch):
    async def run():
        engine = load(path, runtime="torch")
        tokenized = []
        monkeypatch.setattr(engine._tokenizer, "tokenize_passages", tokenized.append)
        monkeypatch.setattr(engine._engine, "_wait_s", lambda sequences: 9.0)
        with pytest.raises(QueueFull):
            await engine.embed(["text"], "passage", timeout_s=10)
        assert (tokenized, engine.facts.counters.refused) == ([], 1)

    asyncio.run(run())


def test_a_large_request_is_tokenised_in_slices_with_others_between(path, monkeypatch):
    async def run():
        engine = load(path, runtime="torch")
        calls = []
        tokenize = engine._tokenizer.tokenize_passages
        monkeypatch.setattr(
            engine._tokenizer, "tokenize_passages", lambda texts: [calls.append(len(texts)), tokenize(texts)][1]
        )
        large = asyncio.create_task(engine.embed([f"bread {n}" for n in range(300)], "passage"))
        singles = [asyncio.create_task(engine.embed([query], "passage")) for query in QUERIES]
        found = [(await single).vectors[0] for single in singles]
        assert not large.done()
        assert calls[:1] == [128 + len(QUERIES)]
        encoder = InstructionEncoder.from_pretrained(path)
        np.testing.assert_allclose(np.stack(found), encoder.encode_passages(QUERIES), atol=1e-5)
        expected = encoder.encode_passages([f"bread {n}" for n in range(300)])
        np.testing.assert_allclose((await large).vectors, expected, atol=1e-5)
        assert calls == [132, 128, 44]

    asyncio.run(run())


def test_a_caller_cancelled_during_tokenising_affects_no_other(path):
    async def run():
        engine = load(path, runtime="torch")
        gone = asyncio.create_task(engine.embed(["gone"], "passage"))
        kept = asyncio.create_task(engine.embed(["bread"], "passage"))
        await asyncio.sleep(0)
        gone.cancel()
        assert len((await kept).vectors) == 1
        assert engine.facts.counters.texts == 1
        assert len((await engine.embed(["again"], "query")).vectors) == 1

    asyncio.run(run())


def test_the_time_out_includes_tokenising(path, monkeypatch):
    async def run():
        engine = load(path, runtime="torch")
        before = engine.facts.counters.texts
        tokenize = engine._tokenizer.tokenize_passages

        def slowly(texts):
            time.sleep(0.05)
            return tokenize(texts)

        monkeypatch.setattr(engine._tokenizer, "tokenize_passages", slowly)
        with pytest.raises(DeadlineExceeded, match=r"within 0\.02 s"):
            await engine.embed(["late"], "passage", None, 0.02)
        assert engine.facts.counters.texts == before
        assert engine.facts.counters.expired == 1
        assert len((await engine.embed(["in time"], "passage", None, 60.0)).vectors) == 1

    asyncio.run(run())


def test_a_text_that_cannot_be_tokenised_fails_alone_and_the_engine_goes_on(path):
    async def run():
        engine = load(path, runtime="torch")
        bad, good = await asyncio.gather(
            engine.embed([[10**30]], "passage"), engine.embed(["bread"], "passage"), return_exceptions=True
        )
        assert isinstance(bad, Exception)
        assert not isinstance(bad, EmptySequence)
        assert len(good.vectors) == 1

    asyncio.run(run())


def test_impossible_settings_are_rejected(tmp_path):
    with pytest.raises(InputError, match="a causal decoder"):
        load(backbones.write("qwen2", tmp_path / "qwen2"), runtime="onnx")


def test_a_tokenizer_panic_leaves_no_caller_waiting() -> None:
    class Panic(BaseException):
        """As those of Rust come to Python."""

    class Panicking:
        def tokenize_queries(self, texts: list[str], instructions: list[str | None]) -> list[Tokens]:
            return []

        def tokenize_passages(self, texts: list[str]) -> list[Tokens]:
            if "bad" in texts:
                raise Panic("index out of bounds")
            return [Tokens([1, 2]) for _ in texts]

    async def scenario() -> None:
        batching = BatchingEngine(lambda sequences: np.ones((len(sequences), 2), np.float32))
        engine = EncodingEngine(Panicking(), None, batching)
        asked = [engine.embed([text], "passage", None, 5.0) for text in ("a", "bad", "b")]
        good, bad, well = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 5)
        assert isinstance(good, Embedded)
        assert isinstance(well, Embedded)
        assert isinstance(bad, RuntimeError)
        assert "index out of bounds" in str(bad)

    asyncio.run(scenario())
