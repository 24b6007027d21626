"""One facade over DeepSpeed; nothing else touches it.

The same engine runs under Ray Train, under torchrun and in a single process: it only needs torch.distributed's
environment variables, and sets those of a single process where there are none.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor, nn

from infembed_ray.config import TEMPERATURES, TrainSettings
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import Layout, Tokens
from infembed_ray.modeling.packing import compile_layers
from infembed_ray.modeling.precision import warn_of_slow_bf16
from infembed_ray.training.collectives import most_of_workers, world
from infembed_ray.training.compiled_ops import build_one_at_a_time
from infembed_ray.training.deepspeed_config import deepspeed_config
from infembed_ray.training.flops import Workload
from infembed_ray.training.grad_cache import GradCache, KeptGraphs, Passes
from infembed_ray.training.state_files import StateFiles, Written

_ONE_PASS = 1 << 40
"""Tokens: all texts of a side in one pass, where there is no GradCache."""
_ENCODER = "encoder."
"""Where the encoder's parameters are among the trained ones."""


_Pass = tuple[list[int], Layout]
"""Rows of some texts, and the layout of these; see `InstructionEncoder.layouts`."""


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

    A step is a number of batches, each any number of `encode` and one `backward`, and one `update`.

    Args:
        encoder: moved to this worker's device and precision.
        settings: of the run.
    """

    def __init__(self, encoder: InstructionEncoder, settings: TrainSettings) -> None:
        _single_process_environment()
        build_one_at_a_time()
        deepspeed.init_distributed(dist_backend=None if settings.gpus_per_worker else "gloo", verbose=False)
        if settings.precision == "bf16" and world()[0] == 0:
            warn_of_slow_bf16(encoder.device, "precision=bf16", "precision=fp32")
        learned = LearnedTemperature(settings.temperature).to(encoder.device) if settings.temperature_learned else None
        groups: list[dict[str, Any]] = [{"params": [p for p in encoder.parameters() if p.requires_grad]}]
        self._rates = [1.0]  # of each group, in learning rates
        if learned is not None:
            groups.append({"params": list(learned.parameters()), "weight_decay": 0.0})
            self._rates.append(settings.temperature_learning_rate / settings.learning_rate)
        if settings.activation_checkpointing:
            encoder.checkpoint_activations()
        if settings.compile:
            for backbone in encoder.backbones:
                compile_layers(backbone)
        if "nvme" in (settings.offload.optimizer, settings.offload.parameters) and not AsyncIOBuilder().is_compatible():
            raise InputError("offload: nvme needs libaio and its headers (libaio-dev) on every node; or offload to cpu")
        self._engine, *_ = deepspeed.initialize(
            model=Trained(encoder, learned), model_parameters=groups, config=deepspeed_config(settings)
        )
        self.encoder = encoder
        self.work = Workload(encoder)
        """Of the passes since it was last taken."""
        self._fixed_temperature = settings.temperature
        self._pass_tokens = settings.grad_cache_tokens or _ONE_PASS
        passes = GradCache if settings.grad_cache_tokens else KeptGraphs
        self._passes: Passes = passes(self._engine, self._backward)
        self._files = self._engine.checkpoint_engine = StateFiles()
        self._engine._copy_recovery_script = lambda _: None  # it would raise on a full disk; `export` is what we use
        self._begun = False  # has this step back-propagated a batch?
        self._last_batch = True

    @property
    def temperature(self) -> Tensor | float:
        """What similarities are divided by; if it is learned, with gradient once a step has encoded something."""
        return self._fixed_temperature if self._passes.temperature is None else self._passes.temperature

    def encode(self, sequences: Sequence[Tokens]) -> Tensor:
        """(n, d) unit vectors of tokenised texts of one side, with gradient; every worker must call it."""
        passes, idle = self._even_passes(sequences, self._pass_tokens)
        for _, layout in passes:
            self.work.add(layout)
        for _, layout in idle:
            self.work.add(layout, idle=True)
        passes += idle
        passes.reverse()  # often the longest last: GradCache keeps the graph of that one
        return _in_order(self._passes.encode([layout for _, layout in passes]), passes, len(sequences))

    @torch.no_grad()
    def embed(self, sequences: Sequence[Tokens], batch_tokens: int = 4096) -> Tensor:
        """The same without gradient and dropout, in passes of at most `batch_tokens` tokens."""
        self._engine.eval()
        passes, idle = self._even_passes(sequences, batch_tokens)
        passes += idle
        embeddings = torch.cat([self._engine(layout)[0] for _, layout in passes])
        self._engine.train()
        return _in_order(embeddings, passes, len(sequences))

    def _even_passes(self, sequences: Sequence[Tokens], tokens: int) -> tuple[list[_Pass], list[_Pass]]:
        """The passes of this worker's texts, and those that make them as many as other workers'.

        Every pass of ZeRO-3 and every backward pass of ZeRO-2 is a collective: who has fewer repeats its shortest text,
        for nobody.
        """
        passes = list(self.encoder.layouts(sequences, tokens))
        missing = most_of_workers(len(passes), self.encoder.device) - len(passes)
        if not missing:
            return passes, []
        shortest = [min(sequences, key=len)]
        return passes, [([len(sequences)], layout) for _, layout in self.encoder.layouts(shortest, _ONE_PASS)] * missing

    def train(self) -> None:
        """Dropout on."""
        self._engine.train()

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Add the gradients of a loss of what was encoded since the last call; every worker must call it.

        Args:
            loss: of a batch.
            last: does an `update` follow, or another batch of the step?
        """
        if not self._begun:
            self._clear_gradients()
        self._begun, self._last_batch = not last, last
        self._passes.backward(loss)

    def _clear_gradients(self) -> None:
        """Forget the step before.

        The first backward pass of a step overwrites what DeepSpeed keeps apart of gradients, the others add: a parameter
        that the first one does not reach (the other tower's) would add to its gradient of the step before.
        """
        if self._engine.zero_optimization_partition_weights():
            self._engine.optimizer.grad_partitions_flat_buffer.zero_()
        elif self._engine.zero_cpu_offload():
            for gradient in self._engine.optimizer.accumulated_grads_in_cpu.values():
                gradient.zero_()

    def _backward(self, loss: Tensor, last: bool) -> None:
        if self._engine.managed_gradient_accumulation():
            self._engine.set_gradient_accumulation_boundary(last and self._last_batch)
        self._engine.backward(loss)

    def update(self, rate: float) -> float:
        """Clip and update at learning rate `rate`; returns the gradient norm before clipping.

        If that is no finite number, the same on every worker, nothing is updated and the gradients are dropped.
        """
        for group, relative in zip(self._engine.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * relative
        norm = None
        if not self._engine.zero_optimization():  # stage 0 clips, but does not say by how much
            norm = nn.utils.get_total_norm([p.grad for p in self._engine.module.parameters() if p.grad is not None])
            if not torch.isfinite(norm):  # the other stages drop such gradients by themselves
                self._engine.module.zero_grad()
                return float(norm)
        self._engine.step()
        return float(self._engine.get_global_grad_norm() if norm is None else norm)

    def save(self, directory: Path, tag: str) -> Written:
        """Write the state `directory/tag`, without frozen parameters; every worker must call it.

        Returns:
            the files that this worker wrote, or why it could not; nothing is raised for a disk's sake.
        """
        self._files.begin()
        self._engine.save_checkpoint(str(directory), tag=tag, save_latest=False, exclude_frozen_parameters=True)
        return self._files.written

    def load(self, directory: Path, tag: str, resharded: bool = False) -> None:
        """Restore parameters and optimizer from a state; every worker must call it.

        Args:
            directory, tag: of the state.
            resharded: is it what `reshard` made of one?
        """
        self._engine._config.load_universal_checkpoint = resharded
        with self._loading_resharded() if resharded else contextlib.nullcontext():
            # Not strict, because the frozen parameters are not in it.
            path, _ = self._engine.load_checkpoint(str(directory), tag=tag, load_module_strict=False)
        if path is None:
            raise RuntimeError(f"DeepSpeed could not load {directory / tag}")

    @contextlib.contextmanager
    def _loading_resharded(self) -> Iterator[None]:
        """Around the loading of a resharded state: what DeepSpeed 0.19 does not do right there.

        Of ZeRO 1 and 2, it fails at a parameter group of which this worker has no part, as of the temperature, which is a
        single number. ZeRO 3 gives every group the options of the first one, and all of them one count of steps, which
        each then advances.
        """
        optimizer = self._engine.optimizer
        groups = optimizer.param_groups
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        if not self._engine.zero_optimization_partition_weights():
            parts = optimizer.bf16_groups if hasattr(optimizer, "bf16_groups") else optimizer.bit16_groups
            optimizer.optimizer.param_groups = [
                group for group, part in zip(groups, parts, strict=True) if any(p._hp_mapping for p in part)
            ]
        yield
        optimizer.optimizer.param_groups = groups
        for group, own in zip(groups, options, strict=True):
            group |= own
        for state in optimizer.optimizer.state.values():
            if "step" in state:
                state["step"] = copy.deepcopy(state["step"])

    @property
    def sharded(self) -> bool:
        """Are its states divided among the workers, so that another number of them needs `reshard`?"""
        return bool(self._engine.zero_optimization())

    @staticmethod
    def reshard(state: Path, into: Path) -> None:
        """Write a sharded state in the form that any number of workers can load: DeepSpeed's universal checkpoint.

        Args:
            state: directory that `Engine.save` wrote.
            into: a new directory.
        """
        options = argparse.Namespace(
            input_folder=str(state),
            output_folder=str(into),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            ds_to_universal.main(options)

    def close(self) -> None:
        """Release DeepSpeed before the process group goes: ZeRO-3 aborts at exit otherwise."""
        self._engine.destroy()
        deepspeed.comm.destroy_process_group()  # torch's would leave DeepSpeed with groups that are gone


def _in_order(embeddings: Tensor, passes: Sequence[_Pass], count: int) -> Tensor:
    """The embeddings of the first `count` rows, which the passes had in an order of their own."""
    order = torch.tensor([row for rows, _ in passes for row in rows]).argsort()
    return embeddings[order[:count].to(embeddings.device)]


def export(state: Path, encoder: InstructionEncoder, path: Path) -> None:
    """Write the fp32 master weights of a saved state as a checkpoint of ours, whatever the ZeRO stage.

    Args:
        state: directory that `Engine.save` wrote.
        encoder: any encoder of the same architecture; its weights are replaced.
        path: the checkpoint directory.
    """
    if any(state.glob("*zero_pp_rank_*_optim_states.pt")):
        weights = get_fp32_state_dict_from_zero_checkpoint(
            str(state.parent), tag=state.name, exclude_frozen_parameters=True
        )
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
    # Port 0 is any that is free, and again a free one for a later run of this process, or of one that it starts.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
