"""Contracts of DeepSpeed's tools. test_engine.py and checkpoints/test_manager.py use all private names in every ZeRO stage."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.engine import DeepSpeedEngine

from infembed_ray.training import deepspeed_compat

ENGINE = """
import sys, torch
from deepspeed import initialize
from infembed_ray.training.engine import connect
from infembed_ray.config.training import TrainSettings
connect(TrainSettings(records="-", model="-", output="-"))
model = torch.nn.Linear(2, 2)
config = {"train_batch_size": 1, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": False}
initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
print("torch._inductor.compile_fx" in sys.modules, "deepspeed.runtime.zero.muon.original_muon" in sys.modules)
"""


@pytest.mark.integration
def test_an_engine_builds_neither_the_op_of_inference_nor_the_kernels_of_muon():
    deepspeed_compat.skip_builds()
    assert deepspeed_compat.communication.build_shm_op() is None
    started = subprocess.run([sys.executable, "-c", ENGINE], capture_output=True, text=True, check=True)
    assert started.stdout.splitlines()[-1] == "False True"


def test_arguments_of_ds_to_universal_are_complete(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["ds_to_universal", "--input_folder", "a", "--output_folder", "b"])
    expected = vars(ds_to_universal.parse_arguments()).keys()
    given = []
    monkeypatch.setattr(ds_to_universal, "main", given.append)
    deepspeed_compat.to_universal(tmp_path / "a", tmp_path / "b")
    assert vars(given[0]).keys() == expected


def test_file_names_tell_sharded_checkpoints_from_whole_ones(tmp_path):
    engine = SimpleNamespace(checkpoint_mp_rank=0, zero_optimization_partition_weights=lambda: False)
    assert Path(DeepSpeedEngine._get_ckpt_name(engine, "d", "t")).name == deepspeed_compat.WHOLE_STATE
    prefix = DeepSpeedEngine._get_rank_zero_ckpt_name  # (self, directory, tag, model-parallel rank, rank, bf16)
    naming = SimpleNamespace(_get_zero_ckpt_prefix=DeepSpeedEngine._get_zero_ckpt_prefix.__get__(SimpleNamespace()))
    for bf16 in (False, True):
        assert Path(prefix(naming, "d", "t", 0, 3, bf16)).match(deepspeed_compat.SHARDED_STATES)


def test_master_weights_of_a_whole_checkpoint(tmp_path):
    torch.save({"module": {"w": torch.ones(2)}}, tmp_path / deepspeed_compat.WHOLE_STATE)
    assert deepspeed_compat.master_weights(tmp_path)["w"].tolist() == [1, 1]
