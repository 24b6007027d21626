"""The setting attention_dropout on families that name it differently."""

import pytest
import torch
from transformers import BertConfig, BertModel, T5Config

from infembed_ray.errors import InputError
from infembed_ray.modeling.attention.dropout import attention_dropout, set_attention_dropout
from infembed_ray.modeling.encoder import InstructionEncoder
from tests.modeling import backbones


@pytest.mark.parametrize("family", ["modernbert", "qwen2"])
def test_a_loaded_backbone_has_the_dropout_of_the_override(family, tmp_path):
    path = backbones.write(family, tmp_path)
    encoder = InstructionEncoder.from_pretrained(path, attention_dropout=0.25)
    assert encoder.attention_dropout == 0.25
    layers = [
        m.attention_dropout
        for m in encoder.backbone.modules()
        if isinstance(getattr(m, "attention_dropout", None), float)
    ]
    assert layers
    assert set(layers) == {0.25}
    assert InstructionEncoder.from_pretrained(path).attention_dropout == 0.0


def test_zero_turns_the_dropout_of_berts_weights_off():
    """Only that of the weights: two passes are equal, where other dropout is off."""
    config = BertConfig(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config.hidden_dropout_prob = 0.0
    assert attention_dropout(config) == 0.1
    set_attention_dropout(config, 0.0, "bert")
    backbone = BertModel(config).train()
    ids = torch.arange(1, 30).unsqueeze(0)
    first, second = (backbone(input_ids=ids).last_hidden_state for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_backbone_without_attention_dropout_is_refused():
    config = T5Config()
    assert attention_dropout(config) == 0.0
    with pytest.raises(InputError, match=r"attention_dropout=0.0: the configuration of t5-base has none"):
        set_attention_dropout(config, 0.0, "t5-base")
