"""The bundled sample: 144 seeds on 16 topics, and a finished journal of every completion the pipeline asks for.

It was written for this project (`authored.jsonl`, a seed and all its completions a line); `record.py` makes the seeds
and the journal from it. Some completions are flawed on purpose, so that the filters have something to catch.
"""

from pathlib import Path

from infembed_ray.config import ChatModel

AUTHORED = Path(__file__).with_name("authored.jsonl")
SEEDS = Path(__file__).with_name("seeds.jsonl")
JOURNAL = Path(__file__).with_name("journal.jsonl")

MODEL = ChatModel(model="bundled-sample")
"""The honest name of the model that wrote the sample's completions, as generator and as judge."""
