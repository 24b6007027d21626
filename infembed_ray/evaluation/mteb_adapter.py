"""The package's encoders as models of mteb 2 (https://github.com/embeddings-benchmark/mteb).

    model = mteb_adapter.load("runs/train")
    mteb.evaluate(model, mteb.get_tasks(tasks=["Core17InstructionRetrieval"]))

mteb itself formats every query of a checkpoint as `{query} {instruction}`, whatever the checkpoint's template.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from infembed_ray.errors import InputError
from infembed_ray.evaluation.retrievers import baselines
from infembed_ray.evaluation.retrievers.baselines import ENCODER_KINDS, TextEncoder
from infembed_ray.evaluation.tasks.task import Query

if TYPE_CHECKING:
    from mteb.models import ModelMeta


class MtebEncoder:
    """An encoder as mteb's `EncoderProtocol`. mteb passes query and instruction separately, and the encoder formats them."""

    def __init__(self, encoder: TextEncoder, meta: ModelMeta) -> None:
        self.encoder = encoder
        self.mteb_model_meta = meta

    def encode(self, inputs: Any, *, task_metadata: Any, prompt_type: Any = None, **options: Any) -> np.ndarray:
        """Embed batches of passages (`text`) or queries (`query`, perhaps `instruction`): (n, d) float32.

        `prompt_type` is `document` or `query`; None, for tasks with texts of one kind, means `query`.
        """
        if prompt_type == "document":
            return self.encoder.encode_passages([text for batch in inputs for text in batch["text"]])
        queries: list[Query] = []
        for batch in inputs:
            texts = batch.get("query", batch["text"])
            instructions = batch.get("instruction", [None] * len(texts))
            queries += (Query("", text, told or None) for text, told in zip(texts, instructions, strict=True))
        return self.encoder.encode_queries(queries)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Multiply (n, d) with (m, d): (n, m) inner products."""
        return _matrix(embeddings1) @ _matrix(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Multiply the rows of two (n, d) arrays: (n) inner products."""
        return (_matrix(embeddings1) * _matrix(embeddings2)).sum(-1)


def _matrix(embeddings: Any) -> torch.Tensor:
    return torch.atleast_2d(torch.as_tensor(embeddings))


def load(model: str, device: str = "cpu") -> MtebEncoder:
    """Load an encoder for `mteb.evaluate`.

    Results are stored under the directory's name (`infembed/train`; hub models under their own), with a hash of everything
    that decides the embeddings as the revision.

    Args:
        model: checkpoint directory (`latest` is followed), hub name, or name of a baseline.
        device: torch device.

    Raises:
        InputError: there is no such model, it is no encoder, or mteb is not installed.
    """
    if importlib.util.find_spec("mteb") is None:
        raise InputError("mteb is not installed; pip install 'mteb>=2.26,<3'")
    from mteb.models import ModelMeta

    settings = baselines.resolve("mteb", model)
    if settings.kind not in ENCODER_KINDS:
        raise InputError.of("model", model, "is no encoder", "use infembed evaluate")
    loaded = baselines.load(settings, device)
    assert isinstance(loaded, TextEncoder)
    hub = model.count("/") == 1 and not model.startswith((".", "~", "/")) and not Path(model).exists()
    unknown = {name: None for name, field in ModelMeta.model_fields.items() if field.is_required()}
    about = {
        "name": model if hub else f"infembed/{Path(model).absolute().name}",
        "revision": baselines.identity(settings),
        "framework": [],
        "similarity_fn_name": "dot",
        "model_type": ["dense"],
        "use_instructions": True,
    }
    return MtebEncoder(loaded, ModelMeta(**unknown | about))
