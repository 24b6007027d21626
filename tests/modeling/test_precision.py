"""The warning about bfloat16 on CPUs without it."""

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
        ("flags\t\t: avx2 avx512f", True),
        ("Features\t: fp asimd", True),
        ("flags\t\t: avx2 avx512_bf16", False),
        ("flags\t\t: avx2 amx_bf16 amx_tile", False),
        ("Features\t: fp asimd bf16", False),
    ],
)
def test_bf16_on_a_cpu_without_bf16_instructions_logs_one_warning_with_the_remedy(
    has, warns, backbone_path, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(precision, "CPU_FACTS", tmp_path / "cpuinfo")
    precision.CPU_FACTS.write_text(f"processor\t: 0\n{has}\n\nprocessor\t: 1\n{has}\n")
    InstructionEncoder.from_pretrained(backbone_path("qwen2"), dtype=torch.bfloat16)
    said = warnings_of(capsys)
    assert len(said) == warns
    assert all(line.startswith("warning: dtype=bfloat16: ") for line in said)
    assert all(line.endswith("set dtype=float32") for line in said)
    InstructionEncoder.from_pretrained(backbone_path("qwen2"))
    InstructionEncoder.from_pretrained(backbone_path("qwen2"), dtype=torch.bfloat16, device="meta")
    warn_of_slow_bf16("cuda", "dtype=bfloat16", "dtype=float32")
    assert warnings_of(capsys) == []


def test_a_system_without_the_file_gives_no_warning(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(precision, "CPU_FACTS", tmp_path / "none")
    warn_of_slow_bf16("cpu", "dtype=bfloat16", "dtype=float32")
    assert capsys.readouterr().out == ""
