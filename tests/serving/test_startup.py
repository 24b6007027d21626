import os
import subprocess
import sys

import pytest

from infembed_ray.serving import startup

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


@linux
def test_only_the_function_runs_at_the_lowest_priority() -> None:
    before = niceness()
    assert startup.in_background(niceness) == 19
    assert niceness() == before


@pytest.mark.integration
def test_a_replica_without_a_model_imports_neither_torch_nor_pandas() -> None:
    code = (
        "import sys; from infembed_ray.serving import startup; startup.import_modules();"
        "print(set(startup.MODULES) <= set(sys.modules), {'torch', 'transformers', 'pandas'} & set(sys.modules));"
        "import pandas; print(pandas.DataFrame.__name__)"
    )
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert imported.stdout.splitlines() == ["True set()", "DataFrame"]
