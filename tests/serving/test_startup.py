from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from infembed_ray.serving import deployments, startup

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")


@pytest.fixture(autouse=True)
def no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the replicas that other tests run on this machine at the same time."""
    monkeypatch.setattr(startup, "REPLICA", f"test {os.getpid()}")


@pytest.fixture
def replica(no_replica: None) -> Iterator[None]:
    """A process with the title of a replica that serves."""
    title = f"{startup.REPLICA}-encoder:encoder"
    with subprocess.Popen([title, "60"], executable="/bin/sleep") as process:
        yield
        process.kill()


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


@linux
def test_beside_a_replica_only_the_function_runs_at_the_lowest_priority(replica: None) -> None:
    before = niceness()
    assert startup.in_background(niceness) == 19
    assert niceness() == before


@linux
def test_without_a_replica_the_function_keeps_its_priority() -> None:
    assert startup.in_background(niceness) == niceness()


def test_what_the_function_raises_is_raised(replica: None) -> None:
    with pytest.raises(ZeroDivisionError):
        startup.in_background(lambda: 1 // 0)


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["MODULES", "ENCODER_MODULES"])
def test_a_replica_imports_neither_torch_nor_pandas(kind: str) -> None:
    code = (
        f"import sys; from infembed_ray.serving import startup; startup._import(startup.{kind});"
        f"print(set(startup.{kind}) <= set(sys.modules), {{'torch', 'transformers', 'pandas'}} & set(sys.modules));"
        "import pandas; print(pandas.DataFrame.__name__)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["True set()", "DataFrame"]


@pytest.mark.ray
def test_a_worker_imports_the_modules_before_it_becomes_a_replica(ray_cluster: None) -> None:
    import ray

    def imported() -> bool:
        return set(startup.MODULES) <= set(sys.modules)

    environment = deployments.environment(startup.import_modules, 1.0)
    assert ray.get(ray.remote(imported).options(runtime_env={"env_vars": environment}).remote())
    assert not ray.get(ray.remote(imported).remote())
