"""README.md of a checkpoint: what it was trained on and how, how it is used, and under which licence.

It names no path of the machine that trained it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from infembed_ray.modeling.checkpoint import Description
from infembed_ray.modeling.template import render

FILE = "README.md"
_MS_MARCO = ("msmarco", "ms_marco", "ms-marco")


@dataclass(frozen=True)
class TrainingData:
    """What a checkpoint was trained on.

    Attributes:
        path: of the records; only its last part is told.
        fingerprint: of their contents.
        sources: of each record.
    """

    path: Path
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
        path: the checkpoint's directory.
        description: of it.
        base_model: the backbone's directory or hub name.
        data: it was trained on.
        settings: that decided the result, with `objective` among them.
        metrics: of the last step.
    """
    on_hub = not Path(base_model).is_absolute()
    base = base_model if on_hub else Path(base_model).name
    sources = Counter(data.sources)
    non_commercial = any(name in source.lower() for source in sources for name in _MS_MARCO)
    front = {
        "library_name": "sentence-transformers",
        "pipeline_tag": "feature-extraction",
        "tags": ["sentence-transformers", "feature-extraction", "instruction-following", "infembed_ray"],
        **({"base_model": base} if on_hub else {}),
        **({"license": "other", "license_name": "ms-marco-non-commercial"} if non_commercial else {}),
    }
    licence = "MS MARCO and what derives from it are for non-commercial research only"
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        "# An instruction-following retrieval encoder",
        f"Trained by infembed_ray from `{base}` with the objective `{settings['objective']}`.",
        "## Use",
        _usage(description),
        "## Data",
        _table(
            {
                "file": data.path.name,
                "fingerprint": data.fingerprint,
                "records": len(data.sources),
                **{f"of them from {source}": count for source, count in sorted(sources.items())},
            }
        ),
        "## Last step",
        _table(metrics),
        "## Settings",
        _table(settings),
        "## Licence",
        f"Trained on records from MS MARCO. {licence}."
        if non_commercial
        else f"That of the backbone and of the data. {licence}.",
    ]
    (path / FILE).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _usage(description: Description) -> str:
    instruction, query = "{instruction}", "{query}"
    text = render(description.template or "instruction_first", instruction, query)
    if description.interaction == "cross_attention":
        return (
            "Instruction and query are encoded apart and meet in a cross-attention, which sentence-transformers does "
            "not have:\n\n"
            "```python\n"
            "from infembed_ray.modeling.encoder import InstructionEncoder\n\n"
            'model = InstructionEncoder.from_pretrained(".")\n'
            'queries = model.encode_queries(["how is aspirin dosed"], ["For nurses, in plain words."])\n'
            'passages = model.encode_passages(["Aspirin is given by mouth."])\n'
            "print(queries @ passages.T)\n"
            "```"
        )
    short = ", normalize_embeddings=True" if description.dimensions else ""
    return (
        "An instruction and a query are one text, written as below; a query without an instruction is written as it "
        f"is. Queries are cut at {description.query_length} tokens, passages at {description.passage_length}.\n\n"
        "```python\n"
        "from sentence_transformers import SentenceTransformer\n\n"
        'model = SentenceTransformer(".")\n'
        'instruction, query = "For nurses, in plain words.", "how is aspirin dosed"\n'
        f"queries = model.encode_query([f{text!r}]{short})\n"
        f'passages = model.encode_document(["Aspirin is given by mouth."]{short})\n'
        "print(queries @ passages.T)\n"
        "```"
    )


def _table(rows: Mapping[str, Any]) -> str:
    lines = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])
