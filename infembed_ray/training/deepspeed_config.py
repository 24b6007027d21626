"""The DeepSpeed JSON of a run, and what of it a user may change. Needs no DeepSpeed: a driver writes and checks it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from infembed_ray.config import TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.storage import write_json

FILE = "deepspeed.json"
"""Where a run's output holds it."""

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
"""Keys that the override may not set -> the setting that does."""
_ENGINES = (
    "managed_gradient_accumulation",
    "optimizer.type",
    "optimizer.params.torch_adam",
    "data_types.grad_accum_dtype",
    "zero_optimization.compute_grad_norm",
    "checkpoint",
)
"""Keys that nobody may set: the engine relies on what it has there."""


def check(settings: TrainSettings) -> None:
    """Do these settings fit together?

    Raises:
        InputError: DeepSpeed would refuse them, ignore them, or fight the engine over them.
    """
    stage, offload = settings.zero_stage, settings.offload
    if stage == 0 and (offload.optimizer or offload.parameters):
        raise InputError("zero_stage=0: offloads nothing; set zero_stage=1 or higher, or leave offload out")
    if stage != 3 and offload.parameters:
        raise InputError(f"offload.parameters={offload.parameters}: needs zero_stage=3; zero_stage={stage} keeps them")
    if offload.parameters == "nvme" and offload.nvme_path is None:
        raise InputError("offload.nvme_path is missing: offloading to nvme needs a directory on every node's own disk")
    if settings.precision == "bf16" and stage == 0:
        raise InputError("precision=bf16: zero_stage=0 would add up and export in bf16; set zero_stage=1 or higher")
    if settings.compile and stage == 3:
        raise InputError(
            "compile=true: zero_stage=3 gathers parameters in hooks that no compiled graph holds; set zero_stage=2 or "
            "compile=false"
        )
    for key in _leaves(settings.deepspeed):
        for owned, setting in _OWN_SETTING.items():
            if _within(key, owned):
                raise InputError(f"deepspeed.{key}: is given by {setting}; set that")
        for owned in _ENGINES:
            if _within(key, owned):
                raise InputError(f"deepspeed.{key}: the engine depends on its own value; leave it out")


def deepspeed_config(settings: TrainSettings) -> dict[str, Any]:
    """The DeepSpeed JSON of a run. The learning rate is set anew each step by `Engine.update`."""
    zero: dict[str, Any] = {"stage": settings.zero_stage}
    offload = settings.offload
    for key, device in (("offload_optimizer", offload.optimizer), ("offload_param", offload.parameters)):
        if device is not None:
            zero[key] = {"device": device} | ({"nvme_path": offload.nvme_path} if device == "nvme" else {})
    ours = {
        "train_micro_batch_size_per_gpu": -(-settings.records_per_step // (settings.accumulation * settings.workers)),
        "gradient_accumulation_steps": 1,  # the engine says itself which backward pass is the last of a step
        # but where gradients go to the CPU, it is `step` that ends it: managed, DeepSpeed would lose the gradient of a
        # parameter that the last pass does not reach (the temperature, the other tower)
        "managed_gradient_accumulation": settings.zero_stage < 2 or offload.optimizer is None,
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": zero,
        "bf16": {"enabled": settings.precision == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},  # passes add up: in bf16 each would round the sum of those before
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": settings.learning_rate,
                "weight_decay": settings.weight_decay,
                "torch_adam": True,  # DeepSpeed's own CPU Adam compiles for 48 s and gains nothing at these sizes
            },
        },
        "steps_per_print": 1 << 30,
    }
    return _merged(ours, settings.deepspeed)


def write(settings: TrainSettings, directory: Path) -> None:
    """Write it into a run's output, to be seen."""
    write_json(directory / FILE, deepspeed_config(settings))


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, level by level."""
    merged = copy.deepcopy(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if nested else copy.deepcopy(value)
    return merged


def _leaves(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of all values that are no mappings themselves, or empty ones."""
    names: list[str] = []
    for key, value in values.items():
        names += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"]
    return names


def _within(key: str, owned: str) -> bool:
    """Is it that key, below it, or one that replaces it together with all beside it?"""
    return f"{key}.".startswith(f"{owned}.") or f"{owned}.".startswith(f"{key}.")
