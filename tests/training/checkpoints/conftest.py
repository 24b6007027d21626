"""The model of all runs."""

import pytest

from tests.modeling import backbones


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return backbones.write("modernbert", tmp_path_factory.mktemp("tiny"))
