"""The functions of the public API. Every stage takes the settings of its command as keywords.

import infembed_ray

trained = infembed_ray.train(records="records.parquet", model="intfloat/e5-base-v2", output="runs/train")
encoder = infembed_ray.InstructionEncoder.from_pretrained(str(trained.path))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from infembed_ray import records as tables
from infembed_ray.records import Record
from infembed_ray.storage import Published, resolve_input

if TYPE_CHECKING:
    from torch import Tensor

    from infembed_ray.modeling.encoder import InstructionEncoder
    from infembed_ray.modeling.layout import Tokens


def load_records(path: str, split: str | None = None) -> list[Record]:
    """Load InF-IR records from a file, a directory, a published synthesis output or an object-store URI.

    Raises:
        InputError: there is no such file, or a row is invalid.
    """
    return tables.read(resolve_input(path, "records"), Record, "records", split=split)


def objective_loss(
    encoder: InstructionEncoder,
    records: Sequence[Record],
    objective: str = "multi{P,I}",
    temperature: float = 0.05,
    instruction_negatives: int | None = None,
) -> Tensor:
    """Compute a training objective on records, as one batch (paper, Eq. 6-21).

    Args:
        encoder: on any device; its gradients are computed by `backward` of the result.
        records: three tuples each; every tuple is a row of the batch.
        objective: `uni{...}` or `multi{...}` over P, I and IQ, or `nce{PIQ}`.
        temperature: similarities are divided by it.
        instruction_negatives: I-negatives per row; None takes all other instructions of the batch.

    Returns:
        Scalar loss. For a loss from embeddings, see `marginal_loss`.

    Raises:
        InputError: there is no such objective.
    """
    import torch

    from infembed_ray.training.collate import collate
    from infembed_ray.training.losses import Objective, marginal_loss
    from infembed_ray.training.scores import score_batch

    def encode(texts: Sequence[Tokens]) -> Tensor:
        passes = list(encoder.layouts(texts, batch_tokens=sum(map(len, texts)) ** 2))
        order = torch.tensor([row for rows, _ in passes for row in rows], device=encoder.device)
        return torch.cat([encoder(layout) for _, layout in passes])[order.argsort()]

    parsed = Objective.parse(objective)
    batch = collate(encoder, [records], 0, parsed, instruction_negatives=instruction_negatives)
    scores = score_batch(parsed, batch, encode(batch.queries), encode(batch.passages))
    return marginal_loss(parsed, scores.positive, scores.negatives, temperature)


def synthesize(**settings: Any) -> Published:
    """Make InF-IR records from seeds, as `infembed synthesize`; keywords are the fields of `SynthesizeSettings`."""
    return _run("synthesize", settings)


def train(**settings: Any) -> Published:
    """Train an encoder on records, as `infembed train`; keywords are the fields of `TrainSettings`."""
    return _run("train", settings)


def evaluate(**settings: Any) -> Published:
    """Evaluate models on tasks, as `infembed evaluate`; keywords are the fields of `EvaluateSettings`."""
    return _run("evaluate", settings)


def build_index(**settings: Any) -> Published:
    """Build a FAISS index of a corpus, as `infembed index`; keywords are the fields of `IndexSettings`."""
    return _run("index", settings)


def _run(verb: str, settings: dict[str, Any]) -> Published:
    from infembed_ray.cli import VERBS

    published: Published = VERBS[verb].run(VERBS[verb].settings.from_mapping(settings))
    return published
