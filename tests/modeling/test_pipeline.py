"""Encoding slice by slice, with passes prepared in threads, against all texts at once."""

import threading

import numpy as np
import pytest
import torch

from infembed_ray.modeling import pipeline
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.pipeline import default_batch_tokens

GIB = 2**30
TEXTS = ["bread", "how is aspirin dosed", "", "what does a passage say in plain words , " * 9, "no brand names"] * 5


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prepare")]


def overlap(monkeypatch):
    """Take the CPU for a GPU, and divide every call into slices of four texts."""
    monkeypatch.setattr(pipeline, "OVERLAPPING", {"cpu"})
    monkeypatch.setattr(pipeline, "SLICE", 4)


@pytest.mark.parametrize("options", [{}, {"share_encoder": False}, {"interaction": "cross_attention"}])
@pytest.mark.parametrize("family", ["modernbert", "qwen2"])
def test_slices_prepared_in_threads_give_the_vectors_of_one_call(family, options, backbone_path, monkeypatch):
    torch.manual_seed(0)
    encoder = InstructionEncoder.from_pretrained(backbone_path(family), **options)
    instructions = ["For nurses.", None, "For nurses."] * 8 + ["in plain words"]
    calls = [
        lambda: encoder.encode_passages(TEXTS, batch_tokens=90),
        lambda: encoder.encode_queries(TEXTS, instructions, batch_tokens=90),
        lambda: encoder.embed(encoder.tokenize_passages(TEXTS), batch_tokens=90),
        lambda: encoder.encode(TEXTS),
    ]
    expected = [call() for call in calls]
    overlap(monkeypatch)
    for call, vectors in zip(calls, expected, strict=True):
        np.testing.assert_allclose(call(), vectors, atol=1e-6)
    for count in range(10):
        assert encoder.encode_passages(TEXTS[:count]).shape == (count, encoder.dimension)
    assert not threads()


def test_an_error_in_a_thread_reaches_the_caller_and_ends_the_threads(backbone_path, monkeypatch):
    encoder = InstructionEncoder.from_pretrained(backbone_path("qwen2"))
    overlap(monkeypatch)
    with pytest.raises(TypeError):
        encoder.encode_passages([*TEXTS, None])
    monkeypatch.setattr(encoder, "forward", lambda layout: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        encoder.encode_passages(TEXTS)
    assert not threads()


@pytest.mark.slow  # the compiler takes most of a minute
def test_long_encoding_compiles_the_layers_and_gives_the_same_vectors(backbone_path, monkeypatch):
    encoder = InstructionEncoder.from_pretrained(backbone_path("qwen2"))
    plain = encoder.encode_passages(TEXTS, batch_tokens=90)
    encoder.encode_passages(TEXTS, batch_tokens=90)
    assert encoder.backbone.layers[0]._compiled_call_impl is None
    overlap(monkeypatch)
    monkeypatch.setattr(pipeline, "COMPILE_AFTER_S", 0.0)
    for _ in range(2):
        np.testing.assert_allclose(encoder.encode_passages(TEXTS, batch_tokens=90), plain, atol=1e-6)
        assert encoder.backbone.layers[0]._compiled_call_impl is not None


@pytest.mark.parametrize(
    ("width", "element_bytes", "free", "tokens"),
    [
        (896, 4, None, 4096),  # a CPU
        (384, 2, 70 * GIB, 87381),
        (896, 2, 130 * GIB, 37449),  # 0.5B
        (3584, 2, 120 * GIB, 9362),  # 7B
        (3584, 4, 120 * GIB, 9362),
        (3584, 2, 4 * GIB, 6241),  # a quarter of the memory: 1 GiB / (24 * 3584 * 2)
        (3584, 4, 4 * GIB, 3120),
        (8192, 2, 0, 1024),
    ],
)
def test_the_default_budget_follows_width_and_memory(width, element_bytes, free, tokens):
    assert default_batch_tokens(width, element_bytes, free) == tokens


def test_a_cpu_has_the_default_budget_of_a_cpu(backbone_path, monkeypatch):
    encoder = InstructionEncoder.from_pretrained(backbone_path("modernbert"))
    given = []
    lay_out = encoder.lay_out
    monkeypatch.setattr(
        encoder, "lay_out", lambda texts, budget, *rest: given.append(budget) or lay_out(texts, budget, *rest)
    )
    encoder.encode_passages(TEXTS)
    encoder.encode_passages(TEXTS, batch_tokens=100)
    assert given == [4096, 100]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_vectors_of_a_cpu(backbone_path, monkeypatch):
    monkeypatch.setattr(pipeline, "SLICE", 4)
    encoder = InstructionEncoder.from_pretrained(backbone_path("qwen2"))
    expected = encoder.encode_passages(TEXTS)
    np.testing.assert_allclose(encoder.to("cuda").encode_passages(TEXTS, batch_tokens=90), expected, atol=1e-4)
