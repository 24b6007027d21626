"""What the planner counts on the meta device against what autograd really saves."""

import pytest
import torch

from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.planning.activations import saved
from tests.modeling import backbones

TEXTS = [f"how is aspirin dosed {'in plain words ' * n}" for n in range(3, 9)]


@pytest.mark.integration
@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("family", ["llama", "modernbert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_a_token_are_those_of_a_real_pass(tmp_path, family, dtype):
    path = backbones.write(family, tmp_path)
    encoder = InstructionEncoder.from_pretrained(path, dtype=dtype).train()
    own = {t.untyped_storage().data_ptr() for t in [*encoder.parameters(), *encoder.buffers()]}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    tokens = encoder.tokenize_passages(TEXTS)
    ((_, layout),) = encoder.layouts(tokens, 10_000)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kept_alive = encoder(layout)
    real = sum(s.nbytes() for s in storages.values()) / layout.input_ids.numel()
    counted = saved(InstructionEncoder.from_pretrained(path, device="meta"), dtype)
    assert kept_alive.requires_grad
    assert counted.token == pytest.approx(real, rel=0.15)
    assert counted.checkpointed < counted.layer < counted.token
