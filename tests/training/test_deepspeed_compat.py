"""Contract tests: one for each private name of DeepSpeed and torch in `deepspeed_compat`, so that an upgrade fails here.

They look at the installed libraries only. That the names do their work in every ZeRO stage is shown by test_engine.py
and checkpoints/test_manager.py.
"""

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import zero_to_fp32
from torch.utils import cpp_extension

from infembed_ray.training import deepspeed_compat
from infembed_ray.training.deepspeed_compat import communication


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_shared_memory_op_is_for_inference_and_is_not_built():
    """No collective of a training reads it, so that training needs no compiler."""
    source = inspect.getsource(communication)
    assert source.count("build_shm_op()") == 2  # its definition, and the one use
    users = [name for name, f in vars(communication.TorchBackend).items() if "torch.ops.deepspeed" in source_of(f)]
    assert users == ["inference_all_reduce"]
    deepspeed_compat.skip_shared_memory_op()
    assert communication.build_shm_op() is None


def source_of(value):
    return inspect.getsource(value) if inspect.isfunction(value) else ""


def test_torch_guards_a_build_with_the_lock_file():
    assert f"FileBaton(os.path.join(build_directory, '{deepspeed_compat.BUILD_LOCK}'))" in inspect.getsource(
        cpp_extension
    )
    assert parameters(cpp_extension._get_build_directory) == ["name", "verbose"]


def test_a_parameter_is_partitioned_by_itself():
    assert parameters(Init._convert_to_zero_parameters) == ["self", "param_list"]
    source = inspect.getsource(Init._convert_to_zero_parameters) + inspect.getsource(Init._zero_init_param)
    assert "dist.broadcast(param.data" in source  # from worker 0, which alone reads the weights


def test_killed_build_of_the_nvme_op_is_discarded(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    builder = deepspeed_compat.AsyncIOBuilder
    left = tmp_path / builder().name / deepspeed_compat.BUILD_LOCK
    left.parent.mkdir()
    left.touch()
    there = []
    monkeypatch.setattr(builder, "is_compatible", lambda self: True)
    monkeypatch.setattr(builder, "load", lambda self, verbose: there.append(left.parent.exists()))
    assert deepspeed_compat.build_async_io()
    assert there == [False]
    monkeypatch.setattr(builder, "is_compatible", lambda self: False)
    assert not deepspeed_compat.build_async_io()


def test_checkpoint_engine_saves_and_makes_directories():
    assert parameters(deepspeed_compat.CheckpointEngine.save) == ["self", "state_dict", "path"]
    assert parameters(deepspeed_compat.CheckpointEngine.makedirs) == ["self", "path", "exist_ok"]


@pytest.mark.parametrize("method", ["_save_checkpoint", "_save_zero_checkpoint"])
def test_engine_writes_checkpoints_through_its_checkpoint_engine(method):
    assert "self.checkpoint_engine.save(" in inspect.getsource(getattr(DeepSpeedEngine, method))


def test_engine_copies_a_recovery_script():
    assert parameters(DeepSpeedEngine._copy_recovery_script) == ["self", "save_path"]


def test_managed_gradient_accumulation_is_a_configuration_key():
    config = SimpleNamespace(managed_gradient_accumulation=False)
    assert DeepSpeedEngine.managed_gradient_accumulation(SimpleNamespace(_config=config)) is False
    assert "managed_gradient_accumulation" in inspect.getsource(DeepSpeedConfig)
    assert parameters(DeepSpeedEngine.set_gradient_accumulation_boundary) == ["self", "is_boundary"]


def test_zero_3_keeps_gradients_in_a_flat_buffer():
    assert "self.grad_partitions_flat_buffer = " in inspect.getsource(DeepSpeedZeroOptimizer_Stage3)


def test_zero_1_and_2_keep_offloaded_gradients_by_parameter():
    assert "self.accumulated_grads_in_cpu = {}" in inspect.getsource(DeepSpeedZeroOptimizer)


@pytest.mark.parametrize(
    ("optimizer", "groups"), [(DeepSpeedZeroOptimizer, "bit16_groups"), (BF16_Optimizer, "bf16_groups")]
)
def test_parameters_are_grouped_and_mapped_to_the_part_of_this_worker(optimizer, groups):
    source = inspect.getsource(optimizer)
    assert f"self.{groups} = []" in source
    assert "_hp_mapping" in source
    assert "self.optimizer = " in source


def test_engine_loads_universal_checkpoints_if_its_configuration_says_so():
    engine = SimpleNamespace(_config=SimpleNamespace(load_universal_checkpoint=False))
    deepspeed_compat.set_load_universal(engine, True)
    assert DeepSpeedEngine.load_universal_checkpoint(engine) is True


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


def test_master_weights_of_a_sharded_checkpoint_can_leave_frozen_parameters_out():
    names = parameters(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint)
    assert {"checkpoint_dir", "tag", "exclude_frozen_parameters", "lazy_mode"} <= set(names)
    assert parameters(zero_to_fp32.GatheredTensor.contiguous) == ["self"]


def test_master_weights_of_a_whole_checkpoint(tmp_path):
    torch.save({"module": {"encoder.w": torch.ones(2)}}, tmp_path / deepspeed_compat.WHOLE_STATE)
    assert deepspeed_compat.master_weights(tmp_path)["encoder.w"].tolist() == [1, 1]


def test_an_engine_and_the_process_group_can_be_closed():
    assert parameters(DeepSpeedEngine.destroy) == ["self"]
    assert callable(deepspeed.comm.destroy_process_group)
