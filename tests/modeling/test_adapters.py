"""LoRA against peft itself: what it starts as, what is trained, what is merged and what is written alone."""

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModel

from infembed_ray.config.training import Lora
from infembed_ray.errors import InputError
from infembed_ray.modeling import adapters
from infembed_ray.modeling.encoder import InstructionEncoder

TEXTS = ["how is aspirin dosed", "what does a passage about bread say", "no"]


def adapted(path, **options):
    """An encoder whose adapters are no longer the initial ones, which change nothing."""
    encoder = InstructionEncoder.from_pretrained(path, **options)
    adapters.add(encoder.backbones, Lora(rank=4, alpha=8.0))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in encoder.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    return encoder


@pytest.mark.parametrize("family", ["minilm", "qwen2"])
def test_untrained_adapters_change_no_embedding_and_only_adapters_are_trained(family, backbone_path):
    plain = InstructionEncoder.from_pretrained(backbone_path(family))
    encoder = InstructionEncoder.from_pretrained(backbone_path(family))
    assert not adapters.has(encoder.backbones)
    adapters.add(encoder.backbones, Lora())
    assert adapters.has(encoder.backbones)
    np.testing.assert_allclose(encoder.encode_passages(TEXTS), plain.encode_passages(TEXTS), atol=1e-6)
    trained = {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in encoder.named_parameters() if ".lora_" in name}
    share = sum(p.numel() for p in encoder.parameters() if p.requires_grad) / sum(p.numel() for p in plain.parameters())
    assert 0 < share < (0.15 if family == "minilm" else 1)


@pytest.mark.integration
@pytest.mark.parametrize("family", ["minilm", "qwen2"])
def test_merged_weights_give_the_embeddings_of_the_adapters_and_peft_loads_them(family, backbone_path, tmp_path):
    encoder = adapted(backbone_path(family))
    expected = encoder.encode_passages(TEXTS)
    plain = InstructionEncoder.from_pretrained(backbone_path(family))
    assert (expected * plain.encode_passages(TEXTS)).sum(axis=1).max() < 0.99
    encoder.save_pretrained(tmp_path)
    assert not adapters.has(encoder.backbones)
    np.testing.assert_allclose(encoder.encode_passages(TEXTS), expected, atol=1e-5)
    merged = InstructionEncoder.from_pretrained(str(tmp_path))
    np.testing.assert_allclose(merged.encode_passages(TEXTS), expected, atol=1e-5)
    assert set(merged.backbone.state_dict()) == set(plain.backbone.state_dict())
    by_peft = PeftModel.from_pretrained(AutoModel.from_pretrained(backbone_path(family)), tmp_path / "adapters")
    theirs = InstructionEncoder(by_peft, merged.tokenizer, merged.pooling, merged.text)
    np.testing.assert_allclose(theirs.encode_passages(TEXTS), expected, atol=1e-5)


def test_separate_encoders_have_separate_adapters(backbone_path, tmp_path):
    encoder = adapted(backbone_path("qwen2"), share_encoder=False)
    queries, passages = encoder.encode_queries(TEXTS), encoder.encode_passages(TEXTS)
    assert not np.allclose(queries, passages, atol=1e-2)
    encoder.save_pretrained(tmp_path)
    again = InstructionEncoder.from_pretrained(str(tmp_path))
    np.testing.assert_allclose(again.encode_queries(TEXTS), queries, atol=1e-5)
    np.testing.assert_allclose(again.encode_passages(TEXTS), passages, atol=1e-5)
    assert {file.parent.name for file in tmp_path.glob("adapters/*/adapter_model.safetensors")} == {"query", "passage"}


def test_only_the_named_layers_have_adapters(backbone_path):
    encoder = InstructionEncoder.from_pretrained(backbone_path("llama"))
    adapters.add(encoder.backbones, Lora(target_modules=("q_proj", "v_proj")))
    trained = {name.split(".lora_")[0].rsplit(".", 1)[1] for name, p in encoder.named_parameters() if p.requires_grad}
    assert trained == {"q_proj", "v_proj"}
    other = InstructionEncoder.from_pretrained(backbone_path("llama"))
    with pytest.raises(InputError, match=r"lora.target_modules=\['query'\]: not in this backbone"):
        adapters.add(other.backbones, Lora(target_modules=("query",)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_four_bits_without_a_gpu_are_refused(minilm):
    with pytest.raises(InputError, match=r"lora\.quantized=true: needs a CUDA GPU"):
        InstructionEncoder.from_pretrained(minilm, quantized=True)
