"""Every private name of DeepSpeed (0.19) that training uses, with the reason; no other module of the package uses one."""

import argparse
import contextlib
import copy
import importlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine as CheckpointEngine
from deepspeed.runtime.utils import mask_nan_or_inf_with_val_inplace
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor, nn

communication: Any = importlib.import_module("deepspeed.comm.torch")
"""DeepSpeed's communication backend. `import deepspeed.comm.torch as ...` may give torch itself, which `deepspeed.comm` imports."""
compiler: Any = importlib.import_module("deepspeed.runtime.compiler")
SHARDED_STATES = "*zero_pp_rank_*_optim_states.pt"
"""Files of a ZeRO checkpoint; their names tell a sharded checkpoint from one of stage 0."""
WHOLE_STATE = "mp_rank_00_model_states.pt"
"""File of a stage-0 checkpoint that holds the weights. `zero_to_fp32` reads sharded checkpoints only."""


def skip_builds() -> None:
    """Keep DeepSpeed from building what training does not use; there is no setting.

    It compiles a shared-memory op of inference when it connects CPU workers, by `build_shm_op` of its communication
    backend. Every engine imports the Muon optimizer, and the decorator `compiler.compile()` of Muon imports Inductor.
    """
    communication.build_shm_op = lambda: None
    compiler.compile = lambda: compiler.dummy_decorator


def partitioner(config: dict[str, Any], dtype: torch.dtype) -> Callable[[nn.Parameter], None]:
    """Return a function that keeps of a parameter this worker's ZeRO-3 partition of worker 0's values.

    `zero.Init` partitions whole modules; its `_convert_to_zero_parameters` takes one parameter at a time.
    """
    init = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=config, dtype=dtype)
    return lambda parameter: init._convert_to_zero_parameters([parameter])


def use_checkpoint_engine(engine: Any, files: CheckpointEngine) -> None:
    """Make a DeepSpeed engine read and write checkpoint files through `files`. No public setting accepts such an object.

    Sets `checkpoint_engine`, and disables `_copy_recovery_script`, which would copy a script into each checkpoint and
    raise on a full disk.
    """
    engine.checkpoint_engine = files
    engine._copy_recovery_script = lambda save_path: None


def lighten(engine: Any) -> None:
    """Replace loops over all parameters in ZeRO-1 and 2, because a fast device waits for them in a small step.

    An update of DeepSpeed looks for infinities in each gradient, computes the norm of each and, afterwards, points each
    parameter to its place in a buffer, where it is already. Here the norms are one operator, and infinite if a gradient
    is. A single worker has nothing to reduce, so it adds each gradient to the fp32 sum without a bucket in between.
    """
    optimizer = engine.optimizer
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or optimizer.cpu_offload or engine.mpu is not None:
        return
    optimizer._check_overflow = lambda partition_gradients: None
    optimizer._update_model_bit16_weights = lambda group: None
    optimizer.get_grad_norm_direct = partial(_norm, optimizer)
    groups = list(enumerate(optimizer.params_in_partition))
    flat = all(optimizer._use_compact_grad_partition_buffer(n) for n, _ in groups)
    if deepspeed.comm.get_world_size() > 1 or not flat:
        return

    def add(group: int, place: int, parameter: nn.Parameter) -> None:
        optimizer._get_compact_grad_partition_buffer(group)[place].add_(parameter.grad)
        parameter.grad = None

    for hook in optimizer._grad_acc_hooks:
        hook.remove()
    optimizer._grad_acc_hooks = [
        parameter.register_post_accumulate_grad_hook(partial(add, n, place))
        for n, group in groups
        for place, parameter in enumerate(group)
    ]
    optimizer.reduce_ipg_grads = lambda comm_dtype=None: None


def _norm(optimizer: Any, gradients: list[Tensor], parameters: Any, norm_type: int = 2) -> Tensor:
    """Return the norm of all gradients of a group on all workers, or -1 if it is not finite, as ZeRO expects."""
    total = nn.utils.get_total_norm(gradients).square()
    deepspeed.comm.all_reduce(total, group=optimizer.dp_process_group)
    total = total.sqrt()
    mask_nan_or_inf_with_val_inplace(total, device=optimizer.device)
    return total


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


def load(engine: Any, directory: Path, tag: str, universal: bool) -> None:
    """Restore an engine from the checkpoint `directory/tag`.

    `load_universal_checkpoint` chooses the format of the next load; in a configuration file it would hold for every load.
    DeepSpeed 0.19 gives the parts of a ZeRO-3 optimizer one common step counter then, which each of them would advance.
    """
    engine._config.load_universal_checkpoint = universal
    # Not strict, because the checkpoint has no frozen parameters.
    path, _ = engine.load_checkpoint(str(directory), tag=tag, load_module_strict=False)
    if path is None:
        raise RuntimeError(f"DeepSpeed could not load {directory / tag}")
    if universal:
        for state in engine.optimizer.optimizer.state.values():
            if "step" in state:
                state["step"] = copy.deepcopy(state["step"])


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
            options = {"exclude_frozen_parameters": True, "lazy_mode": True}
            weights = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint.parent), tag=checkpoint.name, **options)
            return dict(weights)
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
