"""What runs a replica's encoder, against the encoder in torch and sentence-transformers."""

import importlib.util

import numpy as np
import pytest
import torch

from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling import onnx
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.serving.encoder import runtime
from infembed_ray.serving.encoder.runtime import OnnxRuntime, TorchRuntime
from tests.modeling import backbones

pytestmark = pytest.mark.integration

TEXTS = ["no", "how is aspirin dosed", "what does a passage about bread say " * 9, "word " * 120]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "infembed" / "onnx"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return backbones.write("modernbert", tmp_path_factory.mktemp("modernbert"))


def settings(**values):
    return ServeSettings(index="none", **values)


def mixed(encoder):
    return encoder.tokenize_queries(TEXTS, ["for nurses", None] * 2) + encoder.tokenize_passages(TEXTS)


def test_onnx_embeds_a_real_model_as_sentence_transformers_does(minilm):
    reference = pytest.importorskip("sentence_transformers").SentenceTransformer(minilm, device="cpu")
    expected = reference.encode(TEXTS, normalize_embeddings=True)
    encoder = InstructionEncoder.from_pretrained(minilm)
    chosen = runtime.choose(encoder, settings(runtime="onnx"), "minilm")
    assert isinstance(chosen, OnnxRuntime)
    vectors = chosen.embed(encoder.tokenize_passages(TEXTS))  # its weights are gone, it tokenises
    assert (vectors * expected).sum(axis=1).min() >= 0.9999
    assert next(encoder.parameters()).is_meta


def test_separate_encoders_share_a_batch_and_a_second_replica_reuses_the_graphs(path, cache, tmp_path, monkeypatch):
    two = InstructionEncoder.from_pretrained(path, share_encoder=False)
    for parameter in two.passage_backbone.parameters():
        parameter.data.mul_(1.2)
    two.save_pretrained(tmp_path / "two")
    two = InstructionEncoder.from_pretrained(str(tmp_path / "two"))
    sequences = mixed(two)
    expected = two.embed(sequences)
    chosen = runtime.choose(two, settings(runtime="onnx"), "two")
    np.testing.assert_allclose(chosen.embed(sequences), expected, atol=1e-5)
    np.testing.assert_allclose(chosen.embed(sequences[::-1]), expected[::-1], atol=1e-5)
    (folder,) = cache.iterdir()
    assert sorted(file.name for file in folder.iterdir()) == ["passage.onnx", "query.onnx"]

    monkeypatch.setattr(onnx, "export", lambda *_: pytest.fail("exported again"))
    again = InstructionEncoder.from_pretrained(str(tmp_path / "two"))
    second = runtime.choose(again, settings(runtime="onnx"), "two")
    np.testing.assert_allclose(second.embed(sequences), expected, atol=1e-5)


def test_auto_chooses_the_faster_runtime_and_prints_it(path, capsys):
    encoder = InstructionEncoder.from_pretrained(path)
    sequences = mixed(encoder)
    expected = encoder.embed(sequences)
    chosen = runtime.choose(encoder, settings(), path)
    assert f"serve: the encoder runs in {chosen.name}, which is faster here (torch " in capsys.readouterr().out
    np.testing.assert_allclose(chosen.embed(sequences), expected, atol=1e-5)


def test_a_graph_with_different_vectors_is_not_used(path, cache, tmp_path, capsys):
    """A graph of the same name with other pooling, as a faulty export would be."""
    runtime.choose(InstructionEncoder.from_pretrained(path, pooling="cls"), settings(runtime="onnx"), path)
    (wrong,) = cache.glob("*/model.onnx")
    onnx.export(InstructionEncoder.from_pretrained(path, pooling="last"), "query", wrong)

    encoder = InstructionEncoder.from_pretrained(path, pooling="cls")
    with pytest.raises(
        InputError, match=r"runtime=onnx: gives different vectors for .* \(smallest cosine .*; set runtime=torch"
    ):
        runtime.choose(encoder, settings(runtime="onnx"), path)
    chosen = runtime.choose(encoder, settings(), path)
    assert isinstance(chosen, TorchRuntime)
    assert "serve: the encoder runs in torch (runtime=onnx: gives" in capsys.readouterr().out
    np.testing.assert_array_equal(chosen.embed(mixed(encoder)), encoder.embed(mixed(encoder)))

    wrong.write_bytes(b"no graph")
    assert isinstance(runtime.choose(encoder, settings(), path), TorchRuntime)


