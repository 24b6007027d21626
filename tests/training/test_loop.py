"""Training loop: the learning rate against transformers' schedulers. Trainings are in test_launch.py and others."""

import pytest
import torch
from transformers import get_scheduler

from infembed_ray.config.training import TrainSettings
from infembed_ray.training.loop import learning_rate

TRANSFORMERS_NAMES = {"constant": "constant_with_warmup"}


def settings_of(**changes):
    return TrainSettings(records="-", model="-", output="-", **changes)


@pytest.mark.parametrize("steps", [1, 7, 100])
@pytest.mark.parametrize("warmup", [0.0, 0.3])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_schedules_match_transformers(schedule, warmup, steps):
    settings = settings_of(schedule=schedule, warmup_fraction=warmup, learning_rate=3e-4)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    warm = int(warmup * steps)
    theirs = get_scheduler(TRANSFORMERS_NAMES.get(schedule, schedule), optimizer, warm, steps)
    for step in range(steps):
        if step < warm:  # transformers starts at 0, which wastes the first step; ours reaches the peak
            assert learning_rate(settings, step, steps) == pytest.approx(3e-4 * (step + 1) / warm)
        else:
            assert learning_rate(settings, step, steps) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        theirs.step()
