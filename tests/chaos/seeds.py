"""Made-up seeds, all different."""

import json
import random
from pathlib import Path

WORDS = [
    f"{a}{b}{c}" for a in ("bra", "tol", "mer", "quin") for b in ("da", "li", "so") for c in ("ndor", "vex", "pila")
]


def write_seeds(file: Path, number: int) -> Path:
    """Write `number` seeds with passages of 40 words; return the file."""
    rng = random.Random(0)
    with file.open("w", encoding="utf-8") as stream:
        for index in range(number):
            passage = f"{index}: {' '.join(rng.choices(WORDS, k=40))}"
            stream.write(json.dumps({"id": str(index), "query": f"about {index}", "passage": passage}) + "\n")
    return file
