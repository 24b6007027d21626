"""The learning rate against transformers' schedulers, step by step."""

import pytest
import torch
from transformers import get_scheduler

from infembed_ray.config import TrainSettings
from infembed_ray.training.schedule import learning_rate

TRANSFORMERS_NAMES = {"constant": "constant_with_warmup"}


def settings_of(**changes):
    return TrainSettings(records="-", model="-", output="-", **changes)


@pytest.mark.parametrize("steps", [1, 7, 100])
@pytest.mark.parametrize("warmup", [0.0, 0.3])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_schedules_are_those_of_transformers(schedule, warmup, steps):
    settings = settings_of(schedule=schedule, warmup_fraction=warmup, learning_rate=3e-4)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    warm = int(warmup * steps)
    theirs = get_scheduler(TRANSFORMERS_NAMES.get(schedule, schedule), optimizer, warm, steps)
    for step in range(steps):
        if step < warm:  # theirs begins at 0 and so wastes its first step; ours ends the warm-up at the peak
            assert learning_rate(settings, step, steps) == pytest.approx(3e-4 * (step + 1) / warm)
        else:
            assert learning_rate(settings, step, steps) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        theirs.step()


def test_linear_is_the_default_as_in_the_paper():
    assert [learning_rate(settings_of(), n, 4) for n in range(4)] == pytest.approx([5e-5, 3.75e-5, 2.5e-5, 1.25e-5])
