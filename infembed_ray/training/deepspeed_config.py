"""DeepSpeed configuration of a run, and the keys that a user may add. It does not import DeepSpeed."""

from typing import Any

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError

FILE = "deepspeed.json"
"""File in the output of a run that shows its configuration."""
_RESERVED = {
    "deepspeed.train_batch_size",
    "deepspeed.scheduler",
    "deepspeed.fp16",
    "deepspeed.amp",
    "deepspeed.checkpoint",
    "deepspeed.zero_optimization.offload_optimizer",
    "deepspeed.zero_optimization.offload_param",
    "deepspeed.zero_optimization.compute_grad_norm",
}
"""Keys that the engine needs to be absent, beside those that it sets."""


def check(settings: TrainSettings) -> None:
    """Check that the settings fit each other and DeepSpeed.

    Raises:
        InputError: DeepSpeed would reject or ignore a setting, or it would break the engine.
    """
    stage, offload = settings.zero_stage, settings.offload
    if offload is not None and stage == 0:
        raise InputError.of("offload", offload, "zero_stage=0 does not support it", "set zero_stage=1 or higher")
    if offload == "all" and stage != 3:
        remedy = "set offload=optimizer, or zero_stage=3"
        raise InputError.of("offload", offload, f"needs zero_stage=3, not {stage}", remedy)
    if settings.interpolation < 1 and settings.lora is not None:
        fault, remedy = "lora trains adapters, which have no weights of the model's own", "leave one of the two out"
        raise InputError.of("interpolation", settings.interpolation, fault, remedy)
    if settings.interpolation < 1 and settings.validation is not None and stage == 3:
        fault = "validation measures the published weights, of which a worker has a part under zero_stage=3"
        raise InputError.of("interpolation", settings.interpolation, fault, "set zero_stage=2, or leave validation out")
    if settings.precision == "bf16" and stage == 0:
        remedy = "set zero_stage=1 or higher"
        raise InputError.of("precision", "bf16", "zero_stage=0 would accumulate and export in bf16", remedy)
    deepspeed_config(settings)


def deepspeed_config(settings: TrainSettings) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a run. `Engine.update` sets the learning rate of each step.

    Raises:
        InputError: the setting `deepspeed` has a key that the engine or another setting decides.
    """
    zero: dict[str, Any] = {"stage": settings.zero_stage}
    on_cpu = {"device": "cpu", "pin_memory": settings.gpus_per_worker > 0}
    if settings.offload is not None:
        zero["offload_optimizer"] = on_cpu
    if settings.offload == "all":
        zero["offload_param"] = dict(on_cpu)
    ours = {
        "train_micro_batch_size_per_gpu": -(-settings.records_per_step // settings.workers),
        "gradient_accumulation_steps": 1,  # the engine marks the last backward pass of a step itself
        # With gradients offloaded to the CPU, `step` must end the accumulation. Managed, DeepSpeed would lose the
        # gradient of a parameter that the last pass does not reach (the other tower).
        "managed_gradient_accumulation": settings.zero_stage < 2 or settings.offload is None,
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
    return _extended(ours, settings.deepspeed, "deepspeed")


def _extended(ours: dict[str, Any], additions: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return `ours` with additional keys, level by level; InputError for a key that is reserved or set already."""
    extended = dict(ours)
    for key, value in additions.items():
        name = f"{prefix}.{key}"
        if isinstance(value, dict) and isinstance(extended.get(key), dict):
            extended[key] = _extended(extended[key], value, name)
        elif key in extended or name in _RESERVED:
            raise InputError.of(name, value, "the engine or a setting of its own decides it", "leave it out")
        else:
            extended[key] = value
    return extended
