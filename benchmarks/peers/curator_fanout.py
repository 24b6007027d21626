"""bespokelabs-curator on the same requests; run with the Python of an environment that has it."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

# The tokenizer that it wants from the network lies in one of its dependencies.
litellm = importlib.util.find_spec("litellm")
assert litellm is not None
assert litellm.origin is not None
os.environ["TIKTOKEN_CACHE_DIR"] = str(Path(litellm.origin).parent / "litellm_core_utils" / "tokenizers")
os.environ |= {"OPENAI_API_KEY": "none", "CURATOR_CACHE_DIR": tempfile.mkdtemp(), "TELEMETRY_ENABLED": "false"}
os.environ |= {"CURATOR_VIEWER": "0", "HF_HUB_OFFLINE": "1"}

from bespokelabs import curator  # noqa: E402
from datasets import Dataset  # noqa: E402

FILLER = "Someone wrote about it at length, and what they wrote is given here as it was found. " * 20


class Fanout(curator.LLM):
    def prompt(self, row: dict[str, int]) -> str:
        return f"Document {row['number']}: {FILLER}"

    def parse(self, row: dict[str, int], response: str) -> dict[str, str]:
        return {"text": response}


if __name__ == "__main__":
    url, requests, in_flight = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    wide = {"max_requests_per_minute": 10**7, "max_tokens_per_minute": 10**10, "max_concurrent_requests": in_flight}
    model = Fanout(model_name="gpt-4o-mini", backend="openai", backend_params={"base_url": url, **wide})
    model(Dataset.from_list([{"number": number} for number in range(requests)]))
