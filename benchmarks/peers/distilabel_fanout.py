"""distilabel on the same requests; run with the Python of an environment that has it."""

from __future__ import annotations

import os
import sys

os.environ |= {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"}

from distilabel.models import OpenAILLM
from distilabel.pipeline import Pipeline
from distilabel.steps import LoadDataFromDicts
from distilabel.steps.tasks import TextGeneration

FILLER = "Someone wrote about it at length, and what they wrote is given here as it was found. " * 20

if __name__ == "__main__":
    url, requests, in_flight = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rows = [{"instruction": f"Document {number}: {FILLER}"} for number in range(requests)]
    with Pipeline(name="fanout") as pipeline:
        # distilabel has no bound on requests in flight but the batch, which it sends whole and waits for.
        loaded = LoadDataFromDicts(data=rows, batch_size=in_flight)
        llm = OpenAILLM(model="gpt-4o-mini", base_url=url, max_retries=6)
        loaded >> TextGeneration(llm=llm, input_batch_size=in_flight)
    pipeline.run(use_cache=False)
