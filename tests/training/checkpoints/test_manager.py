"""Training checkpoints: damage, full disks, other numbers of workers, object stores, and what runs resume to."""

import re
import shutil
from concurrent.futures import Future
from dataclasses import replace
from threading import Timer
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from infembed_ray.config.training import Lora
from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.steps import resolve_input
from infembed_ray.training.checkpoints.checkpoint import Progress
from infembed_ray.training.checkpoints.manager import CheckpointManager
from infembed_ray.training.checkpoints.writer import Written
from infembed_ray.training.sampler import Sampler
from tests.training.checkpoints.runs import DAMAGES, Run, assert_same_weights, copy, copy_and, losses, run_all, weights
from tests.training.checkpoints.states import RECORDS, Writer, complete, done, settings_of, steps, warnings

STAGES = (0, 1, 2, 3)
QUICK = (2, 3)
"""Stages of the quick tests; 0 and 1 have the slow ones."""
of_stages = pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=() if stage in QUICK else pytest.mark.slow) for stage in STAGES]
)


@pytest.fixture(scope="module")
def runs(request, tiny, bucket, tmp_path_factory):
    """Train all runs of the chosen tests in few processes, because starting a process costs more than training."""
    root = tmp_path_factory.mktemp("runs")
    tests = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    chosen = {test.callspec.params.get("stage") for test in tests}
    stages = [stage for stage in STAGES if stage in chosen | {2}]
    lora = {"lora": Lora(rank=4, target_modules=("Wqkv",), dropout=0.0), "learning_rate": 1e-2}
    tied = {"instruction_negatives": None}
    died = [Run(root / f"one to two/{stage}", {"zero_stage": stage}, dies_after=2) for stage in stages]
    assert run_all(tiny, 1, died) == ["died"] * len(died)

    whole = [Run(root / f"two/{stage}", {"zero_stage": stage}) for stage in stages]
    died = [Run(root / f"died/{stage}", {"zero_stage": stage}, dies_after=2) for stage in stages]
    more = [Run(root / f"one to two/{stage}", {"zero_stage": stage}) for stage in stages]
    whole.append(Run(root / "lora", lora | {"zero_stage": 2}))
    for stage in stages:
        died.append(Run(root / f"lora/{stage}", lora | {"zero_stage": stage}, dies_after=2))
        more.append(Run(root / f"lora/{stage}", lora | {"zero_stage": stage}))
    died.append(Run(root / "tied", tied, dies_after=1))
    for damage in DAMAGES:
        directory = root / damage.__name__
        more.append(Run(directory, before=(copy_and, damage, root / "died/2", directory)))
    for name in ("apart", "apart-then-one"):
        stored = {"zero_stage": 2, "output": f"{bucket}/{root.name}/{name}"}
        died.append(Run(root / name, stored, dies_after=2, apart=True))
    more.append(Run(root / "apart", died[-2].changes, apart=True, before=(shutil.rmtree, root / "apart/1/states")))
    more.append(Run(root / "full", full=(3,)))
    last = [Run(root / "full twice", full=(2, 3)), Run(root / "full at the end", full=(4,))]
    last += [Run(root / "full at the end", unreachable=True), Run(root / "full at the end")]
    ended = run_all(tiny, 2, [*whole, *died, *more, *last])
    assert ended[:-4] == [None] * len(whole) + ["died"] * len(died) + [None] * len(more)
    assert re.search("step 3 was not saved: File too large .* and the one before was not either; free disk", ended[-4])
    assert "the last checkpoint could not be saved" in ended[-3]
    assert ended[-2] == "the store does not answer"  # raised by both workers
    assert ended[-1] is None

    fewer = []
    for stage in stages:
        directory = root / f"two to one/{stage}"
        fewer.append(Run(directory, {"zero_stage": stage}, before=(copy, root / f"died/{stage}", directory)))
    fewer.append(Run(root / "another machine", died[-1].changes))
    *ended, refused = run_all(tiny, 1, [*fewer, Run(root / "tied", tied)])
    assert ended == [None] * len(fewer)
    assert (
        "workers=1 cannot resume exactly from checkpoints of 2 workers, because instruction_negatives=null" in refused
    )
    assert refused.endswith("set workers=2")
    return root


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.integration
def test_damaged_newest_checkpoint_is_skipped_with_a_warning(runs, damage):
    directory = runs / damage.__name__
    [warning] = warnings(directory)
    assert re.search(
        rf"^checkpoint step-00000002-\w+ is not used: .*{DAMAGES[damage]}; the run resumes from step 1$", warning
    )
    assert losses(directory) == losses(runs / "two/2")
    assert_same_weights(directory, runs / "two/2")
    assert steps(directory) == [3, 4]
    assert len(list((directory / "states").iterdir())) == 2  # no damaged checkpoint is left


