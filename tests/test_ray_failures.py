"""Failures of Ray as one line: real errors of Ray, and a verb whose processes Ray kills for their memory."""

import json
import re
from typing import Any

import pytest
import torch
from ray import exceptions
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal import exceptions as train_internal
from ray.train.v2.api import exceptions as train_api

from infembed_ray.cli.main import main
from infembed_ray.config.training import TrainSettings
from infembed_ray.config.verbs import VERBS
from infembed_ray.errors import LONGEST, ClusterError, InputError, explained, in_one_line
from infembed_ray.ray_failures import MEANINGS, MEMORY
from infembed_ray.training.distributed import _explained

STRANGER = "python /home/neighbour/train.py --hub-token=hf_neighbour"
REPORT = f"""5 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.5, ID: 7ee5a582) was 22.41GB used / 23.59GB limit (0.95)
OOM kill reason: Memory usage 3998523392B exceeded threshold of 3962588928B (15.6% of 25325268992B limit)
Object store memory usage: [- objects spillable: 2
- bytes spillable: 3424]
Ray killed 5 worker(s) based on the killing policy
Top 10 memory users: PID	MEM(GB)	COMMAND
20955	0.73	ray::RayTrainWorker
17074	0.60	{STRANGER}
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/en/latest/debug-memory.html."""
"""As Ray 2.60 wrote it, with another user's process."""


def task_error(cause: Exception) -> exceptions.RayTaskError:
    return exceptions.RayTaskError("encode", f"Traceback ...\n  File x\n{type(cause).__name__}: {cause}", cause)


def died() -> exceptions.ActorDiedError:
    said = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"
    return exceptions.ActorDiedError(
        ActorDiedErrorContext(error_message=said, class_name="ServeController", actor_id=b"\1" * 16)
    )


def init_failed(cause: Exception) -> exceptions.ActorDiedError:
    error = task_error(cause)
    error.traceback_str = f"Traceback ...\n  File x\ninfembed_ray.errors.{type(cause).__name__}: {cause}"
    error._actor_id = "0"
    return exceptions.ActorDiedError(error)


out_of_memory = exceptions.OutOfMemoryError(REPORT)
FAILURES = {
    "memory": (
        out_of_memory,
        r"^node 10\.0\.0\.5 ran out of memory \(22\.41 of 23\.59 GB used\), .*; lower actors or batch",
    ),
    "memory of a worker": (train_internal.WorkerHealthCheckFailedError("A worker ...", out_of_memory), "^node 10"),
    "memory in training": (WorkerGroupError(REPORT, {1: out_of_memory}), "^node 10"),
    "memory of a GPU": (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        "^memory ran out; lower",
    ),
    "Serve": (RuntimeError(f"Deploying application infembed failed: {REPORT}"), "^node 10"),
    "Serve for another reason": (
        RuntimeError("Deploying application infembed failed: x\ny"),
        "^Ray Serve did not start",
    ),
    "an actor": (died(), r"ended unexpectedly.*ServeController.*; lower .*; the same command resumes$"),
    "an actor that does not start": (init_failed(KeyError("x")), "ended unexpectedly.*KeyError: 'x'"),
    "a preempted node": (exceptions.ObjectLostError("0" * 56, None, ""), "data of the run was lost"),
    "a placement": (ControllerError(train_internal.WorkerGroupStartupTimeoutError(2)), "no node has the resources"),
}


@pytest.mark.parametrize(("error", "said"), FAILURES.values(), ids=FAILURES)
def test_a_failure_of_ray_is_one_line_with_a_remedy_and_no_process_of_others(error: Exception, said: str) -> None:
    known = explained(error, "evaluate")
    assert isinstance(known, ClusterError)
    assert re.search(said, str(known)), known
    for line in (str(known), in_one_line(error), in_one_line(error, "evaluate")):
        assert "\n" not in line
        assert "neighbour" not in line
        assert len(line) <= 600


@pytest.mark.parametrize("wrap", [task_error, init_failed, lambda e: task_error(e).as_instanceof_cause()])
def test_a_users_mistake_in_a_process_of_ray_is_one_of_the_user(wrap: Any) -> None:
    known = explained(wrap(InputError("model=x: no such model; give another")))
    assert type(known) is InputError
    assert known.args == ("model=x: no such model; give another",)


def test_every_name_is_a_class_of_ray_and_every_stage_a_verb() -> None:
    for name in MEANINGS:
        found = [getattr(module, name, None) for module in (exceptions, train_internal, train_api)]
        assert any(isinstance(cls, type) and issubclass(cls, Exception) for cls in found), name
    for stage, settings in MEMORY.items():
        fields = VERBS[stage].settings.model_fields
        named = [word for word in settings.replace(",", "").split() if "_" in word or word in ("workers", "actors")]
        assert set(named) <= set(fields), stage


def test_other_errors_keep_their_message_in_one_short_line() -> None:
    assert explained(ZeroDivisionError("x")).args == ("x",)
    line = in_one_line(ValueError("a\nb" * LONGEST + "the reason"))
    assert len(line) <= LONGEST
    assert line.endswith("the reason")
    assert in_one_line(task_error(ValueError("bad"))) == "ValueError: bad"


def test_a_lost_training_worker_is_one_line_and_its_fault_another_kind() -> None:
    settings = TrainSettings(records="r", model="m", output="o", max_failures=0)
    lost = _explained(WorkerGroupError(REPORT, {0: out_of_memory, 1: died()}), settings)
    assert isinstance(lost, ClusterError)
    assert str(lost).startswith(
        "worker 0 of 2 failed, after max_failures=0 earlier failures: OutOfMemoryError: node 10."
    )
    assert "neighbour" not in str(lost)
    assert "\n" not in str(lost)
    assert type(_explained(WorkerGroupError("", {0: KeyError("x")}), settings)) is RuntimeError


def test_an_error_that_nothing_foresaw_has_its_traceback_and_one_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**arguments: object) -> None:
        raise ZeroDivisionError("http://user:secretpw@host")

    monkeypatch.setattr("infembed_ray.cli.runs.print_runs", fail)
    assert main(["runs", "x"]) == 1
    said = capsys.readouterr().err
    assert "Traceback (most recent call last)" in said
    assert said.splitlines()[-1].startswith("infembed runs: unexpected ZeroDivisionError: http://***@host; ")
    monkeypatch.setenv("INFEMBED_LOG_FORMAT", "json")
    assert main(["runs", "x"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "Traceback" in json.loads(line)["exc_text"]
    assert "secretpw" not in said + line
