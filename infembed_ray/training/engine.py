"""One facade over DeepSpeed; nothing else touches it.

The same engine runs under Ray Train, under torchrun and in a single process: it only needs torch.distributed's
environment variables, and sets those of a single process where there are none.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor, nn

from infembed_ray.config import TEMPERATURES, TrainSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Layout, Tokens
from infembed_ray.training.collectives import most_of_workers
from infembed_ray.training.grad_cache import GradCache, KeptGraphs, Passes

_ONE_PASS = 1 << 40
"""Tokens: all texts of a side in one pass, where there is no GradCache."""
_ENCODER = "encoder."
"""Where the encoder's parameters are among the trained ones."""


def deepspeed_config(settings: TrainSettings) -> dict[str, Any]:
    """The DeepSpeed JSON of a run. The learning rate is set anew each step by `Engine.update`."""
    return {
        "train_micro_batch_size_per_gpu": settings.records_per_worker,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": {"stage": settings.zero_stage},
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


def learning_rate(settings: TrainSettings, step: int, steps: int) -> float:
    """The rate of step `step` (0-based) of `steps`: linear warm-up, then linear decay to 0 (appendix: AdamW 5e-5)."""
    warmup = int(settings.warmup_fraction * steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    return settings.learning_rate * (steps - step) / max(1, steps - warmup)


class LearnedTemperature(nn.Module):
    """A temperature that is trained in the logarithm and stays within `config.TEMPERATURES`.

    A logistic function bounds it rather than a clamp, whose gradient is 0 beyond the bounds: it would never come back.

    Args:
        initial: strictly within the bounds.
    """

    def __init__(self, initial: float) -> None:
        super().__init__()
        low, high = map(math.log, TEMPERATURES)
        share = (math.log(initial) - low) / (high - low)
        self.logit = nn.Parameter(torch.tensor([math.log(share / (1 - share))]))

    def forward(self) -> Tensor:
        """(1,) the temperature."""
        low, high = map(math.log, TEMPERATURES)
        return torch.exp(low + (high - low) * torch.sigmoid(self.logit.float()))


class Trained(nn.Module):
    """All that is trained, in one module: ZeRO-3 gathers parameters only for what its engine's forward reaches."""

    def __init__(self, encoder: InstructionEncoder, temperature: LearnedTemperature | None) -> None:
        super().__init__()
        self.encoder = encoder
        self.temperature = temperature

    def forward(self, layout: Layout) -> tuple[Tensor, Tensor | None]:
        """(texts, d) unit vectors and, if it is learned, the (1,) temperature."""
        return self.encoder(layout), None if self.temperature is None else self.temperature()


class Engine:
    """An encoder under DeepSpeed.

    A step is any number of `encode`, one `backward` and one `update`.

    Args:
        encoder: moved to this worker's device and precision.
        settings: of the run.
    """

    def __init__(self, encoder: InstructionEncoder, settings: TrainSettings) -> None:
        _single_process_environment()
        deepspeed.init_distributed(dist_backend=None if settings.gpus_per_worker else "gloo", verbose=False)
        learned = LearnedTemperature(settings.temperature).to(encoder.device) if settings.temperature_learned else None
        groups: list[dict[str, Any]] = [{"params": [p for p in encoder.parameters() if p.requires_grad]}]
        self._rates = [1.0]  # of each group, in learning rates
        if learned is not None:
            groups.append({"params": list(learned.parameters()), "weight_decay": 0.0})
            self._rates.append(settings.temperature_learning_rate / settings.learning_rate)
        self._engine, *_ = deepspeed.initialize(
            model=Trained(encoder, learned), model_parameters=groups, config=deepspeed_config(settings)
        )
        self.encoder = encoder
        self._fixed_temperature = settings.temperature
        self._pass_tokens = settings.grad_cache_tokens or _ONE_PASS
        passes = GradCache if settings.grad_cache_tokens else KeptGraphs
        self._passes: Passes = passes(self._engine, self._backward)

    @property
    def temperature(self) -> Tensor | float:
        """What similarities are divided by; if it is learned, with gradient once a step has encoded something."""
        return self._fixed_temperature if self._passes.temperature is None else self._passes.temperature

    def encode(self, sequences: Sequence[Tokens]) -> Tensor:
        """(n, d) unit vectors of tokenised texts of one side, with gradient.

        All workers make equally many passes, because every pass of ZeRO-3 and every backward pass of ZeRO-2 is a
        collective: who has fewer repeats its shortest text, for nobody.
        """
        passes = list(self.encoder.layouts(sequences, self._pass_tokens))
        missing = most_of_workers(len(passes), self.encoder.device) - len(passes)
        if missing:
            shortest = [min(sequences, key=len)]
            passes += [([len(sequences)], layout) for _, layout in self.encoder.layouts(shortest, _ONE_PASS)] * missing
        passes.reverse()  # often the longest last: GradCache keeps the graph of that one
        embeddings = self._passes.encode([layout for _, layout in passes])
        order = torch.tensor([row for rows, _ in passes for row in rows]).argsort()
        return embeddings[order[: len(sequences)].to(embeddings.device)]

    def train(self) -> None:
        """Dropout on."""
        self._engine.train()

    def backward(self, loss: Tensor) -> None:
        """Back-propagate a loss of what was encoded since the last call; every worker must call it."""
        if self._engine.zero_optimization_partition_weights():
            # Its first backward pass of a step overwrites, the others add: a parameter that the first one does not
            # reach (the other tower's) would add to the gradient of the step before.
            self._engine.optimizer.grad_partitions_flat_buffer.zero_()
        self._passes.backward(loss)

    def _backward(self, loss: Tensor, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss)

    def update(self, rate: float) -> float:
        """Clip and update at learning rate `rate`; returns the gradient norm before clipping."""
        for group, relative in zip(self._engine.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * relative
        norm = None
        if not self._engine.zero_optimization():  # stage 0 clips, but does not say by how much
            norm = nn.utils.get_total_norm([p.grad for p in self._engine.module.parameters() if p.grad is not None])
        self._engine.step()
        return float(self._engine.get_global_grad_norm() if norm is None else norm)

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
    weights = {k.removeprefix(_ENCODER): w for k, w in weights.items() if k.startswith(_ENCODER)}
    frozen = {name for name, parameter in encoder.named_parameters() if not parameter.requires_grad}
    found = encoder.float().load_state_dict({k: w for k, w in weights.items() if k not in frozen}, strict=False)
    lost = {*found.unexpected_keys, *found.missing_keys} - frozen
    assert not lost, lost
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
