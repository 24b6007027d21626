"""Import FAISS, or explain in one line how to install it.

The distributions faiss-cpu and faiss-gpu both provide the module `faiss` and overwrite each other, so neither is a dependency of
this package; the extras `cpu` and `gpu` name one each.
"""

from importlib.metadata import distributions
from types import ModuleType

from infembed_ray.errors import InputError

DISTRIBUTIONS = ("faiss-cpu", "faiss-gpu")
INSTALL = "pip install 'faiss-cpu<2', or on a machine with NVIDIA GPUs 'faiss-gpu<2'"


def load() -> ModuleType:
    """Import FAISS; InputError if FAISS is not installed, two distributions of it are, or files are missing."""
    installed = [name for name in DISTRIBUTIONS if any(distributions(name=name))]
    try:
        import faiss

        fault = "" if getattr(faiss, "__file__", None) else "only a directory is left of it"  # a namespace package
    except ImportError as error:
        fault = " ".join(str(error).split())
    if len(installed) > 1:
        fault = f"{' and '.join(installed)} are both installed and overwrite each other"
    if fault:
        remove = f"pip uninstall -y {' '.join(DISTRIBUTIONS)}, then " if installed else ""
        raise InputError(f"FAISS cannot be imported: {fault}; {remove}{INSTALL}")
    return faiss


faiss = load()
