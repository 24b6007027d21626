"""Instruction-following retrieval at cluster scale: InF-IR synthesis, InF-Embed training and serving on Ray.

A name is imported when it is first used, so `import infembed_ray` loads neither torch nor Ray. docs/reference/python.md describes all.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infembed_ray.api import build_index, evaluate, load_records, synthesize, train
    from infembed_ray.client import AsyncClient, Client
    from infembed_ray.errors import InputError
    from infembed_ray.modeling.encoder import InstructionEncoder
    from infembed_ray.records.tables import Passage, Record, Seed
    from infembed_ray.retrieval.index import Index
    from infembed_ray.storage.steps import Published
    from infembed_ray.training.marginal_loss import MarginalLoss

__version__ = "0.3.0.dev0"

_MODULES = {
    "api": ("build_index", "evaluate", "load_records", "synthesize", "train"),
    "client": ("AsyncClient", "Client"),
    "errors": ("InputError",),
    "modeling.encoder": ("InstructionEncoder",),
    "records.tables": ("Passage", "Record", "Seed"),
    "retrieval.index": ("Index",),
    "storage.steps": ("Published",),
    "training.marginal_loss": ("MarginalLoss",),
}

__all__ = [
    "AsyncClient",
    "Client",
    "Index",
    "InputError",
    "InstructionEncoder",
    "MarginalLoss",
    "Passage",
    "Published",
    "Record",
    "Seed",
    "build_index",
    "evaluate",
    "load_records",
    "synthesize",
    "train",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"infembed_ray.{module}"), name)
    raise AttributeError(f"module 'infembed_ray' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