def test_without_onnxruntime_torch_runs_or_the_error_names_the_remedy(path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find(name))
    encoder = InstructionEncoder.from_pretrained(path)
    assert isinstance(runtime.choose(encoder, settings(), path), TorchRuntime)
    assert "onnxruntime is not installed" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"pip install 'infembed-ray\[onnx\]', or set runtime=torch"):
        runtime.require_runnable(encoder, settings(runtime="onnx"), path)


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("qwen2", {}, "a causal decoder"),
        ("modernbert", {"dtype": "bfloat16"}, "dtype=bfloat16: .* set runtime=torch"),
        ("modernbert", {"gpus_per_encoder": 0.5}, "gpus_per_encoder=0.5: .* set runtime=torch"),
    ],
)
def test_encoders_that_onnx_cannot_run_are_rejected_before_anything_starts(family, values, message, tmp_path, cache):
    encoder = InstructionEncoder.from_pretrained(backbones.write(family, tmp_path))
    with pytest.raises(InputError, match=message):
        runtime.require_runnable(encoder, settings(runtime="onnx", **values), "model")
    assert isinstance(runtime.choose(encoder, settings(**values), "model"), TorchRuntime)
    assert not cache.exists()


def test_an_unwritable_cache_directory_falls_back_to_torch(path, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    chosen = runtime.choose(InstructionEncoder.from_pretrained(path), settings(), path)
    assert isinstance(chosen, TorchRuntime)
    assert "serve: the encoder runs in torch (" in capsys.readouterr().out


def test_a_decoder_caches_instructions_and_costs_the_uncached_tokens(tmp_path, capsys):
    path = backbones.write("qwen2", tmp_path / "qwen2")
    encoder = InstructionEncoder.from_pretrained(path, pooling="last")
    queries = encoder.tokenize_queries(TEXTS, ["For nurses, in plain words."] * 4)
    expected = encoder.embed(queries)
    cached = runtime.choose(encoder, settings(), path)
    before = sum(map(cached.cost, queries))
    np.testing.assert_allclose(cached.embed(queries), expected, atol=1e-5)
    assert before - sum(map(cached.cost, queries)) == 4 * queries[0].instruction > 0
    assert cached.prefixes.hits == 3

    plain = runtime.choose(encoder, settings(prefix_cache_mib=0), path)
    assert plain.prefixes is None
    assert list(map(plain.cost, queries)) == list(map(len, queries))
    assert "the prefix cache is off" not in capsys.readouterr().out
    declined = runtime.choose(InstructionEncoder.from_pretrained(path, pooling="cls"), settings(), path)
    assert declined.prefixes is None
    assert (
        "serve: the prefix cache is off, every query encodes its instruction: it pools the first"
        in capsys.readouterr().out
    )


def test_bfloat16_vectors_are_close(path):
    encoder = InstructionEncoder.from_pretrained(path, dtype=torch.bfloat16)
    chosen = runtime.choose(encoder, settings(dtype="bfloat16"), path)
    expected = InstructionEncoder.from_pretrained(path).embed(mixed(encoder))
    assert (chosen.embed(mixed(encoder)) * expected).sum(axis=1).min() > 0.999


def test_the_probes_have_lengths_that_the_encoder_reads(path, minilm):
    for model, longest in ((path, 512), (minilm, 256)):
        encoder = InstructionEncoder.from_pretrained(model)
        lengths = [len(tokens) for tokens in runtime.probes(encoder)]
        assert lengths == [n for n in runtime.PROBE_LENGTHS if n <= min(longest, encoder.text.passage_length)]
