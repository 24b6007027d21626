"""Checkpoints in an object store: which machine wins, and uploads that fail."""

import re

import pytest

from infembed_ray.errors import InputError
from infembed_ray.storage.object_store import Folder
from infembed_ray.training.checkpoints.checkpoint import Progress
from infembed_ray.training.checkpoints.manager import CheckpointManager
from infembed_ray.training.sampler import Sampler
from tests.training.checkpoints.states import RECORDS, Writer, settings_of, warnings

pytestmark = pytest.mark.integration


@pytest.fixture
def machine(bucket, tiny, tmp_path):
    """Return a function: name of a machine -> checkpoint manager of one run on that machine, with an object store."""
    Folder.open(f"{bucket}/{tmp_path.name}", "output")

    def manager_of(name):
        settings = settings_of(tiny, workers=1)
        settings = settings.model_copy(update={"output": f"{bucket}/{tmp_path.name}"})
        (tmp_path / name).mkdir(exist_ok=True)
        return CheckpointManager(tmp_path / name / "states", settings, Sampler(RECORDS, 1, 4, 2, 42))

    return manager_of


def save(states, step, figures=None):
    """Save and upload a checkpoint, with a metrics file of that text."""
    if figures is not None:
        (states.directory.parent / "metrics.jsonl").write_text(figures)
    states.save(Writer(), Progress(step), wait=True)


def test_machine_that_is_behind_downloads_newer_checkpoint_and_run_files(machine, tmp_path):
    """Files of the store win even if local ones are as long, and this machine appends its events to them."""
    save(machine("a"), 1, "of a, and this is a long line\n")
    ahead = machine("b")
    assert ahead.resume(Writer()).step == 1
    ahead._warn(1, "logged by b")
    save(ahead, 2, "of b\n")
    unfinished = Folder.open(ahead._settings.output, "output") / "states/step-00000003-unfinished"
    unfinished.write("file", "half")
    assert machine("a").resume(Writer()).step == 2
    assert (tmp_path / "a/metrics.jsonl").read_text() == "of b\n"
    one, other = warnings(tmp_path / "a")
    assert one == "logged by b"
    assert "step-00000003-unfinished is not used" in other
    [newest] = {name.split("/")[0] for name in (ahead._remote / "states").entries() if name.startswith("step-00000002")}
    (ahead._remote / "states").write(f"{newest}/file", "damaged")
    assert machine("c").resume(Writer()).step == 1
    assert re.search(rf"{newest} is not used: file has 7 bytes instead of \d+", warnings(tmp_path / "c")[-1])


def test_run_that_is_behind_deletes_no_later_checkpoints_in_the_store(machine):
    behind, ahead = machine("a"), machine("b")
    save(behind, 1)
    assert ahead.resume(Writer()).step == 1
    save(ahead, 5)
    save(behind, 2)
    tags = {name.split("/")[0] for name in (behind._remote / "states").entries()}
    assert sorted(int(tag.split("-")[1]) for tag in tags) == [1, 2, 5]


@pytest.mark.parametrize("failures", [1, 2])
def test_failed_upload_of_the_last_checkpoint_is_repeated_before_the_export(machine, monkeypatch, failures):
    upload, left = Folder.upload, [failures]

    def fails(folder, file, name):
        if name.endswith("/file") and left[0]:
            left[0] -= 1
            raise OSError("the store does not answer")
        upload(folder, file, name)

    saved = machine("a")
    save(saved, 1)
    monkeypatch.setattr(Folder, "upload", fails)
    save(saved, 2)
    [warning] = warnings(saved.directory.parent)
    assert "the store does not answer" in warning
    if failures == 2:
        with pytest.raises(InputError, match=r"step-00000002-\w+ was not uploaded: OSError: the store does not answer"):
            saved.require_saved(Progress(2))
    else:
        saved.require_saved(Progress(2))
    uploaded = [
        int(name.split("-")[1]) for name in (saved._remote / "states").entries() if name.endswith("complete.json")
    ]
    assert uploaded == [1, 2][: 3 - failures]
