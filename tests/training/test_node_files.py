"""Files of a run in an object store: what is uploaded, downloaded and kept on a node."""

import pytest
import torch

from infembed_ray.storage.object_store import SCRATCH, Folder
from infembed_ray.storage.places import read_text
from infembed_ray.training import node_files
from infembed_ray.training.node_files import RunFiles, fetch, node_directory, share_of
from tests.support.waiting import wait_until
from tests.support.workers import run_workers
from tests.training.checkpoints.states import settings_of


@pytest.fixture
def remote(bucket, tmp_path):
    return Folder.open(f"{bucket}/{tmp_path.name}", "output")


def test_only_changed_files_are_uploaded_and_no_checkpoints(remote, tmp_path, monkeypatch):
    uploaded = []
    monkeypatch.setattr(Folder, "upload", lambda *named, of=Folder.upload: uploaded.append(named[2]) or of(*named))
    (tmp_path / "states/step-00000001-a").mkdir(parents=True)
    for name in ("metrics.jsonl", "events.jsonl", "states/step-00000001-a/file", "model.safetensors.partial"):
        (tmp_path / name).write_text("1")
    files = RunFiles(tmp_path, remote)
    files.upload()
    (tmp_path / "metrics.jsonl").write_text("1\n2")
    files.upload()
    files.upload()
    assert uploaded == ["events.jsonl", "metrics.jsonl", "metrics.jsonl"]
    assert read_text(remote / "metrics.jsonl") == "1\n2"


def test_logs_are_uploaded_while_they_grow_also_after_the_store_failed(remote, tmp_path, monkeypatch):
    monkeypatch.setattr(node_files, "UPLOAD_S", 0.01)
    upload, failures = Folder.upload, [OSError("no answer")]

    def unreliable(*named):
        if failures:
            raise failures.pop()
        upload(*named)

    monkeypatch.setattr(Folder, "upload", unreliable)
    (tmp_path / "metrics.jsonl").write_text("1")
    files = RunFiles(tmp_path, remote)
    files.follow()
    wait_until(lambda: read_text(remote / "metrics.jsonl") == "1")
    assert not failures
    files.stop()
    (tmp_path / "model.safetensors").write_text("large")
    assert set(remote.entries()) == {"metrics.jsonl"}
    files.upload()
    assert set(remote.entries()) == {"metrics.jsonl", "model.safetensors"}


def test_a_driver_fetches_everything_but_weights_checkpoints_and_logs_of_ray(remote, tmp_path):
    small = {"metrics.jsonl", "1_Pooling/config.json", "interaction.safetensors"}
    for name in (*small, "model-00001-of-00002.safetensors", "states/step-00000001-a/file", "ray_train/1/snapshot"):
        remote.write(name, "x")
    fetch(remote, tmp_path)
    assert {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*") if file.is_file()} == small
    fetch(remote, tmp_path / "some", ["nothing.jsonl", "metrics.jsonl"])
    assert [file.name for file in (tmp_path / "some").iterdir()] == ["metrics.jsonl"]


def test_a_node_has_a_directory_of_its_own_if_the_output_is_in_a_store(remote, tmp_path, monkeypatch):
    monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
    shared = tmp_path / "shared"
    assert node_directory(settings_of("-"), shared) == shared
    own = {node_directory(settings_of("-", output=f"{remote}/{name}"), shared) for name in ("a", "b")}
    assert len(own) == 2
    assert all(directory.is_dir() and directory.is_relative_to(tmp_path / "scratch") for directory in own)


def share(rank, directories):
    torch.distributed.init_process_group("gloo")
    found = share_of(directories[rank])
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.integration
def test_workers_of_one_directory_share_it(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    assert run_workers(share, 3, [one, other, one]) == [(0, 2), (0, 1), (1, 2)]
    assert share_of(tmp_path / "nothing") == (0, 1)
    assert not (tmp_path / "nothing").exists()
