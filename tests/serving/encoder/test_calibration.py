"""What runs a replica's encoder, against the encoder in torch and sentence-transformers."""

import importlib.util
import json

import numpy as np
import pytest
import torch

from infembed_ray.config.serving import ServeSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling import onnx, precision
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.serving.encoder import calibration
from infembed_ray.serving.encoder.calibration import REFERENCE, Candidate
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


ONNX, BF16, INT8 = Candidate("onnx", "float32"), Candidate("torch", "bfloat16"), Candidate("onnx", "int8")


def settings(**values):
    return ServeSettings(index="none", **{"dtype": "float32"} | values)


def choose(encoder, *arguments):
    return calibration.choose(encoder, *arguments).runtime


def mixed(encoder):
    return encoder.tokenize_queries(TEXTS, ["for nurses", None] * 2) + encoder.tokenize_passages(TEXTS)


def test_onnx_embeds_a_real_model_as_sentence_transformers_does(minilm):
    reference = pytest.importorskip("sentence_transformers").SentenceTransformer(minilm, device="cpu")
    expected = reference.encode(TEXTS, normalize_embeddings=True)
    encoder = InstructionEncoder.from_pretrained(minilm)
    chosen = choose(encoder, settings(runtime="onnx"), "minilm")
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
    chosen = choose(two, settings(runtime="onnx"), "two")
    np.testing.assert_allclose(chosen.embed(sequences), expected, atol=1e-5)
    np.testing.assert_allclose(chosen.embed(sequences[::-1]), expected[::-1], atol=1e-5)
    (folder,) = cache.iterdir()
    assert sorted(file.name for file in folder.iterdir()) == ["passage.onnx", "query.onnx"]

    monkeypatch.setattr(onnx, "export", lambda *_: pytest.fail("exported again"))
    again = InstructionEncoder.from_pretrained(str(tmp_path / "two"))
    second = choose(again, settings(runtime="onnx"), "two")
    np.testing.assert_allclose(second.embed(sequences), expected, atol=1e-5)


@pytest.fixture
def with_bf16(monkeypatch):
    """Let the CPU count as one with bfloat16 instructions."""
    monkeypatch.setattr(calibration, "cpu_has_bf16", lambda: True)


def pretend(monkeypatch, fastest):
    """Let one candidate be the fastest."""

    def seconds(runtime, _):
        dtype = str(runtime._encoder.dtype).removeprefix("torch.") if runtime.name == "torch" else "float32"
        return 0.1 if (runtime.name, dtype) == fastest else 0.5

    monkeypatch.setattr(calibration, "_seconds", seconds)


@pytest.mark.usefixtures("with_bf16")
@pytest.mark.parametrize("fastest", [REFERENCE, ONNX, BF16])
def test_auto_runs_the_fastest_candidate_and_prints_all(path, fastest, capsys, monkeypatch):
    pretend(monkeypatch, fastest)
    encoder = InstructionEncoder.from_pretrained(path)
    sequences = mixed(encoder)
    expected = encoder.embed(sequences)
    choice = calibration.choose(encoder, settings(dtype="auto"), path)
    assert choice.candidate == fastest
    assert set(choice.measured) == {REFERENCE, ONNX, BF16}
    said = capsys.readouterr().out
    assert f"serve: the encoder runs in {fastest} (torch float32 " in said
    assert f"{fastest} 100 ms and cosine " in said
    vectors = choice.runtime.embed(sequences)
    assert (vectors * expected).sum(axis=1).min() >= 0.999
    if fastest != BF16:
        np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_int8_runs_only_under_a_floor_that_it_reaches(minilm, monkeypatch):
    encoder = InstructionEncoder.from_pretrained(minilm)
    expected = encoder.embed(mixed(encoder))
    with pytest.raises(InputError, match=r"dtype=int8: gives different vectors .* lower min_cosine=0.999"):
        calibration.choose(encoder, settings(dtype="int8"), minilm)
    choice = calibration.choose(encoder, settings(dtype="int8", min_cosine=0.95), minilm)
    assert choice.candidate == INT8
    cosines = (choice.runtime.embed(mixed(encoder)) * expected).sum(axis=1)
    assert 0.95 <= cosines.min() < 0.9999

    encoder = InstructionEncoder.from_pretrained(minilm)
    choice = calibration.choose(encoder, settings(dtype="auto", min_cosine=0.99999), minilm)
    assert INT8 not in choice.measured
    assert choice.candidate in (REFERENCE, ONNX)  # bfloat16 is not so close


@pytest.mark.usefixtures("with_bf16")
def test_a_second_start_builds_only_the_fastest_and_a_damaged_record_is_measured_again(path, cache, monkeypatch):
    auto = settings(dtype="auto")
    first = calibration.choose(InstructionEncoder.from_pretrained(path), auto, path)
    (record,) = (cache.parent / "calibration").iterdir()
    written = record.read_bytes()

    built = []
    build = calibration._build
    monkeypatch.setattr(calibration, "_build", lambda one, **options: built.append(one) or build(one, **options))
    second = calibration.choose(InstructionEncoder.from_pretrained(path), auto, path)
    assert (second.candidate, built) == (first.candidate, [first.candidate])
    assert {c: m.seconds for c, m in second.measured.items()} == {c: m.seconds for c, m in first.measured.items()}

    record.write_bytes(written[:-5])
    assert calibration.choose(InstructionEncoder.from_pretrained(path), auto, path).measured
    assert {Candidate(*row[:2]) for row in json.loads(record.read_bytes())["measured"]} == {REFERENCE, ONNX, BF16}


