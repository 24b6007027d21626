"""Model FLOPs against torch's counter of executed operations, and attended pairs against masks."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from infembed_ray.config.training import Lora
from infembed_ray.modeling import adapters
from infembed_ray.modeling.attention.packing import packed
from infembed_ray.modeling.attention.prefix_tree import forests
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import padded
from infembed_ray.modeling.tokenizer import Tokens
from infembed_ray.training.observability.flops import BackboneFlops, Workload, peak_flops
from tests.modeling import backbones


@pytest.fixture(scope="module")
def modernbert(tmp_path_factory):
    return InstructionEncoder.from_pretrained(backbones.write("modernbert", tmp_path_factory.mktemp("modernbert")))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return InstructionEncoder.from_pretrained(backbones.write("qwen2", tmp_path_factory.mktemp("qwen2")))


def texts(*lengths):
    return [Tokens([5 + n % 7 for n in range(length)]) for length in lengths]


def executed(encoder, layout):
    """Count the FLOPs of a forward and a backward pass by torch's counter, with attention as full matrix products."""
    encoder.backbone.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        encoder(layout).sum().backward()
    return counter.get_total_flops()


def counted(encoder, *layouts):
    work = Workload(encoder)
    for layout in layouts:
        work.add(layout)
    return work.take().tolist()


def test_flops_of_a_decoder_match_torchs_counter_without_masked_pairs(tmp_path):
    encoder = InstructionEncoder.from_pretrained(backbones.write("qwen2", tmp_path))
    layout = padded(texts(64, 64), 0)
    above_the_diagonal = 2 * 2 * 64 * 63 // 2  # layers, texts
    unseen = above_the_diagonal * 12 * 32
    assert counted(encoder, layout)[2] == pytest.approx(executed(encoder, layout) - unseen, rel=0.01)


@pytest.mark.parametrize("lengths", [(1,), (9,), (40, 3, 17, 25)])
def test_pairs_of_sliding_windows_match_transformers_masks(modernbert, lengths):
    config = modernbert.backbone.config
    pairs = 0
    for kind in config.layer_types:
        for length in lengths:
            places = torch.arange(length)
            apart = (places[:, None] - places).abs()
            pairs += int((apart <= config.sliding_window).sum()) if kind == "sliding_attention" else length**2
    assert int(BackboneFlops.count(modernbert.backbone, causal=False).pairs(packed(texts(*lengths)))) == pairs


def test_shared_prefix_counts_once(qwen):
    shared = list(range(5, 35))
    sequences = [Tokens([*shared, 40 + n, 50 + n], "query") for n in range(4)]
    (_, tree), *others = forests(sequences, 4096)
    assert not others
    slots, tokens, flops = counted(qwen, tree)
    assert slots == tokens == 30 + 4 * 2
    backbone = BackboneFlops.count(qwen.backbone, causal=True)
    above = sum(range(1, 31)) + 4 * (31 + 32)
    assert flops == pytest.approx(tokens * backbone.token + 2 * above * backbone.pair)


def test_frozen_weights_count_without_weight_gradient(tmp_path):
    encoder = InstructionEncoder.from_pretrained(backbones.write("qwen2", tmp_path))
    whole = BackboneFlops.count(encoder.backbone, causal=True).token
    adapters.add(encoder.backbones, Lora(rank=1))
    weights = [m for m in encoder.backbone.modules() if isinstance(m, torch.nn.Linear) and m.weight.requires_grad]
    added = 6 * sum(m.in_features * m.out_features for m in weights)
    assert BackboneFlops.count(encoder.backbone, causal=True).token == pytest.approx(whole * 4 / 6 + added)


def test_peak_depends_on_device_and_precision_or_is_unknown():
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989e12
    assert peak_flops("NVIDIA H100 PCIe", torch.bfloat16) == 756e12
    assert peak_flops("NVIDIA L4", torch.float32) == 30.3e12
    assert peak_flops("NVIDIA GeForce GTX 1080", torch.float32) is None
