"""DeepSpeed configuration: from settings, with overrides, and rejected overrides."""

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from infembed_ray.config.training import Offload, TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.training.deepspeed_config import check, deepspeed_config


def settings_of(**changes):
    return TrainSettings(**{"records": "-", "model": "-", "output": "-", **changes})


def test_overrides_are_merged_key_by_key():
    over = {"zero_optimization": {"reduce_bucket_size": 1000}, "optimizer": {"params": {"betas": [0.9, 0.95]}}}
    plain, changed = deepspeed_config(settings_of()), deepspeed_config(settings_of(deepspeed=over))
    assert changed["zero_optimization"] == plain["zero_optimization"] | {"reduce_bucket_size": 1000}
    assert changed["optimizer"]["params"] == plain["optimizer"]["params"] | {"betas": [0.9, 0.95]}
    assert {k: v for k, v in changed.items() if k not in over} == {k: v for k, v in plain.items() if k not in over}


def test_offload_settings_become_deepspeed_keys():
    offload = Offload(optimizer="cpu", parameters="nvme", nvme_path="/disk")
    zero = DeepSpeedZeroConfig(**deepspeed_config(settings_of(zero_stage=3, offload=offload))["zero_optimization"])
    assert (zero.offload_optimizer.device, zero.offload_optimizer.nvme_path) == ("cpu", None)
    assert (zero.offload_param.device, str(zero.offload_param.nvme_path)) == ("nvme", "/disk")
    assert not zero.offload_optimizer.pin_memory
    on_gpu = deepspeed_config(settings_of(zero_stage=2, offload=Offload(optimizer="cpu"), gpus_per_worker=1))
    assert on_gpu["zero_optimization"]["offload_optimizer"]["pin_memory"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zero_stage": 0, "offload": Offload(optimizer="cpu")}, "zero_stage=0: does not support offload"),
        ({"zero_stage": 2, "offload": Offload(parameters="cpu")}, "offload.parameters=cpu: needs zero_stage=3"),
        ({"zero_stage": 3, "offload": Offload(parameters="nvme")}, "offload.nvme_path is missing"),
        ({"zero_stage": 3, "compile": True}, "compile=true: zero_stage=3 gathers parameters in hooks"),
        ({"precision": "bf16", "zero_stage": 0}, "precision=bf16: zero_stage=0 would accumulate and export in bf16"),
        (
            {"deepspeed": {"train_micro_batch_size_per_gpu": 4}},
            "train_micro_batch_size_per_gpu: the setting records_per",
        ),
        ({"deepspeed": {"gradient_accumulation_steps": 4}}, "deepspeed.gradient_accumulation_steps: .* accumulation"),
        ({"deepspeed": {"optimizer": {"params": {"lr": 1}}}}, "deepspeed.optimizer.params.lr: .* learning_rate"),
        ({"deepspeed": {"optimizer": None}}, "deepspeed.optimizer: the setting learning_rate"),
        ({"deepspeed": {"zero_optimization": {"stage": 1}}}, "deepspeed.zero_optimization.stage: .* zero_stage"),
        ({"deepspeed": {"bf16": {"enabled": True}}}, "deepspeed.bf16.enabled: the setting precision"),
        ({"deepspeed": {"optimizer": {"type": "Lion"}}}, "deepspeed.optimizer.type: cannot be changed"),
        ({"deepspeed": {"zero_optimization": {"compute_grad_norm": False}}}, "compute_grad_norm: cannot be changed"),
    ],
)
def test_conflicting_settings_are_rejected_in_one_line(change, message):
    with pytest.raises(InputError, match=message) as error:
        check(settings_of(**change))
    assert "\n" not in str(error.value)


def test_default_settings_are_accepted():
    check(settings_of())
    check(settings_of(zero_stage=3, offload=Offload(optimizer="cpu", parameters="cpu")))
