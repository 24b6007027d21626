"""Model card (README.md) of a checkpoint: training data, settings, use and licence; no path of the training machine."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined

from infembed_ray.modeling.checkpoint import Description
from infembed_ray.modeling.tokenizer import render
from infembed_ray.storage.object_store import is_uri

FILE = "README.md"
TAG = "infembed_ray"
"""Tag of our cards."""
_VALIDATION = "validation_"
"""Prefix of the metrics of an evaluation on held-out records."""
_MS_MARCO = ("msmarco", "ms_marco", "ms-marco")


@dataclass(frozen=True)
class TrainingData:
    """Training data of a checkpoint: last part of the path, fingerprint of the contents, and source of each record."""

    name: str
    fingerprint: str
    sources: Sequence[str]


def write(
    path: Path,
    description: Description,
    base_model: str,
    data: TrainingData,
    settings: Mapping[str, Any],
    metrics: Mapping[str, Any],
) -> None:
    """Write the card of a checkpoint.

    Args:
        path, description: directory of the checkpoint, and what it says of itself.
        base_model: directory, URI or hub name of the backbone.
        data: training data.
        settings: settings that affect the result, with `objective`.
        metrics: metrics of the last step.
    """
    results = {name: value for name, value in metrics.items() if name.startswith(_VALIDATION) and value is not None}
    on_hub = not (Path(base_model).is_absolute() or is_uri(base_model))
    base = base_model if on_hub else Path(base_model).name
    sources = Counter(data.sources)
    non_commercial = any(name in source.lower() for source in sources for name in _MS_MARCO)
    kinds = ["cross-encoder", "text-ranking"] if settings.get("head") == "score" else ["feature-extraction"]
    front = ModelCardData(
        library_name="sentence-transformers",
        pipeline_tag=kinds[-1],
        tags=["sentence-transformers", *kinds, "instruction-following", TAG],
        base_model=base if on_hub else None,
        license="other" if non_commercial else None,
        license_name="ms-marco-non-commercial" if non_commercial else None,
        model_name=f"{Path(base).name}, instruction-following" if results else None,
        eval_results=[
            EvalResult("retrieval", "held-out", "held-out records", name.removeprefix(_VALIDATION), value)
            for name, value in results.items()
        ]
        or None,
    )
    loader = PackageLoader("infembed_ray.modeling", ".")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    card = environment.get_template("model_card.md").render(
        front_matter=front.to_yaml(),
        base=base,
        description=description,
        text=repr(render(description.template or "instruction_first", "{instruction}", "{query}")),
        data={
            "file": data.name,
            "fingerprint": data.fingerprint,
            "records": len(data.sources),
            **{f"records from {source}": count for source, count in sorted(sources.items())},
        },
        results={name.removeprefix(_VALIDATION): value for name, value in results.items()},
        metrics={name: value for name, value in metrics.items() if name not in results},
        settings=settings,
        non_commercial=non_commercial,
    )
    (path / FILE).write_text(card.lstrip(), encoding="utf-8")
