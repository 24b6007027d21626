"""Snapshots of a state, and the thread that writes them."""

import hashlib
import threading
from collections import OrderedDict, defaultdict

import pytest
import torch

from infembed_ray.storage import durable
from infembed_ray.training.checkpoints.writer import CheckpointFiles


@pytest.fixture
def files():
    return CheckpointFiles()


def state_of(number):
    moments = defaultdict(dict, {0: {"step": torch.tensor(number), "exp_avg": torch.full((3, 2), float(number))}})
    weights = OrderedDict(w=torch.full((2, 4), float(number), dtype=torch.bfloat16).T)
    return {"module": weights, "optimizer": {"state": moments, "groups": [{"lr": number, "betas": (0.9, 0.95)}]}}


def assert_state_of(number, loaded):
    expected = state_of(number)
    assert loaded["module"]["w"].dtype == torch.bfloat16
    assert torch.equal(loaded["module"]["w"], expected["module"]["w"])
    assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], expected["optimizer"]["state"][0]["exp_avg"])
    assert loaded["optimizer"]["state"][0]["step"] == number
    assert loaded["optimizer"]["groups"] == expected["optimizer"]["groups"]
    assert list(map(type, loaded.values())) == list(map(type, expected.values()))


def test_file_has_the_state_of_the_save_and_its_checksum(files, tmp_path):
    """The state changes between the save and the write."""
    for number in (1, 2):
        path = tmp_path / str(number) / "states.pt"
        path.parent.mkdir()
        state = state_of(number)
        files.save(state, str(path))
        state["module"]["w"].zero_()
        state["optimizer"]["state"][0]["exp_avg"].zero_()
        state["optimizer"]["groups"][0]["lr"] = 7
        [(name, checksum)] = files.write().result().files.items()
        assert name == "states.pt"
        assert checksum == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    assert_state_of(1, torch.load(tmp_path / "1/states.pt", weights_only=False))
    assert_state_of(2, torch.load(tmp_path / "2/states.pt", weights_only=False))


def test_write_goes_on_while_training_continues(files, tmp_path, monkeypatch):
    goes_on = threading.Event()
    sync = durable.sync
    monkeypatch.setattr(durable, "sync", lambda stream: goes_on.wait(30) and sync(stream))
    files.save(state_of(1), str(tmp_path / "states.pt"))
    writing = files.write()
    assert not writing.done()
    goes_on.set()
    assert writing.result().error is None


def test_missing_directory_is_a_failure_and_not_raised(files, tmp_path):
    files.save(state_of(1), str(tmp_path / "missing/states.pt"))
    written = files.write().result()
    assert written.files == {}
    assert written.error == f"No such file or directory at {tmp_path / 'missing/states.pt'}"
