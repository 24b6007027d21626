"""The bundled sample: 144 seeds on 16 topics, and a journal with every completion that the pipeline asks for.

`authored.jsonl` has one line per seed, with all its completions; `scripts/record_sample.py` writes the seeds and the journal from it.
Some completions are flawed on purpose, so that the filters reject them.
"""

from pathlib import Path

from infembed_ray.config.llm import ChatModel

AUTHORED = Path(__file__).with_name("authored.jsonl")
SEEDS = Path(__file__).with_name("seeds.jsonl")
JOURNAL = Path(__file__).with_name("journal.jsonl")

MODEL = ChatModel(model="bundled-sample")
"""Generator and judge of the sample: the completions were written for it, not by an LLM."""
