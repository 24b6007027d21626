"""Batches through recorded passes of fixed shapes, against each text alone in float64. Here the record is the plain function."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infembed_ray.modeling import graphs
from infembed_ray.modeling.attention import prefix_tree
from infembed_ray.modeling.attention.packing import PackedAttention, packed
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.tokenizer import Tokens
from tests.modeling.backbones import DECODERS, alone


def texts_of(lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [Tokens(torch.randint(3, 30, (n,), generator=generator).tolist(), "query") for n in lengths]


def replayed(forward, device, pool):
    """As a graph does: the output has one place, which the next replay overwrites."""
    output = forward().clone()
    return lambda: output.copy_(forward()).clone()


def refuse(sequences, batch_tokens=None):
    raise AssertionError(f"{len(sequences)} texts were not embedded by a graph")


@pytest.mark.parametrize(
    ("family", "pooling"),
    [("modernbert", "mean"), ("modernbert", "cls"), *((f, p) for f in DECODERS for p in ("last", "mean"))],
)
def test_a_padded_row_gives_the_vectors_of_each_text_alone(family, pooling, backbone_path):
    encoder = InstructionEncoder.from_pretrained(backbone_path(family), pooling=pooling)
    graphed = graphs.GraphedEncoder(encoder, refuse, replayed)
    for lengths in ([1], [16], [17], [5, 40, 1, 5], [64], [9] * 32, [200, 300, 24], [1] * 32, [3]):
        texts = texts_of(lengths)
        np.testing.assert_allclose(
            graphed.embed(texts), alone(encoder, texts, torch.float64), atol=2e-6, err_msg=str(lengths)
        )


def test_only_captured_sizes_are_replayed_and_no_batch_waits_for_a_capture(backbone_path, capsys):
    encoder = InstructionEncoder.from_pretrained(backbone_path("qwen2"))
    captured, eager = [], []

    def record(forward, device, pool):
        captured.append(len(forward()))
        if len(captured) > 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return forward

    def embed(sequences, batch_tokens):
        eager.append(len(sequences))
        return encoder.embed(sequences, batch_tokens)

    graphed = graphs.GraphedEncoder(encoder, embed, record, [16, 32, 64])
    assert "2 CUDA graphs were captured" in capsys.readouterr().out
    warm, cold = texts_of([30, 20]), [texts_of([16]), texts_of([65]), texts_of([1] * 33), []]
    np.testing.assert_allclose(graphed.embed(warm), encoder.embed(warm), atol=1e-6)
    assert not eager
    for texts in cold:
        np.testing.assert_array_equal(graphed.embed(texts, 512), encoder.embed(texts, 512))
    assert (eager, len(captured)) == ([1, 1, 33, 0], 3)


def test_concurrent_callers_get_the_vectors_of_their_texts(backbone_path):
    encoder = InstructionEncoder.from_pretrained(backbone_path("modernbert"))
    graphed = graphs.GraphedEncoder(encoder, refuse, replayed, [64])
    batches = [texts_of([n % 7 + 33, n % 5 + 1]) for n in range(24)]
    expected = [encoder.embed(batch) for batch in batches]
    together = threading.Barrier(4)

    def embed(batch):
        together.wait()
        return graphed.embed(batch)

    with ThreadPoolExecutor(4) as threads:
        for vectors, own in zip(threads.map(embed, batches), expected, strict=True):
            np.testing.assert_allclose(vectors, own, atol=1e-6)


class _OneDevice(TorchDispatchMode):
    """Fails on operations that a capture forbids: copies between devices, and reading values back."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = str(function)
        if "copy" in name or "_local_scalar_dense" in name:
            devices = {t.device.type for t in (*args, result) if isinstance(t, torch.Tensor)}
            assert len(devices) == 1, name
            assert "_local_scalar_dense" not in name
        return result


@pytest.mark.parametrize("family", ["modernbert", *DECODERS])
def test_a_pass_reads_no_value_back_from_the_device(family, backbone_path, monkeypatch):
    """On the meta device there are no values, so that reading one fails; graphs also copy nothing to the device."""
    encoder = InstructionEncoder.from_pretrained(backbone_path(family), device="meta")
    texts, shapes = texts_of([9, 9, 4]), []
    if encoder.causal:
        for _, layout in prefix_tree.forests([*texts, *texts], 100):
            encoder(layout.to(encoder.device))
    # In the place of CUDA's kernel, which reads the borders on the device.
    monkeypatch.setattr(PackedAttention, "__call__", lambda self, module, query, key, value, **_: query.transpose(1, 2))
    assert encoder(packed(texts).to(encoder.device)).shape == (3, encoder.dimension)

    def record(forward, device, pool):
        with _OneDevice():
            shapes.append(forward().shape)
        return forward

    graphs.GraphedEncoder(encoder, refuse, record, [64])
    assert shapes == [(graphs.TEXTS + 1, encoder.dimension)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["modernbert", *DECODERS])
def test_cuda_replays_the_vectors_of_the_eager_passes(family, backbone_path):
    encoder = InstructionEncoder.from_pretrained(backbone_path(family), device="cuda", dtype=torch.bfloat16)
    graphed = graphs.GraphedEncoder(encoder, refuse)
    for lengths in ([1], [64], [5, 40, 1, 5], [9] * 32, [200, 300, 24], [64]):
        texts = texts_of(lengths)
        np.testing.assert_allclose(graphed.embed(texts), encoder.embed(texts), atol=2e-2)
