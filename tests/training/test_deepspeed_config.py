"""DeepSpeed configuration: from settings, with additions, and rejected additions."""

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.training.deepspeed_config import check, deepspeed_config


def settings_of(**changes):
    return TrainSettings(**{"records": "-", "model": "-", "output": "-", **changes})


def test_additions_are_merged_key_by_key():
    over = {"zero_optimization": {"reduce_bucket_size": 1000}, "optimizer": {"params": {"betas": [0.9, 0.95]}}}
    plain, changed = deepspeed_config(settings_of()), deepspeed_config(settings_of(deepspeed=over))
    assert changed["zero_optimization"] == plain["zero_optimization"] | {"reduce_bucket_size": 1000}
    assert changed["optimizer"]["params"] == plain["optimizer"]["params"] | {"betas": [0.9, 0.95]}
    assert {k: v for k, v in changed.items() if k not in over} == {k: v for k, v in plain.items() if k not in over}


def test_offload_becomes_deepspeed_keys():
    zero = DeepSpeedZeroConfig(**deepspeed_config(settings_of(zero_stage=3, offload="all"))["zero_optimization"])
    assert (zero.offload_optimizer.device, zero.offload_param.device) == ("cpu", "cpu")
    assert not zero.offload_optimizer.pin_memory
    on_gpu = deepspeed_config(settings_of(zero_stage=2, offload="optimizer", gpus_per_worker=1))["zero_optimization"]
    assert on_gpu["offload_optimizer"]["pin_memory"]
    assert "offload_param" not in on_gpu


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"zero_stage": 0, "offload": "optimizer"}, "offload"),
        ({"zero_stage": 2, "offload": "all"}, "offload"),
        ({"precision": "bf16", "zero_stage": 0}, "precision"),
        ({"interpolation": 0.5, "lora": {}}, "interpolation"),
        ({"interpolation": 0.5, "validation": {"records": "-"}, "zero_stage": 3}, "interpolation"),
        ({"deepspeed": {"train_micro_batch_size_per_gpu": 4}}, "deepspeed.train_micro_batch_size_per_gpu"),
        ({"deepspeed": {"train_batch_size": 4}}, "deepspeed.train_batch_size"),
        ({"deepspeed": {"optimizer": {"params": {"lr": 1}}}}, "deepspeed.optimizer.params.lr"),
        ({"deepspeed": {"optimizer": None}}, "deepspeed.optimizer"),
        ({"deepspeed": {"optimizer": {"type": "Lion"}}}, "deepspeed.optimizer.type"),
        ({"deepspeed": {"zero_optimization": {"stage": 1}}}, "deepspeed.zero_optimization.stage"),
        (
            {"deepspeed": {"zero_optimization": {"offload_param": {"device": "nvme"}}}, "zero_stage": 3},
            "deepspeed.zero_optimization.offload_param",
        ),
        ({"deepspeed": {"bf16": {"enabled": True}}}, "deepspeed.bf16.enabled"),
    ],
)
def test_conflicting_settings_are_rejected(change, setting):
    with pytest.raises(InputError) as error:
        check(settings_of(**change))
    assert [fault.setting for fault in error.value.faults] == [setting]


def test_settings_that_fit_each_other_are_accepted():
    check(settings_of())
    check(settings_of(zero_stage=3, offload="all"))
