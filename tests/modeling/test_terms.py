"""Importing BM25 starts no other library."""

import subprocess
import sys

import pytest

PROBE = """
import sys
{before}
from infembed_ray.modeling import terms
print("started" if getattr(sys.modules.get("jax"), "made", None) == "imported" else "not started")
import jax
print(jax.made)
"""


@pytest.mark.integration
@pytest.mark.parametrize(("before", "line"), [("", "not started"), ("import jax", "started")])
def test_bm25_leaves_an_installed_jax_alone(tmp_path, before, line):
    """JAX takes three quarters of a GPU when it starts; a caller who imported it before keeps it."""
    package = tmp_path / "jax"
    package.mkdir()
    (package / "__init__.py").write_text("made = 'imported'\n")
    (package / "lax.py").write_text("def top_k(*of): ...\n")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROBE.format(before=before)}"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[:2] == [line, "imported"]
