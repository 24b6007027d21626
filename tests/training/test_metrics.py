"""What is measured in a batch against loops, and the log against what was written."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.training.metrics import MetricsLog, measure, read_metrics
from infembed_ray.training.objectives import Negatives
from infembed_ray.training.scores import Scores


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(0, 6))
def test_loss_rank_and_accuracy_of_a_variable_follow_their_definitions(seed, rows, width):
    generator = torch.Generator().manual_seed(seed)
    positive = torch.randint(-3, 4, (rows,), generator=generator) / 4  # few values: there are ties
    similarities = torch.randint(-3, 4, (rows, width), generator=generator) / 4
    mask = torch.rand(rows, width, generator=generator) < 0.6
    measured = measure(Scores(positive, {"P": Negatives(similarities, mask)}), 0.1)
    losses, ranks = [], []
    for own, row, kept in zip(positive.tolist(), similarities.tolist(), mask.tolist(), strict=True):
        others = [s for s, keep in zip(row, kept, strict=True) if keep]
        losses.append(math.log(1 + sum(math.exp((s - own) / 0.1) for s in others)))
        ranks.append(1 + sum(s >= own for s in others))
    assert measured["loss_P"].item() == pytest.approx(sum(losses) / rows, rel=1e-4, abs=1e-5)
    assert measured["rank_P"].item() == pytest.approx(sum(ranks) / rows)
    assert measured["accuracy_P"].item() == pytest.approx(sum(r == 1 for r in ranks) / rows)
    assert measured["positive_similarity"].item() == pytest.approx(positive.mean().item(), abs=1e-6)


def test_a_resumed_log_goes_on_after_the_step_it_resumes_from(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for step in (1, 2, 3):
        log.write(step=step, loss=1 / 3)
    MetricsLog(tmp_path, 2).write(step=3, loss=0.5)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["loss"] for line in lines] == [0.3333333, 0.3333333, 0.5]


def test_a_line_that_is_not_whole_yet_is_not_read(tmp_path):
    assert read_metrics(tmp_path) == []
    MetricsLog(tmp_path, 0).write(step=1)
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1}]
