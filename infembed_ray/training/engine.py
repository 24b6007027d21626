"""The encoder under DeepSpeed: embed, back-propagate, update, save and load.

It runs the same under Ray Train and in a single process, because it needs only the environment
variables of torch.distributed. It sets those of a single process where there are none.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import deepspeed
import torch
from torch import Tensor, nn

from infembed_ray.config.training import TrainSettings
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.modeling.layout import on_device
from infembed_ray.modeling.tokenizer import Tokens
from infembed_ray.training import deepspeed_compat, preparation
from infembed_ray.training.checkpoints.writer import CheckpointFiles, Written
from infembed_ray.training.collectives import max_over_workers
from infembed_ray.training.deepspeed_config import deepspeed_config
from infembed_ray.training.grad_cache import GradCache, KeptGraphs
from infembed_ray.training.observability.flops import Workload
from infembed_ray.training.preparation import Pass


def connect(settings: TrainSettings) -> None:
    """Connect the workers under DeepSpeed, unless they are connected already."""
    _set_single_process_environment()
    deepspeed_compat.skip_builds()
    deepspeed.init_distributed(dist_backend=None if settings.gpus_per_worker else "gloo", verbose=False)
    if settings.gpus_per_worker:  # NCCL guesses the device of a barrier from the rank if no tensor came before it
        torch.distributed.all_reduce(torch.zeros(1, device=f"cuda:{os.environ['LOCAL_RANK']}"))


class Engine:
    """An encoder under DeepSpeed. Every worker must call each method.

    A step is any number of `encode`, then one `backward`, then one `update`.

    Attributes:
        encoder: The model in training, moved to this worker's device and precision.
        work: Work of the forward passes since it was last taken.
    """

    def __init__(self, encoder: InstructionEncoder, settings: TrainSettings) -> None:
        connect(settings)
        if settings.activation_checkpointing:
            encoder.checkpoint_activations()
        if settings.zero_stage < 3:  # whose hooks gather the parameters inside of a layer
            encoder.compile_layers()
        self.encoder = encoder
        self.work = Workload(encoder)
        self._settings = settings
        trained = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
        config = deepspeed_config(settings)
        self._deepspeed, *_ = deepspeed.initialize(model=encoder, model_parameters=trained, config=config)
        deepspeed_compat.lighten(self._deepspeed)
        mixed = encoder.named_parameters() if settings.interpolation < 1 and settings.validation is not None else ()
        self._own = {n: p.detach().clone() for n, p in mixed if not n.startswith("interaction.")}
        passes = GradCache if settings.grad_cache_tokens else KeptGraphs
        self._passes = passes(self._deepspeed, partial(deepspeed_compat.backward, self._deepspeed))
        self._files = CheckpointFiles()
        deepspeed_compat.use_checkpoint_engine(self._deepspeed, self._files)

    def encode(self, sequences: Sequence[Tokens], laid_out: Sequence[Pass] | None = None) -> Tensor:
        """Embed tokenized texts that share a backbone, in these passes if given: (n, d) unit vectors with gradient."""
        tokens = self._settings.grad_cache_tokens
        passes = list(laid_out or preparation.passes(self.encoder, sequences, tokens))
        for _, layout in passes:
            self.work.add(layout)
        if tokens:  # else there are equally many passes on every worker
            idle = self._idle_passes(passes, sequences)
            for _, layout in idle:
                self.work.add(layout, idle=True)
            # The longest pass is often the last one then, and GradCache keeps the graph of the last.
            passes = [*idle, *reversed(passes)]
        layouts = [layout.to(self.encoder.device) for _, layout in passes]
        return _in_order(self._passes.encode(layouts), passes, len(sequences))

    @torch.no_grad()
    def embed(self, sequences: Sequence[Tokens], batch_tokens: int = 4096) -> Tensor:
        """Embed tokenized texts of one side without gradient and dropout, in passes of at most `batch_tokens` tokens."""
        self._deepspeed.eval()
        passes = preparation.passes(self.encoder, sequences, batch_tokens)
        passes += self._idle_passes(passes, sequences)
        with torch.compiler.set_stance("force_eager"):  # layers are compiled for the rows of a training
            embeddings = torch.cat([self._deepspeed(layout.to(self.encoder.device)) for _, layout in passes])
        self._deepspeed.train()
        return _in_order(embeddings, passes, len(sequences))

    @contextmanager
    def published_weights(self) -> Iterator[None]:
        """Have the weights that the setting `interpolation` would publish, for the block."""
        mixed = [(p.data, own) for n, p in self.encoder.named_parameters() if (own := self._own.get(n)) is not None]
        trained = [weights.clone() for weights, _ in mixed]
        for weights, own in mixed:
            weights.lerp_(own, 1 - self._settings.interpolation)
        try:
            yield
        finally:
            for (weights, _), kept in zip(mixed, trained, strict=True):
                weights.copy_(kept)

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

    def train(self) -> None:
        """Enable dropout."""
        self._deepspeed.train()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss of everything encoded since the last call; `update` follows."""
        offloaded = self._settings.offload is not None
        deepspeed_compat.clear_gradients(self._deepspeed.optimizer, self._settings.zero_stage, offloaded)
        self._passes.backward(loss)

    def update(self, rate: float) -> float:
        """Clip the gradients, update the weights at learning rate `rate` and return the gradient norm before clipping.

        If the norm is not finite, which is then so on every worker, no weight changes and the gradients are dropped.
        """
        for group in self._deepspeed.optimizer.param_groups:
            group["lr"] = rate
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

        Only one checkpoint may be written at a time. A disk error is part of the result and is not raised.
        """
        self._deepspeed.save_checkpoint(str(directory), tag=tag, save_latest=False, exclude_frozen_parameters=True)
        return self._files.write()

    def load(self, directory: Path, tag: str, resharded: bool = False) -> None:
        """Restore parameters and optimizer from the checkpoint `directory/tag`, which `reshard` may have written."""
        deepspeed_compat.load(self._deepspeed, directory, tag, universal=resharded)

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


def _in_order(embeddings: Tensor, passes: Sequence[Pass], count: int) -> Tensor:
    """Return the embeddings of the first `count` texts in their order, rather than in that of the passes."""
    order = torch.tensor([row for rows, _ in passes for row in rows]).argsort()
    return embeddings[on_device(order[:count], embeddings.device)]


def _set_single_process_environment() -> None:
    if "RANK" in os.environ:
        return
    # Port 0 picks a free port in each process, also in a later run and in a subprocess that inherits these variables.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
