"""Every private name of DeepSpeed (0.19) and torch (2.13) that training uses, with the reason.

No other module of the package uses one. tests/training/test_deepspeed_compat.py has a contract test for each of them,
so that an upgrade which changes one fails there.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine as CheckpointEngine
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor, nn
from torch.utils.cpp_extension import _get_build_directory

SHARDED_STATES = "*zero_pp_rank_*_optim_states.pt"
"""Files of a ZeRO checkpoint; their names tell a sharded checkpoint from one of stage 0."""
WHOLE_STATE = "mp_rank_00_model_states.pt"
"""File of a stage-0 checkpoint that holds the weights. `zero_to_fp32` reads sharded checkpoints only."""
BUILD_LOCK = "lock"
"""File that torch's FileBaton creates in an op's build directory. A killed build leaves it; later builds wait for it."""


def wrap_op_builds(build: Callable[[str, Path, Callable[[], Any]], Any]) -> None:
    """Route each compilation of a DeepSpeed op in this process through `build(name, directory, compile_op)`.

    Replaces `OpBuilder.jit_load`, which compiles and loads an op, and asks torch's `_get_build_directory` where the op
    is built. Neither library has a hook around a build.
    """
    jit_load = OpBuilder.jit_load
    if hasattr(jit_load, "__wrapped__"):
        return

    @functools.wraps(jit_load)
    def wrapped(builder: OpBuilder, verbose: bool = True) -> Any:
        directory = Path(_get_build_directory(builder.name, verbose=False))
        return build(builder.name, directory, functools.partial(jit_load, builder, verbose))

    OpBuilder.jit_load = wrapped


def partitioner(config: dict[str, Any], dtype: torch.dtype) -> Callable[[nn.Parameter], None]:
    """Return a function that keeps of a parameter this worker's ZeRO-3 partition of worker 0's values.

    `zero.Init` partitions all parameters of a given module at once, or in the module's constructor. Loading needs the same
    for one parameter at a time, which `_convert_to_zero_parameters` does.
    """
    init = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=config, dtype=dtype)
    return lambda parameter: init._convert_to_zero_parameters([parameter])


def nvme_offload_available() -> bool:
    """Return whether libaio and its headers are installed. Only the op builder of NVMe offload knows."""
    return bool(AsyncIOBuilder().is_compatible())


def use_checkpoint_engine(engine: Any, files: CheckpointEngine) -> None:
    """Make a DeepSpeed engine read and write checkpoint files through `files`. No public setting accepts such an object.

    Sets `checkpoint_engine`, and disables `_copy_recovery_script`, which would copy a script into each checkpoint and
    raise on a full disk.
    """
    engine.checkpoint_engine = files
    engine._copy_recovery_script = lambda save_path: None


def backward(engine: Any, loss: Tensor, last: bool) -> None:
    """Back-propagate, and mark the last backward pass of a step as DeepSpeed's accumulation boundary.

    Where gradients are offloaded, `step` itself is the boundary; `deepspeed_config` then turns off the undocumented
    `managed_gradient_accumulation`.
    """
    if engine.managed_gradient_accumulation():
        engine.set_gradient_accumulation_boundary(last)
    engine.backward(loss)


def clear_gradients(optimizer: Any, zero_stage: int, offloaded: bool) -> None:
    """Zero the gradients of the previous step that ZeRO keeps outside the parameters.

    The first backward pass of a step overwrites them, but only for the parameters that it reaches. Without this call,
    the gradient of any other parameter (of the other tower) would include the previous step's. ZeRO-3 keeps them in
    `grad_partitions_flat_buffer`, ZeRO-1 and 2 with CPU offload in `accumulated_grads_in_cpu`.
    """
    if zero_stage == 3:
        optimizer.grad_partitions_flat_buffer.zero_()
    elif offloaded:
        for gradient in optimizer.accumulated_grads_in_cpu.values():
            gradient.zero_()


@contextlib.contextmanager
def loading_universal(engine: Any, zero_stage: int) -> Iterator[None]:
    """Work around two defects of DeepSpeed 0.19 while the block loads a universal checkpoint into an engine.

    ZeRO-1 and 2 fail at a parameter group of which this worker holds no part, such as that of the temperature, a single
    number: those groups are hidden (a parameter in `bf16_groups` or `bit16_groups` without `_hp_mapping`). ZeRO-3 gives
    all groups the options of the first, and all of them one step counter, which each then advances: both are restored.
    """
    optimizer = engine.optimizer
    groups = optimizer.param_groups
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    if zero_stage < 3:
        parts = optimizer.bf16_groups if hasattr(optimizer, "bf16_groups") else optimizer.bit16_groups
        optimizer.optimizer.param_groups = [
            group for group, part in zip(groups, parts, strict=True) if any(p._hp_mapping for p in part)
        ]
    set_load_universal(engine, True)
    yield
    optimizer.optimizer.param_groups = groups
    for group, own in zip(groups, options, strict=True):
        group |= own
    for state in optimizer.optimizer.state.values():
        if "step" in state:
            state["step"] = copy.deepcopy(state["step"])


def set_load_universal(engine: Any, value: bool) -> None:
    """Choose the format that the next `load_checkpoint` reads. In a configuration file it would hold for every load."""
    engine._config.load_universal_checkpoint = value


def to_universal(checkpoint: Path, output: Path) -> None:
    """Convert a sharded checkpoint to the universal format, which any number of workers can load.

    `ds_to_universal` is a command line tool; its `main` is called here with the parsed arguments, without its output.
    """
    arguments = argparse.Namespace(
        input_folder=str(checkpoint),
        output_folder=str(output),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with _silence():
        ds_to_universal.main(arguments)


def master_weights(checkpoint: Path) -> dict[str, Any]:
    """Return the fp32 master weights of a checkpoint of any ZeRO stage, without frozen parameters, by name.

    The files are mapped into memory. The method `contiguous` of a weight reads it; under ZeRO-3 it joins its parts.
    """
    if any(checkpoint.glob(SHARDED_STATES)):
        with _silence():
            return dict(
                get_fp32_state_dict_from_zero_checkpoint(
                    str(checkpoint.parent), tag=checkpoint.name, exclude_frozen_parameters=True, lazy_mode=True
                )
            )
    return dict(torch.load(checkpoint / WHOLE_STATE, map_location="cpu", mmap=True, weights_only=False)["module"])


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Discard what the block prints: DeepSpeed's tools have no setting for that."""
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        yield


def close(engine: Any) -> None:
    """Release DeepSpeed and the process group.

    Without `destroy`, ZeRO-3 aborts at exit. torch's `destroy_process_group` would leave DeepSpeed with dead groups.
    """
    engine.destroy()
    deepspeed.comm.destroy_process_group()
