"""One facade over DeepSpeed; nothing else touches it.

The same engine runs under Ray Train, under torchrun and in a single process: it only needs torch.distributed's
environment variables, and sets those of a single process where there are none.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor

from infembed_ray.config import TrainSettings
from infembed_ray.modeling.encoder import InstructionEncoder


def deepspeed_config(settings: TrainSettings) -> dict[str, Any]:
    """The DeepSpeed JSON of a run. The learning rate is set anew each step by `Engine.step`."""
    return {
        "train_micro_batch_size_per_gpu": settings.records_per_worker,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": {"stage": settings.zero_stage},
        "bf16": {"enabled": settings.precision == "bf16"},
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


def learning_rate(settings: TrainSettings, step: int, steps: int) -> float:
    """The rate of step `step` (0-based) of `steps`: linear warm-up, then linear decay to 0 (appendix: AdamW 5e-5)."""
    warmup = int(settings.warmup_fraction * steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    return settings.learning_rate * (steps - step) / max(1, steps - warmup)


class Engine:
    """An encoder under DeepSpeed.

    Args:
        encoder: moved to this worker's device and precision.
        settings: of the run.
    """

    def __init__(self, encoder: InstructionEncoder, settings: TrainSettings) -> None:
        _single_process_environment()
        deepspeed.init_distributed(dist_backend=None if settings.gpus_per_worker else "gloo", verbose=False)
        self._engine, *_ = deepspeed.initialize(
            model=encoder, model_parameters=list(encoder.parameters()), config=deepspeed_config(settings)
        )
        self.encoder = encoder

    def encode(self, sequences: list[list[int]]) -> Tensor:
        """Token lists -> (n, d) unit vectors with gradient."""
        embeddings: Tensor = self._engine(*self.encoder.pad(sequences))
        return embeddings

    def train(self) -> None:
        """Dropout on."""
        self._engine.train()

    def step(self, loss: Tensor, rate: float) -> float:
        """Back-propagate, clip and update at learning rate `rate`; returns the gradient norm before clipping."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        self._engine.backward(loss)
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        return float(norm) if norm is not None else float("nan")

    def save(self, directory: Path, tag: str, progress: dict[str, Any]) -> None:
        """Write a resumable state `directory/tag`; every worker must call it. `progress` comes back from `load`."""
        self._engine.save_checkpoint(str(directory), tag=tag, client_state=progress, save_latest=False)

    def load(self, directory: Path, tag: str) -> dict[str, Any]:
        """Restore parameters, optimizer and the given progress; every worker must call it."""
        path, progress = self._engine.load_checkpoint(str(directory), tag=tag)
        if path is None:
            raise RuntimeError(f"DeepSpeed could not load {directory / tag}")
        return dict(progress)

    def close(self) -> None:
        """Release DeepSpeed before the process group goes: ZeRO-3 aborts at exit otherwise."""
        self._engine.destroy()
        if dist.is_initialized():
            dist.destroy_process_group()


def export(state: Path, encoder: InstructionEncoder, path: Path) -> None:
    """Write the fp32 master weights of a saved state as a checkpoint of ours, whatever the ZeRO stage.

    Args:
        state: directory that `Engine.save` wrote.
        encoder: any encoder of the same architecture; its weights are replaced.
        path: the checkpoint directory.
    """
    if any(state.glob("*zero_pp_rank_*_optim_states.pt")):
        weights = get_fp32_state_dict_from_zero_checkpoint(str(state.parent), tag=state.name)
    else:  # stage 0 shards nothing: the weights lie whole beside the optimizer
        saved = torch.load(state / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=False)
        weights = saved["module"]
    encoder.float().load_state_dict(weights)
    encoder.save_pretrained(path)


def _single_process_environment() -> None:
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
