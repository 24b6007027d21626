"""The exported graph, run by onnxruntime, against the encoder in torch."""

import numpy as np
import pytest

from infembed_ray.config.training import ExportSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.onnx import INPUTS, OUTPUT, run
from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.steps import resolve_input
from tests.support.object_store import upload

onnxruntime = pytest.importorskip("onnxruntime")
TEXTS = ["no", "how is aspirin dosed", "what does a passage about bread say " * 9, "word " * 120]


def embedded(graph, tokens, pad):
    """One padded batch through a graph."""
    width = max(map(len, tokens))
    ids = np.array([t.ids + [pad] * (width - len(t)) for t in tokens])
    mask = np.array([[1] * len(t) + [0] * (width - len(t)) for t in tokens])
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    return session.run([OUTPUT], dict(zip(INPUTS, (ids, mask), strict=True)))[0]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("family", "pooling"), [("minilm", "mean"), ("modernbert", "mean"), ("modernbert", "cls"), ("modernbert", "last")]
)
def test_the_graph_gives_torchs_embeddings_for_all_lengths(family, pooling, backbone_path, tmp_path):
    InstructionEncoder.from_pretrained(backbone_path(family), pooling=pooling).save_pretrained(tmp_path / "model")
    encoder = InstructionEncoder.from_pretrained(str(tmp_path / "model"))
    made = run(ExportSettings(model=str(tmp_path / "model"), output=str(tmp_path / "onnx")))
    tokens = encoder.tokenize_passages(TEXTS)
    expected = encoder.encode_passages(TEXTS)
    pad = encoder.tokenizer.pad_token_id
    found = embedded(made.path / "model.onnx", tokens, pad)
    assert (found * expected).sum(axis=1).min() >= 0.9999
    np.testing.assert_allclose(found, expected, atol=1e-5)
    alone = np.concatenate([embedded(made.path / "model.onnx", [t], pad) for t in tokens])
    np.testing.assert_allclose(alone, expected, atol=1e-5)


@pytest.mark.integration
def test_separate_encoders_have_a_graph_each_and_the_models_dimensions_are_in_it(backbone_path, bucket, tmp_path):
    """Model and graph are in an object store."""
    encoder = InstructionEncoder.from_pretrained(backbone_path("modernbert"), share_encoder=False, dimensions=8)
    for parameter in encoder.passage_backbone.parameters():
        parameter.data.mul_(1.2)
    encoder.save_pretrained(tmp_path / "model")
    store = f"{bucket}/{tmp_path.name}"
    upload(tmp_path / "model", Folder(f"{store}/model"))
    made = resolve_input(run(ExportSettings(model=f"{store}/model", output=f"{store}/onnx")).uri, "graph")
    short = InstructionEncoder.from_pretrained(str(tmp_path / "model"))
    pad = short.tokenizer.pad_token_id
    for name, tokens in (
        ("query", short.tokenize_queries(TEXTS, [None] * 4)),
        ("passage", short.tokenize_passages(TEXTS)),
    ):
        np.testing.assert_allclose(embedded(made / f"{name}.onnx", tokens, pad), short.embed(tokens), atol=1e-5)


def test_a_decoder_is_refused_before_any_work(backbone_path, tmp_path):
    with pytest.raises(InputError, match=r"model=.*: is a causal decoder"):
        run(ExportSettings(model=backbone_path("qwen2"), output=str(tmp_path)))
    assert not list(tmp_path.iterdir())