def test_bf16_is_no_candidate_on_a_cpu_without_its_instructions(path, monkeypatch):
    monkeypatch.setattr(precision, "cpu_capabilities", lambda: ["avx2", "avx512f"])
    assert precision.cpu_has_bf16() is False
    choice = calibration.choose(InstructionEncoder.from_pretrained(path), settings(dtype="auto"), path)
    assert set(choice.measured) == {REFERENCE, ONNX}


def test_nothing_is_measured_for_a_large_model_or_in_one_runtime_and_precision(path, cache, monkeypatch):
    only = settings(runtime="torch", dtype="float32")
    assert calibration.choose(InstructionEncoder.from_pretrained(path), only, path).measured == {}
    monkeypatch.setattr(calibration, "MAX_PARAMETERS", 10)
    choice = calibration.choose(InstructionEncoder.from_pretrained(path), settings(), path)
    assert (choice.candidate, choice.measured) == (REFERENCE, {})
    assert not cache.parent.exists()


def test_a_graph_with_different_vectors_is_not_used(path, cache, tmp_path, capsys):
    """A graph of the same name with other pooling, as a faulty export would be."""
    choose(InstructionEncoder.from_pretrained(path, pooling="cls"), settings(runtime="onnx"), path)
    (wrong,) = cache.glob("*/model.onnx")
    onnx.export(InstructionEncoder.from_pretrained(path, pooling="last"), "query", wrong)

    encoder = InstructionEncoder.from_pretrained(path, pooling="cls")
    with pytest.raises(
        InputError,
        match=r"runtime=onnx dtype=float32: gives different vectors for .* \(smallest cosine: .*; set runtime=torch",
    ):
        choose(encoder, settings(runtime="onnx"), path)
    chosen = choose(encoder, settings(), path)
    assert isinstance(chosen, TorchRuntime)
    assert "serve: the encoder runs in torch float32 (" in capsys.readouterr().out
    np.testing.assert_array_equal(chosen.embed(mixed(encoder)), encoder.embed(mixed(encoder)))

    wrong.write_bytes(b"no graph")
    assert isinstance(choose(encoder, settings(), path), TorchRuntime)


def test_without_onnxruntime_torch_runs_or_the_error_names_the_remedy(path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find(name))
    encoder = InstructionEncoder.from_pretrained(path)
    assert isinstance(choose(encoder, settings(), path), TorchRuntime)
    assert "onnxruntime is not installed" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"pip install 'infembed-ray\[onnx\]', or set runtime=torch"):
        calibration.require_runnable(encoder, settings(runtime="onnx"), path)


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("qwen2", {}, "a causal decoder"),
        ("modernbert", {"dtype": "bfloat16"}, "runtime=onnx dtype=bfloat16: .* set runtime=auto"),
        ("modernbert", {"gpus_per_encoder": 0.5}, "gpus_per_encoder=0.5: .* set runtime=torch"),
    ],
)
def test_encoders_that_onnx_cannot_run_are_rejected_before_anything_starts(family, values, message, tmp_path, cache):
    encoder = InstructionEncoder.from_pretrained(backbones.write(family, tmp_path))
    with pytest.raises(InputError, match=message):
        calibration.require_runnable(encoder, settings(runtime="onnx", **values), "model")
    assert isinstance(choose(encoder, settings(**values), "model"), TorchRuntime)
    assert not cache.exists()


def test_an_unwritable_cache_directory_falls_back_to_torch(path, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    chosen = choose(InstructionEncoder.from_pretrained(path), settings(), path)
    assert isinstance(chosen, TorchRuntime)
    assert "serve: the encoder does not run in onnx float32 (" in capsys.readouterr().out


def test_a_decoder_caches_instructions_and_costs_the_uncached_tokens(tmp_path, capsys):
    path = backbones.write("qwen2", tmp_path / "qwen2")
    encoder = InstructionEncoder.from_pretrained(path, pooling="last")
    queries = encoder.tokenize_queries(TEXTS, ["For nurses, in plain words."] * 4)
    expected = encoder.embed(queries)
    cached = choose(encoder, settings(), path)
    before = sum(map(cached.cost, queries))
    np.testing.assert_allclose(cached.embed(queries), expected, atol=1e-5)
    assert before - sum(map(cached.cost, queries)) == 4 * queries[0].instruction > 0
    assert cached.prefixes.hits == 3

    plain = choose(encoder, settings(prefix_cache_mib=0), path)
    assert plain.prefixes is None
    assert list(map(plain.cost, queries)) == list(map(len, queries))
    assert "the prefix cache is off" not in capsys.readouterr().out
    declined = choose(InstructionEncoder.from_pretrained(path, pooling="cls"), settings(), path)
    assert declined.prefixes is None
    assert (
        "serve: the prefix cache is off, every query encodes its instruction: it pools the first"
        in capsys.readouterr().out
    )


def test_bfloat16_vectors_are_close(path):
    encoder = InstructionEncoder.from_pretrained(path, dtype=torch.bfloat16)
    chosen = choose(encoder, settings(dtype="bfloat16"), path)
    expected = InstructionEncoder.from_pretrained(path).embed(mixed(encoder))
    assert (chosen.embed(mixed(encoder)) * expected).sum(axis=1).min() > 0.999


def test_the_probes_have_lengths_that_the_encoder_reads(path, minilm):
    for model, longest in ((path, 512), (minilm, 256)):
        encoder = InstructionEncoder.from_pretrained(model)
        lengths = [len(tokens) for tokens in calibration.probes(encoder)]
        assert lengths == [n for n in calibration.PROBE_LENGTHS if n <= min(longest, encoder.text.passage_length)]
