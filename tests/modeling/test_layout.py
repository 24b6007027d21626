import pytest
import torch

from infembed_ray.modeling.layout import Layout
from infembed_ray.modeling.pooling import pool

STATES = torch.arange(2 * 4 * 3, dtype=torch.float32).reshape(2, 4, 3)


@pytest.mark.parametrize("mode", ["last", "mean", "cls"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_does_not_count(mode, side):
    lengths = [2, 4]
    mask = torch.zeros(2, 4, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, (slice(0, length) if side == "right" else slice(4 - length, 4))] = 1
    layout = Layout(mask, mask, mask.flatten().nonzero().squeeze(1), mask.sum(dim=1))
    pooled = pool(STATES, layout, mode)
    for row in range(2):
        real = STATES[row][mask[row].bool()]
        expected = {"last": real[-1], "cls": real[0], "mean": real.mean(dim=0)}[mode]
        torch.testing.assert_close(pooled[row], expected)
