import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from infembed_ray.errors import InputError
from infembed_ray.storage import leases
from infembed_ray.storage.leases import lease
from infembed_ray.storage.object_store import Folder
from infembed_ray.storage.places import read_text
from tests.support.faulty_store import EXPIRED, FORWARD, UNAVAILABLE, first_replies_lost
from tests.support.waiting import wait_until

LEASE = ".name.lease"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture
def folder(faulty, bucket, tmp_path, monkeypatch):
    """An empty folder of an object store, with leases of 1.5 s."""
    monkeypatch.setattr(leases, "SECONDS", 1.5)
    return Folder.open(f"{bucket}/{tmp_path.name}", "output")


def body(folder):
    return json.loads(read_text(folder / LEASE))


def test_the_second_holder_of_a_directory_hears_of_the_first(tmp_path):
    with lease(tmp_path, "name", "output", "x"):
        holder = f"output=x: process {os.getpid()} on {socket.gethostname()} has been writing this output since 20"
        with pytest.raises(InputError, match=holder), lease(tmp_path, "name", "output", "x"):
            pass
        with lease(tmp_path, "other name", "output", "x"):
            pass
    with lease(tmp_path, "name", "output", "x") as still_held:
        still_held()


@pytest.mark.integration
def test_a_directory_whose_holder_was_killed_is_free(tmp_path):
    code = (
        "import sys, pathlib; from infembed_ray.storage.leases import lease;"
        "held = lease(pathlib.Path(sys.argv[1]), 'name', 'output', 'x'); held.__enter__(); print('in', flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT
    )
    assert holder.stdout.readline() == b"in\n"
    with pytest.raises(InputError, match=f"process {holder.pid} on"), lease(tmp_path, "name", "output", "x"):
        pass
    holder.kill()
    holder.wait()
    with lease(tmp_path, "name", "output", "x"):
        pass


def test_the_second_holder_in_a_store_hears_of_the_first_once_it_renews(folder, capsys):
    with lease(folder, "name", "output", "x"):
        first = body(folder)["renewals"]
        holder = f"output=x: process {os.getpid()} on .*; wait for it, or stop it"
        with pytest.raises(InputError, match=holder), lease(folder, "name", "output", "x"):
            pass
        assert body(folder)["renewals"] > first
        assert "this run goes on in at most" in capsys.readouterr().out
    assert folder.entries() == {}


def test_the_lease_of_a_dead_process_is_taken_over_by_one_process(folder):
    dead = {"host": "gone", "pid": 1, "since": "2026-01-01", "id": "0", "seconds": 1.5, "renewals": 9}
    folder.put(LEASE, json.dumps(dead).encode())
    taken, release = [], threading.Event()

    def take():
        try:
            with lease(folder, "name", "output", "x"):
                taken.append("held")
                release.wait(30)
        except InputError as error:
            taken.append(str(error))
            release.set()

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken)[0] == "held"
    assert f"process {os.getpid()} on" in sorted(taken)[1]
    assert folder.entries() == {}


def test_a_lease_that_expired_long_ago_is_taken_over_at_once(folder, capsys):
    dead = {"host": "gone", "pid": 1, "since": "2026-01-01", "id": "0", "seconds": -60, "renewals": 9}
    folder.put(LEASE, json.dumps(dead).encode())
    with lease(folder, "name", "output", "x"):
        assert body(folder)["pid"] == os.getpid()
    assert capsys.readouterr().out == ""


def test_a_holder_whose_lease_was_taken_over_is_told_and_leaves_the_new_one(folder):
    other = json.dumps({"host": "other", "pid": 2, "id": "other", "seconds": 60}).encode()
    with lease(folder, "name", "output", "x") as still_held:
        still_held()
        folder.write(LEASE, other.decode())
        with pytest.raises(InputError, match=r"output=x: another process took the lease over.* nothing is published"):
            still_held()
    assert folder.read_versioned(LEASE)[0] == other


def test_a_lease_survives_lost_replies_and_an_outage_that_is_longer_than_it(faulty, folder):
    faulty.decide = first_replies_lost()
    with lease(folder, "name", "output", "x") as still_held:
        faulty.decide = lambda request: UNAVAILABLE
        count = len(faulty.requests)
        wait_until(lambda: len(faulty.requests) > count + 3)
        faulty.decide = lambda request: FORWARD
        still_held()
        before = body(folder)["renewals"]
        wait_until(lambda: body(folder)["renewals"] > before)
    assert folder.entries() == {}


def test_the_error_of_the_block_is_raised_though_the_store_is_gone(faulty, folder):
    with pytest.raises(ZeroDivisionError), lease(folder, "name", "output", "x"):
        faulty.decide = lambda request: EXPIRED
        _ = 1 / 0
