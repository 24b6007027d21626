from __future__ import annotations

import pytest

from infembed_ray.errors import InputError
from infembed_ray.retrieval.build import output_errors


def test_only_file_system_errors_name_the_output() -> None:
    for error in (
        TimeoutError("a task took long"),
        ConnectionError("no cluster"),
        ConnectionRefusedError(111, "refused"),
    ):
        with pytest.raises(type(error)), output_errors("out"):
            raise error
    with pytest.raises(InputError, match=r"output=out: cannot be written \(full\)"), output_errors("out"):
        raise OSError(28, "full")
