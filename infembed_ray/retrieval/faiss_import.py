"""Import FAISS, or explain in one line how to install it.

The distributions faiss-cpu and faiss-gpu both provide the module `faiss`, and pip does not know that they conflict: installed
together they overwrite each other. So neither is a dependency of this package; the extras `cpu` and `gpu` name one each.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from infembed_ray.errors import InputError

DISTRIBUTIONS = ("faiss-cpu", "faiss-gpu")
INSTALL = "pip install 'infembed-ray[cpu]', or on a machine with NVIDIA GPUs pip install 'infembed-ray[gpu]'"
REINSTALL = f"pip uninstall -y {' '.join(DISTRIBUTIONS)}, then {INSTALL}"


def load() -> ModuleType:
    """Import FAISS; InputError if FAISS is not installed, two distributions of it are, or files are missing."""
    installed = [name for name in DISTRIBUTIONS if _is_installed(name)]
    if len(installed) > 1:
        raise InputError(f"{' and '.join(installed)} are both installed and overwrite each other; {REINSTALL}")
    try:
        import faiss
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "faiss" and not installed:
            raise InputError(f"FAISS is not installed; {INSTALL}") from error
        raise InputError(f"FAISS cannot be imported ({' '.join(str(error).split())}); {REINSTALL}") from error
    if getattr(faiss, "__file__", None) is None:  # an empty directory is a namespace package
        raise InputError(f"FAISS is broken: only a directory without its files is left of it; {REINSTALL}")
    return faiss


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


faiss = load()
