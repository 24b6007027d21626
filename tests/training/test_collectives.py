"""Collectives: two gloo processes with uneven shares against one process with the whole batch."""

import pytest
import torch
import torch.distributed as dist

from infembed_ray.training.collectives import gather_rows, max_over_workers, mean_over_workers, world
from infembed_ray.training.losses import Negatives, Objective, marginal_loss
from tests.support.workers import run_workers

SIZES, FEATURES, DIMENSION = [4, 2], 5, 4
ROWS = sum(SIZES)


def features():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, ROWS, FEATURES, generator=generator, dtype=torch.float64)


def loss_and_gradient(rows, sizes, share):
    """Compute the loss of a two-tower linear model on some rows, with negatives from all workers."""
    torch.manual_seed(1)
    model = torch.nn.Linear(FEATURES, DIMENSION, dtype=torch.float64)
    query_features, passage_features = features()[:, rows]
    queries, passages = (torch.nn.functional.normalize(model(x), dim=1) for x in (query_features, passage_features))
    everyone = gather_rows(passages, sizes)
    candidates = gather_rows(torch.tensor(rows), sizes)
    assert candidates.tolist() == list(range(ROWS))
    mask = torch.tensor(rows).unsqueeze(1) != candidates.unsqueeze(0)
    positive = (queries * passages).sum(1)
    loss = marginal_loss(Objective.parse("uni{P}"), positive, {"P": Negatives(queries @ everyone.T, mask)}, 0.1)
    (loss * share).backward()
    return loss, model.weight.grad


def worker(rank):
    dist.init_process_group("gloo")
    share = SIZES[rank] * len(SIZES) / ROWS
    first = sum(SIZES[:rank])
    loss, gradient = loss_and_gradient(list(range(first, first + SIZES[rank])), SIZES, share)
    most = max_over_workers(SIZES[rank], torch.device("cpu"))
    found = (world(), mean_over_workers(loss * share).item(), mean_over_workers(gradient), most)
    dist.destroy_process_group()
    return found


@pytest.mark.integration
def test_two_workers_compute_loss_and_gradient_of_the_whole_batch():
    results = run_workers(worker, len(SIZES))
    (first, loss, gradient, most), (second, same_loss, same_gradient, same_most) = results
    assert (first, second) == ((0, 2), (1, 2))
    assert most == same_most == max(SIZES)
    whole_loss, whole_gradient = loss_and_gradient(list(range(ROWS)), [ROWS], 1.0)
    assert abs(loss - whole_loss.item()) < 1e-12
    assert loss == same_loss
    torch.testing.assert_close(gradient, whole_gradient, rtol=0, atol=1e-12)
    torch.testing.assert_close(same_gradient, whole_gradient, rtol=0, atol=1e-12)
