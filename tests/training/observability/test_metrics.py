"""Measures of a batch against loops, and the log against what was written."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.config.training import TrainSettings
from infembed_ray.training.losses import Negatives
from infembed_ray.training.observability.logs import read_metrics
from infembed_ray.training.observability.metrics import Meter, RunLog, measure
from infembed_ray.training.scores import Scores


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(0, 6))
def test_loss_rank_and_accuracy_match_their_definitions(seed, rows, width):
    generator = torch.Generator().manual_seed(seed)
    positive = torch.randint(-3, 4, (rows,), generator=generator) / 4  # few values, so that there are ties
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
    without = [not any(kept) for kept in mask.tolist()]
    assert measured["without_negatives"].item() == pytest.approx(sum(without) / rows)
    assert measured["positive_similarity"].item() == pytest.approx(positive.mean().item(), abs=1e-6)


def test_row_is_without_negatives_only_if_no_variable_has_one():
    mask = torch.tensor([[True], [False], [False]])
    positive, similarities = torch.zeros(3), torch.zeros(3, 1)
    negatives = {"P": Negatives(similarities, mask), "I": Negatives(similarities, mask.flip(0))}
    assert measure(Scores(positive, negatives), 0.1)["without_negatives"].item() == pytest.approx(1 / 3)


def test_non_finite_figures_are_null_and_others_have_the_digits_of_fp32(tmp_path):
    settings = TrainSettings(records="r", model="m", output="o", trackers=())
    log = RunLog(settings, tmp_path, 0, lambda event: None)
    figures = {"loss": math.nan, "grad_norm": math.inf, "learning_rate": 1 / 3}
    log.write(1, 8, time=7, tokens=9, seconds=1.0, memory_gib=1.0, **figures)
    (line,) = read_metrics(tmp_path)
    assert (line["step"], line["loss"], line["grad_norm"], line["learning_rate"]) == (1, None, None, 0.3333333)


def test_meter_computes_tokens_per_second_and_padding():
    meter = Meter(torch.device("cpu"), torch.float32)
    with meter.data():
        pass
    took = meter.end(slots=400.0, tokens=300.0, flops=1e9)
    assert 0 <= took["data_seconds"] <= took["seconds"]
    assert took["tokens"] == 300
    assert took["tokens_per_second"] == pytest.approx(300 / took["seconds"])
    assert took["padding"] == pytest.approx(0.25)
    assert took["mfu"] is None  # the peak of a CPU is unknown
    assert 0.05 < took["memory_gib"] < 100