@pytest.mark.integration
def test_full_disk_drops_a_checkpoint_but_not_the_run(runs):
    """Only one worker has a full disk; the other must not wait for it."""
    [warning] = warnings(runs / "full")
    assert re.search(
        r"^the checkpoint of step 3 was not saved: File too large at \S+optim_states.pt, \d+ bytes free", warning
    )
    assert "training continues with the earlier checkpoints" in warning
    assert steps(runs / "full") == [2, 4]
    assert_same_weights(runs / "full", runs / "two/2")


@pytest.mark.integration
def test_second_full_disk_in_a_row_stops_the_run_and_leaves_the_newest_complete_checkpoint(runs):
    [warning] = warnings(runs / "full twice")
    assert warning.startswith("the checkpoint of step 2 was not saved")
    assert len(losses(runs / "full twice")) == 3
    assert steps(runs / "full twice") == [1]
    assert not list((runs / "full twice").glob("*.safetensors"))


@pytest.mark.integration
def test_run_with_unsaved_last_checkpoint_exports_nothing_until_rerun(runs):
    assert steps(runs / "full at the end") == [3, 4]
    assert losses(runs / "full at the end") == losses(runs / "two/2")
    assert_same_weights(runs / "full at the end", runs / "two/2")


@of_stages
@pytest.mark.integration
def test_run_resumes_with_another_number_of_workers(runs, stage):
    """Losses differ by rounding, because sums over a batch have another order."""
    for directory in (runs / f"two to one/{stage}", runs / f"one to two/{stage}"):
        np.testing.assert_allclose(losses(directory), losses(runs / "two/2"), rtol=1e-6)
        assert_same_weights(directory, runs / "two/2", tolerance=2e-6)
        assert {path.name.split("-")[0] for path in (directory / "states").iterdir()} == {"step"}


@pytest.mark.integration
def test_nodes_without_a_common_directory_resume_from_the_store(runs, bucket, tmp_path, monkeypatch):
    """Two nodes, one of them lost; and one new machine that reshards what two nodes have saved."""
    monkeypatch.setenv("INFEMBED_SCRATCH", str(tmp_path))
    for name, tolerance in (("apart", 0.0), ("apart-then-one", 2e-6)):
        exported = resolve_input(f"{bucket}/{runs.name}/{name}", "output")
        np.testing.assert_allclose(losses(exported), losses(runs / "two/2"), rtol=1e-6 if tolerance else 0)
        assert_same_weights(exported, runs / "two/2", tolerance)
        states = Folder.open(f"{bucket}/{runs.name}/{name}/states", "output").entries()
        assert {int(tag.split("-")[1]) for tag in states} == {3, 4}
    assert not any((runs / directory).exists() for directory in ("apart/0", "apart/1", "another machine"))


@of_stages
@pytest.mark.integration
def test_adapters_resume_from_checkpoints_without_the_frozen_backbone(runs, tiny, stage):
    resumed = runs / f"lora/{stage}"
    np.testing.assert_allclose(losses(resumed), losses(runs / "lora"), rtol=1e-5)
    assert_same_weights(resumed, runs / "lora", tolerance=0.0 if stage == 2 else 2e-5)
    before = InstructionEncoder.from_pretrained(tiny).state_dict()
    moved = {name for name, weight in weights(resumed).items() if not torch.equal(weight, before[name])}
    assert {name.split(".")[-2] for name in moved} == {"Wqkv"}
    of_adapters, of_all = (
        sum(file.stat().st_size for file in complete(directory)[-1].iterdir())
        for directory in (resumed, runs / "two" / str(stage))
    )
    assert of_adapters < of_all / 2


def test_checkpoints_are_kept_by_age_and_score_and_damaged_ones_skipped(tmp_path, tiny):
    """The files are written by this test, without training."""
    settings = settings_of(tiny, workers=1)
    sampler = Sampler(RECORDS, 1, 4, 2, 42)
    kept = CheckpointManager(tmp_path / "states", settings, sampler)
    for step, score in enumerate([0.2, 0.9, None, 0.9, 0.1, None], start=1):
        kept.save(Writer(), Progress(step, score=score), wait=True)
    assert steps(tmp_path) == [4, 5, 6]
    best, *newest = complete(tmp_path)
    for checkpoint in newest:
        (checkpoint / "file").write_text("")
    again, engine = CheckpointManager(tmp_path / "states", settings, sampler), Writer()
    assert again.resume(engine).step == 4
    assert engine.loaded == best.name
    again.save(engine, Progress(5, score=0.3), wait=True)
    assert steps(tmp_path) == [4, 5]


