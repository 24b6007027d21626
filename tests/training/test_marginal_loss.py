"""The loss module against the paper's equations in float64 NumPy, its gradients against finite differences."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from infembed_ray import InputError, InstructionEncoder, MarginalLoss
from infembed_ray.records.tables import Record
from infembed_ray.training.collate import flatten
from infembed_ray.training.losses import ALL_OBJECTIVES, Objective
from tests.modeling import backbones

NAMES = [str(objective) for objective in ALL_OBJECTIVES]


def reference(name, own, passages, instructed, temperature, once):
    """Eq. 8-21 in loops: `own[i]` is iq_ii, `passages[m]` is p_m, `instructed[i]` lists iq_ji of the negatives j."""
    kind, variables = Objective.parse(name).kind, Objective.parse(name).variables

    def e(p, iq):
        return np.exp(p @ iq / (np.linalg.norm(p) * np.linalg.norm(iq)) / temperature)

    losses = []
    for i, p_i in enumerate(passages):
        positive = e(p_i, own[i])
        sums = {
            "P": sum(e(p_m, own[i]) for p_m in passages),
            "I": positive + sum(e(p_i, iq_ji) for iq_ji in instructed[i]),
            "IQ": sum(e(p_i, iq_kk) for iq_kk in own),
        }
        if kind == "uni":
            losses.append(-sum(np.log(positive / sums[v]) for v in variables))
        else:
            denominator = sum(sums[v] for v in variables) - once * (len(variables) - 1) * positive
            losses.append(-np.log(positive / denominator))
    return np.mean(losses)


def embeddings(rows: int = 4, others: int = 3) -> list[torch.Tensor]:
    """Vectors of any length: queries, passages, instructed."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(rows, 5), (rows, 5), (rows, others, 5)]
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_loss_of_embeddings_is_that_of_the_equations_with_exact_gradients(name, once):
    given = embeddings()
    loss = MarginalLoss(objective=name, temperature=0.3, count_positive_once=once).compute_loss_from_embeddings
    expected = reference(name, *(x.detach().numpy() for x in given), 0.3, once)
    np.testing.assert_allclose(loss(*given).item(), expected, rtol=1e-12)
    assert torch.autograd.gradcheck(loss, given)


def record(number: int) -> Record:
    words = ["aspirin", "bread", "nurses"]
    texts = {f.name: f"{words[number]} {f.name} {n}" for n, f in enumerate(fields(Record))}
    return Record(**texts | {"id": str(number), "topic": None, "split": None, "language": None})


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> InstructionEncoder:
    """In float64 throughout; the RMS norms of decoders compute in float32."""
    path = backbones.write("modernbert", Path(tmp_path_factory.mktemp("modernbert")))
    return InstructionEncoder.from_pretrained(path, dtype=torch.float64)


@pytest.mark.parametrize("name", ["uni{P,I,IQ}", "multi{P,I,IQ}"])
def test_the_loss_of_records_is_that_of_their_embeddings_in_the_equations(name, encoder):
    records = [record(n) for n in range(3)]
    rows = [row for r in records for row in flatten(r)]
    pool = {row.instruction for row in rows}
    instructed = []
    for row in rows:
        others = sorted(pool - {row.instruction})
        instructed.append(encoder.encode_queries([row.query] * len(others), others).astype(np.float64))
    own = encoder.encode_queries([r.query for r in rows], [r.instruction for r in rows]).astype(np.float64)
    passages = encoder.encode_passages([r.passage for r in rows]).astype(np.float64)
    loss = MarginalLoss(encoder, name, temperature=0.1)(records).item()
    np.testing.assert_allclose(loss, reference(name, own, passages, instructed, 0.1, True), rtol=1e-5)


def test_what_a_loss_cannot_compute_is_an_input_error():
    queries, passages, instructed = embeddings()
    with pytest.raises(InputError, match=r"no such objective: did you mean multi\{P,I\}"):
        MarginalLoss(objective="multy{P,I}")
    with pytest.raises(InputError, match=r"^encoder=None: a loss of records needs an encoder"):
        MarginalLoss()([record(0)])
    with pytest.raises(InputError, match=r"^instructed: None; multi\{P,I\} contrasts instructions: give \(B, N, d\)"):
        MarginalLoss().compute_loss_from_embeddings(queries, passages)
    with pytest.raises(InputError, match=r"^instructed: \(4, 3, 4\); "):
        MarginalLoss().compute_loss_from_embeddings(queries, passages, instructed[..., :4])
    with pytest.raises(InputError, match=r"^passages: shape \(3, 5\), and queries have \(4, 5\)"):
        MarginalLoss().compute_loss_from_embeddings(queries, passages[:3], instructed)
    with pytest.raises(InputError, match=r"^objective=nce\{PIQ\}: needs all pairs"):
        MarginalLoss(objective="nce{PIQ}").compute_loss_from_embeddings(queries, passages, instructed)
