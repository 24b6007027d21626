"""The encoder under DeepSpeed: embed, back-propagate, update, save and load.

It runs the same under Ray Train, under torchrun and in a single process, because it needs only the environment
variables of torch.distributed. It sets those of a single process where there are none.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from infembed_ray.config.training import TEMPERATURES, TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.attention.kernels import Kernels, measure
from infembed_ray.modeling.attention.packing import compile_layers
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Layout, on_device
from infembed_ray.modeling.precision import warn_of_slow_bf16
from infembed_ray.modeling.tokenizer import Tokens
from infembed_ray.training import deepspeed_compat, preparation
from infembed_ray.training.checkpoints.writer import CheckpointFiles, Written
from infembed_ray.training.collectives import max_over_workers, mean_over_workers, world
from infembed_ray.training.deepspeed_config import deepspeed_config
from infembed_ray.training.grad_cache import GradCache, KeptGraphs
from infembed_ray.training.observability.flops import Workload
from infembed_ray.training.preparation import Pass


def connect(settings: TrainSettings) -> None:
    """Connect the workers under DeepSpeed, unless they are connected already.

    Raises:
        InputError: this node lacks what the settings need.
    """
    _set_single_process_environment()
    deepspeed_compat.skip_shared_memory_op()
    if settings.offload.parameters == "nvme" and not deepspeed_compat.build_async_io():
        raise InputError("offload: nvme needs libaio and its headers (libaio-dev) on every node; or offload to cpu")
    deepspeed.init_distributed(dist_backend=None if settings.gpus_per_worker else "gloo", verbose=False)


def precision_of(settings: TrainSettings) -> torch.dtype:
    """Return the precision of the passes."""
    return torch.bfloat16 if settings.precision == "bf16" else torch.float32


class LearnedTemperature(nn.Module):
    """Learned temperature, optimized on a log scale within `TEMPERATURES`.

    A logistic function bounds it. A clamp would have gradient 0 beyond the bounds and could not return.

    Args:
        initial: Initial temperature, strictly within the bounds.
    """

    def __init__(self, initial: float) -> None:
        super().__init__()
        low, high = map(math.log, TEMPERATURES)
        share = (math.log(initial) - low) / (high - low)
        self.logit = nn.Parameter(torch.tensor([math.log(share / (1 - share))]))

    def forward(self) -> Tensor:
        """Return the temperature, shape (1,)."""
        low, high = map(math.log, TEMPERATURES)
        return torch.exp(low + (high - low) * torch.sigmoid(self.logit.float()))


class Trained(nn.Module):
    """All trained parameters in one module: ZeRO-3 gathers only what the forward pass of its module reaches."""

    def __init__(self, encoder: InstructionEncoder, temperature: LearnedTemperature | None) -> None:
        super().__init__()
        self.encoder = encoder
        self.temperature = temperature

    def forward(self, layout: Layout) -> tuple[Tensor, Tensor | None]:
        """Return (texts, d) unit vectors and the (1,) temperature, or None if it is not learned."""
        return self.encoder(layout), None if self.temperature is None else self.temperature()


class Engine:
    """An encoder under DeepSpeed. Every worker must call each method.

    A step is one or more micro-batches, each any number of `encode` and one `backward`, and then one `update`.

    Attributes:
        encoder: The model in training, moved to this worker's device and precision.
        work: Work of the forward passes since it was last taken.
    """

    def __init__(self, encoder: InstructionEncoder, settings: TrainSettings) -> None:
        connect(settings)
        if settings.precision == "bf16" and world()[0] == 0:
            warn_of_slow_bf16(encoder.device, "precision=bf16", "precision=fp32")
        if settings.activation_checkpointing:
            encoder.checkpoint_activations()
        if settings.compile:
            for backbone in encoder.backbones:
                compile_layers(backbone)
        self.encoder = encoder
        self.work = Workload(encoder)
        self._settings = settings
        self._deepspeed, self._relative_rates = _initialize(encoder, settings)
        passes = GradCache if settings.grad_cache_tokens else KeptGraphs
        self._passes = passes(self._deepspeed, self._backward)
        self._files = CheckpointFiles()
        deepspeed_compat.use_checkpoint_engine(self._deepspeed, self._files)
        self._first_batch = self._last_batch = True

    @property
    def temperature(self) -> Tensor | float:
        """Temperature of the similarities; a learned one has a gradient once the step has encoded something."""
        return self._settings.temperature if self._passes.temperature is None else self._passes.temperature

    def encode(self, sequences: Sequence[Tokens], laid_out: Sequence[Pass] | None = None) -> Tensor:
        """Embed tokenized texts of one side: (n, d) unit vectors with gradient.

        Args:
            sequences: The texts.
            laid_out: Their passes; None: divide them here.
        """
        tokens = self._settings.grad_cache_tokens
        passes = list(laid_out or preparation.passes(self.encoder, sequences, tokens))
        # Without GradCache each side is one pass on every worker.
        idle = self._idle_passes(passes, sequences) if tokens else []
        for _, layout in passes:
            self.work.add(layout)
        for _, layout in idle:
            self.work.add(layout, idle=True)
        passes += idle
        passes.reverse()  # the longest pass is often the last one then, and GradCache keeps the graph of the last
        layouts = [layout.to(self.encoder.device) for _, layout in passes]
        return _in_order(self._passes.encode(layouts), passes, len(sequences))

    @torch.no_grad()
    def embed(self, sequences: Sequence[Tokens], batch_tokens: int = 4096) -> Tensor:
        """Embed tokenized texts of one side without gradient and dropout, in passes of at most `batch_tokens` tokens."""
        self._deepspeed.eval()
        passes = preparation.passes(self.encoder, sequences, batch_tokens)
        passes += self._idle_passes(passes, sequences)
        embeddings = torch.cat([self._deepspeed(layout.to(self.encoder.device))[0] for _, layout in passes])
        self._deepspeed.train()
        return _in_order(embeddings, passes, len(sequences))

    def _idle_passes(self, passes: Sequence[Pass], sequences: Sequence[Tokens]) -> list[Pass]:
        """Return idle passes that make the number of passes equal on all workers.

        Every pass of ZeRO-3 and every backward pass of ZeRO-2 is a collective. A worker with fewer passes repeats its
        shortest text and ignores the result.
        """
        missing = max_over_workers(len(passes), self.encoder.device) - len(passes)
        if not missing:
            return []
        shortest = preparation.passes(self.encoder, [min(sequences, key=len)], None)
        return [([len(sequences)], layout) for _, layout in shortest] * missing

    def choose_kernels(self, sides: Callable[[], Sequence[Sequence[Tokens]]]) -> str | None:
        """Measure the attention kernels on CUDA, and use the fastest from now on.

        Args:
            sides: Returns texts of each side; called only if there is a choice.

        Returns:
            What was measured, for the log; None if there is no choice.
        """
        encoder = self.encoder
        flex = encoder.causal and encoder.attention_dropout == 0 and not self._settings.compile
        if encoder.device.type != "cuda" or not (flex or encoder.packs):
            return None
        packed = (True, False) if encoder.packs else (False,)
        candidates = [Kernels(*both) for both in product(packed, (True, False) if flex else (False,))]
        tokens = self._settings.grad_cache_tokens or preparation.ONE_PASS
        measured = measure(encoder, self._deepspeed, sides(), tokens, candidates)
        seconds = mean_over_workers(torch.tensor(measured, device=encoder.device)).tolist()
        encoder.kernels = candidates[seconds.index(min(seconds))]
        figures = ", ".join(f"{kernels} {1000 * s:.1f} ms" for kernels, s in zip(candidates, seconds, strict=True))
        return f"attention: {encoder.kernels} (measured forward: {figures})"

    def train(self) -> None:
        """Enable dropout."""
        self._deepspeed.train()

    def backward(self, loss: Tensor, last: bool = True, discard: bool = False) -> None:
        """Add the gradients of a loss of everything encoded since the last call.

        Args:
            loss: Loss of a micro-batch.
            last: Whether `update` follows, rather than another micro-batch of the step.
            discard: Make the step's gradients NaN. No ZeRO stage updates the weights or its optimizer from those, and
                all collectives of the step still take place.
        """
        if self._first_batch:
            deepspeed_compat.clear_gradients(
                self._deepspeed.optimizer, self._settings.zero_stage, self._settings.offload.optimizer is not None
            )
        self._first_batch = self._last_batch = last
        self._passes.backward(loss * math.nan if discard else loss)

    def _backward(self, loss: Tensor, last: bool) -> None:
        deepspeed_compat.backward(self._deepspeed, loss, last and self._last_batch)

    def update(self, rate: float) -> float:
        """Clip the gradients, update the weights at learning rate `rate` and return the gradient norm before clipping.

        If the norm is not finite, which is then so on every worker, no weight changes and the gradients are dropped.
        """
        for group, relative in zip(self._deepspeed.optimizer.param_groups, self._relative_rates, strict=True):
            group["lr"] = rate * relative
        if self.sharded:
            self._deepspeed.step()
            return float(self._deepspeed.get_global_grad_norm())
        # Stage 0 clips without giving the norm, and would update from gradients that are not finite.
        parameters = self._deepspeed.module.parameters()
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if torch.isfinite(norm):
            self._deepspeed.step()
        else:
            self._deepspeed.module.zero_grad()
        return float(norm)

    def save(self, directory: Path, tag: str) -> Future[Written]:
        """Take a snapshot and start to write it as the checkpoint `directory/tag`, without frozen parameters.

        Only one checkpoint may be written at a time.

        Returns:
            The files that this worker wrote, once they are, or the reason why it could not; a disk error is not raised.
        """
        self._deepspeed.save_checkpoint(str(directory), tag=tag, save_latest=False, exclude_frozen_parameters=True)
        return self._files.write()

    def load(self, directory: Path, tag: str, resharded: bool = False) -> None:
        """Restore parameters and optimizer from the checkpoint `directory/tag`.

        Args:
            directory, tag: Location of the checkpoint.
            resharded: Whether `reshard` wrote it.
        """
        deepspeed_compat.set_load_universal(self._deepspeed, resharded)
        stage = self._settings.zero_stage
        with deepspeed_compat.loading_universal(self._deepspeed, stage) if resharded else contextlib.nullcontext():
            # Not strict, because the checkpoint has no frozen parameters.
            path, _ = self._deepspeed.load_checkpoint(str(directory), tag=tag, load_module_strict=False)
        if path is None:
            raise RuntimeError(f"DeepSpeed could not load {directory / tag}")

    @property
    def sharded(self) -> bool:
        """Whether checkpoints are divided among the workers, so that another number of workers needs `reshard`."""
        return self._settings.zero_stage > 0

    @staticmethod
    def reshard(checkpoint: Path, output: Path) -> None:
        """Convert a sharded checkpoint, in the new directory `output`, to a form that any number of workers can load."""
        deepspeed_compat.to_universal(checkpoint, output)

    def close(self) -> None:
        """Release DeepSpeed and the process group."""
        deepspeed_compat.close(self._deepspeed)


def _initialize(encoder: InstructionEncoder, settings: TrainSettings) -> tuple[Any, list[float]]:
    """Return DeepSpeed's engine, and the learning rate of each parameter group relative to that of the encoder."""
    learned = LearnedTemperature(settings.temperature) if settings.temperature_learned else None
    groups: list[dict[str, Any]] = [{"params": [p for p in encoder.parameters() if p.requires_grad]}]
    rates = [1.0]
    if learned is not None:
        learned.to(encoder.device, precision_of(settings))  # DeepSpeed casts no module of which a part is partitioned
        groups.append({"params": list(learned.parameters()), "weight_decay": 0.0})
        rates.append(settings.temperature_learning_rate / settings.learning_rate)
    engine, *_ = deepspeed.initialize(
        model=Trained(encoder, learned), model_parameters=groups, config=deepspeed_config(settings)
    )
    return engine, rates


def _in_order(embeddings: Tensor, passes: Sequence[Pass], count: int) -> Tensor:
    """Return the embeddings of the first `count` texts in their order, rather than in that of the passes."""
    order = torch.tensor([row for rows, _ in passes for row in rows]).argsort()
    return embeddings[on_device(order[:count], embeddings.device)]


def _set_single_process_environment() -> None:
    if "RANK" in os.environ:
        return
    # Port 0 picks a free port in each process, also in a later run and in a subprocess that inherits these variables.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