def test_damaged_best_checkpoint_is_replaced_by_the_next_best_on_export(tmp_path, tiny):
    kept = CheckpointManager(tmp_path / "states", settings_of(tiny), Sampler(RECORDS, 1, 4, 2, 42))
    for step, score in enumerate([0.9, 0.5, 0.1], start=1):
        kept.save(Writer(), Progress(step, score=score), wait=True)
    assert steps(tmp_path) == [1, 2, 3]
    for number, state in enumerate(complete(tmp_path), start=1):
        found, progress = kept.result()
        assert (found, progress.step) == (state, number)
        (state / "file").write_text("")
    with pytest.raises(InputError, match="no undamaged checkpoint can be exported"):
        kept.result()
    assert re.search(r"^checkpoint step-00000001-\w+ is not exported: file has 0 bytes", warnings(tmp_path)[0])


class Slow(Writer):
    """An engine that writes its checkpoints when the test says so."""

    def save(self, directory, tag):
        self.written = super().save(directory, tag).result()
        self.writing = Future()
        return self.writing

    def finish(self, error=None):
        self.writing.set_result(replace(self.written, error=error))


@pytest.fixture
def kept(tmp_path, tiny):
    return CheckpointManager(tmp_path / "states", settings_of(tiny), Sampler(RECORDS, 1, 4, 2, 42))


def test_checkpoint_replaces_the_one_before_only_when_all_of_it_is_written(kept, tmp_path):
    engine = Slow()
    for step in (1, 2):
        kept.save(Writer(), Progress(step), wait=True)
    kept.save(engine, Progress(3))
    kept.commit()
    assert steps(tmp_path) == [1, 2]
    engine.finish()
    assert steps(tmp_path) == [1, 2]
    kept.commit()
    assert steps(tmp_path) == [2, 3]


def test_next_checkpoint_waits_until_the_one_before_is_complete(kept, tmp_path):
    engine, seen = Slow(), []

    class Looks(Writer):
        def save(self, directory, tag):
            seen.extend(steps(tmp_path))
            return super().save(directory, tag)

    kept.save(engine, Progress(1))
    Timer(0.2, engine.finish).start()
    kept.save(Looks(), Progress(2), wait=True)
    assert seen == [1]
    assert steps(tmp_path) == [1, 2]


def test_failures_in_a_row_stop_the_run_and_single_ones_do_not(kept, tmp_path):
    for step, error in enumerate(["disk full", None, "disk full", "lost share"], start=1):
        assert kept.stopped is None
        engine = Slow()
        kept.save(engine, Progress(step))
        engine.finish(error)
        kept.commit(wait=True)
    assert [message.split(":")[0] for message in warnings(tmp_path)] == [
        f"the checkpoint of step {step} was not saved" for step in (1, 3)
    ]
    assert "the checkpoint of step 4 was not saved: lost share" in kept.stopped
    assert steps(tmp_path) == [2]


def test_resharded_files_are_removed_after_failures_and_kills(tmp_path, tiny):
    class Full(Writer):
        def reshard(self, state, into):
            into.mkdir(parents=True)
            raise OSError("no space left")

    def manager_of(workers):
        settings = settings_of(tiny, workers=workers)
        return CheckpointManager(tmp_path / "states", settings, Sampler(RECORDS, workers, 4, 2, 42))

    manager_of(2).save(Writer(), Progress(1), wait=True)
    (tmp_path / "states/resharded-killed").mkdir()
    with pytest.raises(OSError, match="no space left"):
        manager_of(1).resume(Full())
    assert [path.name.split("-")[0] for path in (tmp_path / "states").iterdir()] == ["step"]


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        ({"seed": 1}, {}, "its checkpoints are from a run with other settings"),
        (
            {"workers": 2, "instruction_negatives": None},
            {"workers": 1, "instruction_negatives": None},
            "workers=1 cannot resume exactly from checkpoints of 2 workers, because instruction_negatives=null .* set workers=2",
        ),
        (
            {"workers": 2},
            {"workers": 8},
            "workers=8 cannot resume exactly from checkpoints of 2 workers, because so few records per step",
        ),
    ],
)
def test_checkpoints_of_another_run_are_rejected_before_any_work(tmp_path, tiny, saved, now, message):
    def manager_of(changes):
        settings = settings_of(tiny, **changes)
        return CheckpointManager(tmp_path / "states", settings, Sampler(RECORDS, settings.workers, 4, 2, settings.seed))

    def save(directory, tag):
        (directory / tag).mkdir(parents=True)
        return done(Written())

    manager_of(saved).save(SimpleNamespace(save=save), Progress(1), wait=True)
    manager_of(saved).require_resumable()
    with pytest.raises(InputError, match=message):
        manager_of(now).require_resumable()
