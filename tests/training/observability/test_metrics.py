"""Measures of a batch against loops, and the log against what was written."""

import math
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infembed_ray.training.losses import Negatives
from infembed_ray.training.observability.metrics import Meter, StepLog, measure, read_metrics, read_metrics_from
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


def test_resumed_log_continues_after_its_start_step(tmp_path):
    log = StepLog(tmp_path, 0)
    for step in (1, 2, 3):
        log.write(step=step, loss=1 / 3)
    StepLog(tmp_path, 2).write(step=3, loss=0.5)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["loss"] for line in lines] == [0.3333333, 0.3333333, 0.5]


def test_incomplete_line_is_not_read(tmp_path):
    assert read_metrics(tmp_path) == []
    StepLog(tmp_path, 0).write(step=1)
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1}]


def test_row_is_without_negatives_only_if_no_variable_has_one():
    mask = torch.tensor([[True], [False], [False]])
    positive, similarities = torch.zeros(3), torch.zeros(3, 1)
    negatives = {"P": Negatives(similarities, mask), "I": Negatives(similarities, mask.flip(0))}
    assert measure(Scores(positive, negatives), 0.1)["without_negatives"].item() == pytest.approx(1 / 3)


def test_non_finite_figures_are_null(tmp_path):
    StepLog(tmp_path, 0).write(step=1, loss=math.nan, grad_norm=math.inf, mfu=None)
    assert read_metrics(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "mfu": None}]


def test_reader_gets_new_lines_and_restarts_when_the_log_is_rewritten(tmp_path):
    assert read_metrics_from(tmp_path, 0) == ([], 0)
    log = StepLog(tmp_path, 0)
    log.write(step=1)
    lines, end = read_metrics_from(tmp_path, 0)
    assert lines == [{"step": 1}]
    assert read_metrics_from(tmp_path, end) == ([], end)
    for step in (2, 3):
        log.write(step=step)
    lines, end = read_metrics_from(tmp_path, end)
    assert lines == [{"step": 2}, {"step": 3}]
    StepLog(tmp_path, 1)
    assert read_metrics_from(tmp_path, end)[0] == [{"step": 1}]


def test_log_is_cut_by_step_numbers_even_with_missing_lines(tmp_path):
    log = StepLog(tmp_path, 0)
    for step in (1, 3, 4):
        log.write(step=step)
    StepLog(tmp_path, 3)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]


def test_meter_computes_tokens_per_second_and_padding():
    meter = Meter(torch.device("cpu"), torch.float32)
    meter.begin()
    began = time.monotonic()
    for _ in range(2):
        with meter.data():
            time.sleep(0.01)
    time.sleep(0.02)
    took = meter.end(slots=400.0, tokens=300.0, flops=1e9)
    assert 0.04 <= took["seconds"] <= time.monotonic() - began + 0.01
    assert 0.02 <= took["data_seconds"] <= took["seconds"] - 0.02
    assert took["tokens"] == 300
    assert took["tokens_per_second"] == pytest.approx(300 / took["seconds"])
    assert took["padding"] == pytest.approx(0.25)
    assert took["mfu"] is None  # the peak of a CPU is unknown
    assert 0.05 < took["memory_gib"] < 100
