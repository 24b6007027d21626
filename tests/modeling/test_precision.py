"""The warning about bfloat16 on CPUs without it."""

from types import SimpleNamespace

import pytest
import torch

from infembed_ray.modeling import precision
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.precision import warn_of_slow_bf16


def warnings_of(capsys):
    """Ours; importing DeepSpeed logs one of its own."""
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]


@pytest.mark.parametrize(
    ("has", "warns"),
    [
        ({"avx2": True, "avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, True),
        ({"neon": True, "bf16": False}, True),
        ({"avx512_bf16": True, "amx_bf16": False}, False),
        ({"avx512_bf16": False, "amx_bf16": True}, False),
        ({"neon": True, "bf16": True}, False),
    ],
)
def test_bf16_on_a_cpu_without_bf16_instructions_logs_one_warning_with_the_remedy(
    has, warns, backbone_path, capsys, monkeypatch
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    InstructionEncoder.from_pretrained(backbone_path("qwen2"), dtype=torch.bfloat16)
    said = warnings_of(capsys)
    assert len(said) == warns
    assert all(line.startswith("warning: dtype=bfloat16: ") for line in said)
    assert all(line.endswith("set dtype=float32") for line in said)
    InstructionEncoder.from_pretrained(backbone_path("qwen2"))
    InstructionEncoder.from_pretrained(backbone_path("qwen2"), dtype=torch.bfloat16, device="meta")
    warn_of_slow_bf16("cuda", "dtype=bfloat16", "dtype=float32")
    assert warnings_of(capsys) == []


def test_an_older_torch_gives_no_warning(capsys, monkeypatch):
    monkeypatch.setattr(precision, "torch", SimpleNamespace(cpu=SimpleNamespace(), device=torch.device))
    warn_of_slow_bf16("cpu", "dtype=bfloat16", "dtype=float32")
    assert capsys.readouterr().out == ""
