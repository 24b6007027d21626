"""Connecting to Ray, with start attempts that fail on real processes."""

import os
import re
import socket
import subprocess
import sys

import psutil
import pytest
import ray

from infembed_ray import ray_compat
from infembed_ray.errors import InputError
from infembed_ray.ray_cluster import connect
from tests.support.strangers import ask_gcs
from tests.support.waiting import wait_until

NO_TIME = "RAY_gcs_server_port_wait_time_s"
"""Ray's time limit for its first process; with 0 s every start fails and leaves that process running."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    set_by_connect = ("RAY_BACKEND_LOG_LEVEL", *ray_compat.NO_RETRY_LOG, *ray_compat.START_LIMITS)
    for name in ("RAY_ADDRESS", ray_compat.JOB_CONFIG_VARIABLE, *set_by_connect):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores what `connect` sets
        monkeypatch.delenv(name)
    OTHERS.clear()
    OTHERS.update(ray_processes())
    yield
    ray.shutdown()


def ray_processes():
    """Ids of Ray's processes that this process started, without those of other tests' clusters."""
    return {p.pid for p in psutil.Process().children() if p.name() in ("gcs_server", "raylet")} - OTHERS


OTHERS: set[int] = set()


COMMAND = """
import psutil, sys
from infembed_ray.analysis import analyze
from infembed_ray.cli.main import main
from infembed_ray.ray_cluster import connect
analyze.run = lambda settings: connect()
status = main(["analyze", "records=" + sys.argv[1], "output=unused"])
print(status, [p.name() for p in psutil.Process().children() if p.name() in ("gcs_server", "raylet")])
"""


@pytest.mark.ray
def test_two_failed_starts_end_the_command_with_one_line_and_leave_no_process():
    """In a process of its own, because earlier tests of this one may still have something to say."""
    command = [sys.executable, "-c", COMMAND, __file__]
    ended = subprocess.run(command, env=os.environ | {NO_TIME: "0"}, capture_output=True, text=True, check=True)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("infembed analyze: Ray failed to start (local) after ")
    assert "Timed out waiting" in line
    assert "overloaded" in line
    assert "/ray/session_latest/logs" in line
    assert ended.stdout.count("trying once more") == 1
    assert ended.stdout.splitlines()[-1] == "1 []"


def test_a_dead_address_is_rejected_at_once(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(InputError, match=r"^RAY_ADDRESS="):
        connect()
    assert not ray.is_initialized()


@pytest.mark.ray
def test_the_second_attempt_succeeds_and_a_job_shows_only_its_workers_errors(monkeypatch, capfd):
    real = ray.init
    attempts = []

    def fail_once(**options):
        attempts.append(os.environ[NO_TIME])
        if len(attempts) == 1:
            monkeypatch.setenv(NO_TIME, "0")
        else:
            monkeypatch.setenv(NO_TIME, attempts[0])
            assert ray_processes() == set()
        return real(num_cpus=1, object_store_memory=80 * 2**20, **options)

    @ray.remote
    def fails():
        try:
            raise ValueError("the cause")
        except ValueError:
            import traceback

            traceback.print_exc()

    monkeypatch.setattr(ray, "init", fail_once)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    connect()
    assert len(attempts) == 2
    ray.get(fails.remote())
    seen: list[str] = []

    def shown():
        seen.extend(capfd.readouterr())
        return "ValueError: the cause" in "".join(seen)

    wait_until(shown, 20)
    assert [line for line in "".join(seen).splitlines() if "logging.cc" in line and "(raylet)" not in line] == []


@pytest.mark.ray
def test_a_local_cluster_refuses_a_process_without_its_token(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_MODE", "")
    monkeypatch.delenv("RAY_AUTH_MODE")  # monkeypatch restores it: Ray sets it for this process
    connect()
    address = ray.get_runtime_context().gcs_address
    assert "keys: " in ask_gcs(address).stdout
    (tmp_path / "other").write_text("some-other-secret-of-at-least-thirty-two-characters")
    for stranger in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "other")}):
        refused = ask_gcs(address, **stranger)
        assert refused.returncode != 0
        assert "InvalidAuthToken" in refused.stderr


@pytest.mark.slow
def test_a_task_that_is_killed_for_memory_each_time_ends_with_an_error_of_ray():
    code = """
import time
import ray
from infembed_ray.errors import in_one_line
from infembed_ray.ray_cluster import connect
connect()
try:
    ray.get(ray.remote(lambda: time.sleep(300)).remote(), timeout=240)
except ray.exceptions.OutOfMemoryError as error:
    print(in_one_line(error, "mine"))
"""
    limits = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | limits)
    assert re.fullmatch(r"OutOfMemoryError: node .* ran out of memory \(.*; lower workers, or use .*\n", done.stdout)
