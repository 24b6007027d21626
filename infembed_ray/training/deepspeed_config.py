"""DeepSpeed configuration of a run, and the keys that a user may override. It does not import DeepSpeed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.storage import durable

FILE = "deepspeed.json"
"""File in the output of a run that shows its configuration."""

_OWN_SETTING = {
    "train_batch_size": "records_per_step",
    "train_micro_batch_size_per_gpu": "records_per_step",
    "gradient_accumulation_steps": "accumulation",
    "gradient_clipping": "max_grad_norm",
    "scheduler": "schedule",
    "bf16": "precision",
    "fp16": "precision",
    "amp": "precision",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "offload.optimizer",
    "zero_optimization.offload_optimizer.nvme_path": "offload.nvme_path",
    "zero_optimization.offload_param.device": "offload.parameters",
    "zero_optimization.offload_param.nvme_path": "offload.nvme_path",
}
"""Key that an override may not set -> the setting that sets it."""
_RESERVED = (
    "managed_gradient_accumulation",
    "optimizer.type",
    "optimizer.params.torch_adam",
    "data_types.grad_accum_dtype",
    "zero_optimization.compute_grad_norm",
    "checkpoint",
)
"""Keys that no setting may change, because the engine relies on their values."""


def check(settings: TrainSettings) -> None:
    """Check that the settings fit each other and DeepSpeed.

    Raises:
        InputError: DeepSpeed would reject or ignore a setting, or it would break the engine.
    """
    stage, offload = settings.zero_stage, settings.offload
    if stage == 0 and (offload.optimizer or offload.parameters):
        raise InputError("zero_stage=0: does not support offload; set zero_stage=1 or higher, or leave offload out")
    if stage != 3 and offload.parameters:
        raise InputError(f"offload.parameters={offload.parameters}: needs zero_stage=3, not {stage}; or leave it out")
    if offload.parameters == "nvme" and offload.nvme_path is None:
        raise InputError("offload.nvme_path is missing: offloading to nvme needs a directory on every node's own disk")
    if settings.precision == "bf16" and stage == 0:
        raise InputError("precision=bf16: zero_stage=0 would accumulate and export in bf16; set zero_stage=1 or higher")
    if settings.compile and stage == 3:
        raise InputError(
            "compile=true: zero_stage=3 gathers parameters in hooks, which cannot be compiled; set zero_stage=2 or "
            "compile=false"
        )
    for key in _leaves(settings.deepspeed):
        for owned, setting in _OWN_SETTING.items():
            if _within(key, owned):
                raise InputError(f"deepspeed.{key}: the setting {setting} decides it; set that instead")
        for owned in _RESERVED:
            if _within(key, owned):
                raise InputError(
                    f"deepspeed.{key}: cannot be changed, because the engine relies on its value; leave it out"
                )


def deepspeed_config(settings: TrainSettings) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a run. `Engine.update` sets the learning rate of each step."""
    zero: dict[str, Any] = {"stage": settings.zero_stage}
    offload = settings.offload
    for key, device in (("offload_optimizer", offload.optimizer), ("offload_param", offload.parameters)):
        if device is not None:
            zero[key] = {"device": device, "pin_memory": settings.gpus_per_worker > 0}
            zero[key] |= {"nvme_path": offload.nvme_path} if device == "nvme" else {}
    ours = {
        "train_micro_batch_size_per_gpu": -(-settings.records_per_step // (settings.accumulation * settings.workers)),
        "gradient_accumulation_steps": 1,  # the engine marks the last backward pass of a step itself
        # With gradients offloaded to the CPU, `step` must end the accumulation. Managed, DeepSpeed would lose the
        # gradient of a parameter that the last pass does not reach (the temperature, the other tower).
        "managed_gradient_accumulation": settings.zero_stage < 2 or offload.optimizer is None,
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": zero,
        "bf16": {"enabled": settings.precision == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},  # in bf16, each pass would round the sum of those before
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": settings.learning_rate,
                "weight_decay": settings.weight_decay,
                # One kernel on GPU and CPU, without temporaries. DeepSpeed's CPU Adam compiles for 48 s instead.
                "torch_adam": True,
                "fused": True,
            },
        },
        "steps_per_print": 1 << 30,
    }
    return _merged(ours, settings.deepspeed)


def write(settings: TrainSettings, directory: Path) -> None:
    """Write the configuration into the output of a run."""
    durable.replace_json(directory / FILE, deepspeed_config(settings))


def _merged(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """Return `base` updated by `override`, level by level."""
    merged = copy.deepcopy(base)
    for key, value in override.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if nested else copy.deepcopy(value)
    return merged


def _leaves(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of all values that are not mappings, and of empty mappings."""
    names: list[str] = []
    for key, value in values.items():
        names += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"]
    return names


def _within(key: str, owned: str) -> bool:
    """Return whether a key is `owned`, below it, or a mapping that replaces it."""
    return f"{key}.".startswith(f"{owned}.") or f"{owned}.".startswith(f"{key}.")
