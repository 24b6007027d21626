"""The backbones of the tests of this folder."""

import pytest

from tests.modeling import backbones


@pytest.fixture(scope="session")
def backbone_path(minilm, tmp_path_factory):
    """Family -> directory of a backbone; `minilm` is the real one."""
    made = {"minilm": minilm}

    def path(family):
        if family not in made:
            made[family] = backbones.write(family, tmp_path_factory.mktemp(family))
        return made[family]

    return path
