"""Runs of training whose checkpoints are damaged, or do not fit the disk, or whose workers die."""

import os
import resource
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch

from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.training.checkpoints.manager import CheckpointManager
from infembed_ray.training.observability.logs import read_metrics
from tests.support.workers import run_workers, share_process_group
from tests.training.checkpoints.states import RECORDS, complete, settings_of
from tests.training.test_collate import record


class Died(Exception):
    """Raised in place of a SIGKILL, which would end the processes that all runs share."""


@dataclass
class Run:
    """One run of some workers; the runs follow each other in the same processes.

    Attributes:
        directory: Output of the run.
        changes: Changes of the settings.
        dies_after: Steps after which all workers die.
        full: Steps whose checkpoints find the disk of worker 1 full.
        unreachable: Whether the store does not answer worker 1 when it verifies a checkpoint.
        apart: Whether each worker has a directory of its own, as on nodes without a common file system.
        before: Function that worker 0 calls first, and its arguments.
    """

    directory: Path
    changes: dict = field(default_factory=dict)
    dies_after: int | None = None
    full: tuple = ()
    unreachable: bool = False
    apart: bool = False
    before: tuple = ()


def train(run, model, rank, workers):
    """Train as a worker; return why the run stopped, or None at its end."""
    from infembed_ray.training.loop import train_worker

    steps = 0

    def preempted():
        nonlocal steps
        steps += 1
        if run.dies_after is not None and steps > run.dies_after:
            raise Died
        if rank == workers - 1:
            limit_files(1000 if steps in run.full else resource.RLIM_INFINITY)
        return False

    if run.before and rank == 0:
        do, *arguments = run.before
        do(*arguments)
    directory = run.directory / str(rank) if run.apart else run.directory
    directory.mkdir(parents=True, exist_ok=True)
    look, save = CheckpointManager._fault, CheckpointManager.save
    if run.full or run.dies_after is not None:  # the disk fills, or the run dies, when a checkpoint is written
        CheckpointManager.save = lambda manager, engine, progress, wait: save(manager, engine, progress, wait=True)
    if run.unreachable and rank == 1:
        CheckpointManager._fault = no_answer
    settings = settings_of(model, workers=workers, **run.changes)
    try:
        train_worker(settings, [record(n) for n in range(RECORDS)], directory, torch.device("cpu"), preempted)
    except Died:
        return "died"
    except (InputError, OSError) as error:
        return str(error)
    finally:
        limit_files(resource.RLIM_INFINITY)
        CheckpointManager._fault, CheckpointManager.save = look, save
    return None


def no_answer(self, state, name):
    raise OSError("the store does not answer")


def limit_files(size):
    """Limit the size of files that this process can write, in bytes, by the kernel."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def worker(rank, workers, runs, model):
    silence = os.open(os.devnull, os.O_WRONLY)  # the limit of file sizes must not hold for a log
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    destroy = share_process_group()
    ended = [train(run, model, rank, workers) for run in runs]
    destroy()
    return ended


def run_all(model, workers, runs):
    """Train some runs; return why each of them stopped, None at its end."""
    results = run_workers(worker, workers, workers, runs, model)
    assert all(result == results[0] for result in results)
    return results[0]


def losses(directory):
    return [line["loss"] for line in read_metrics(directory)]


def weights(directory):
    return InstructionEncoder.from_pretrained(str(directory)).state_dict()


def assert_same_weights(a, b, tolerance=0.0):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    for name, weight in a.items():
        torch.testing.assert_close(weight, b[name], rtol=0, atol=tolerance, msg=name)


# ------------------------------------------------------------------------------------------------------------- damage


def copy(source, target):
    shutil.copytree(source, target, dirs_exist_ok=True)  # another worker may have created it


def truncate(directory):
    """Truncate the last worker's file of the newest checkpoint, as a crash of the file server may."""
    file = sorted(complete(directory)[-1].glob("*.pt"))[-1]
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(directory):
    file = sorted(complete(directory)[-1].glob("*.pt"))[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def lose_marker(directory):
    (complete(directory)[-1] / "complete.json").unlink()


DAMAGES = {
    truncate: r"optim_states.pt has \d+ bytes instead of \d+",
    flip_a_bit: r"model_states.pt has another checksum than when it was written",
    lose_marker: r"it is incomplete \(no complete.json\)",
}


def copy_and(damage, source, target):
    shutil.copytree(source, target, dirs_exist_ok=True)  # another worker may have created it
    damage(target)
