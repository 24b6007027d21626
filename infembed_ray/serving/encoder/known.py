"""What a start needs of an encoder besides its weights: fingerprint and tokenizer.

The user's cache keeps them under the bytes of the model's files. A later start reads them there, without torch and
transformers, which take four seconds to import.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from infembed_ray.modeling.checkpoint import files_digest
from infembed_ray.modeling.template import TextFormat
from infembed_ray.modeling.tokenizer import TextTokenizer
from infembed_ray.serving.encoder.runtime import VERSIONS, cache_directory
from infembed_ray.storage import durable

if TYPE_CHECKING:
    from infembed_ray.modeling.encoder import InstructionEncoder


@dataclass(frozen=True)
class KnownEncoder:
    """An encoder whose weights are not loaded.

    Attributes:
        fingerprint: as `InstructionEncoder.fingerprint`.
        backbones: 2 for separate encoders of queries and passages.
        vocabulary: number of tokens.
        texts: its tokenizer.
    """

    fingerprint: str
    backbones: int
    vocabulary: int
    texts: TextTokenizer

    @classmethod
    def of(cls, encoder: InstructionEncoder) -> KnownEncoder:
        """Describe a loaded encoder."""
        return cls(encoder.fingerprint(), len(encoder.backbones), len(encoder.tokenizer), encoder.texts)

    @classmethod
    def read(cls, file: Path) -> KnownEncoder:
        """Read what `write` wrote; any exception if the file is missing or damaged."""
        values = json.loads(file.read_bytes())
        texts = values.pop("texts")
        backend = Tokenizer.from_str(texts.pop("backend"))
        backend.encode_special_tokens = texts.pop("encode_special_tokens")
        return cls(**values, texts=TextTokenizer(backend, TextFormat(**texts.pop("text")), **texts))

    def write(self, file: Path) -> None:
        """Write a file for `read`; any exception if it cannot be written."""
        backend = self.texts.backend
        texts = {name: value for name, value in vars(self.texts).items() if name != "backend"}
        texts |= {"text": asdict(self.texts.text), "backend": backend.to_str()}
        texts["encode_special_tokens"] = backend.encode_special_tokens
        file.parent.mkdir(parents=True, exist_ok=True)
        with durable.replacing(file, shared=True) as stream:
            stream.write(json.dumps({**vars(self), "texts": texts}).encode())


def describe(model: str, dimensions: int | None = None) -> KnownEncoder:
    """Describe an encoder: from the user's cache, or without its weights from the model, which imports torch.

    Args:
        model: directory or hub name.
        dimensions: as `InstructionEncoder.from_pretrained` takes it.

    Raises:
        InputError: there is no such model.
    """
    digest = files_digest(model)
    key = hashlib.sha256(f"{digest} {dimensions} {VERSIONS}".encode()).hexdigest()[:16]
    file = cache_directory() / "encoders" / f"{key}.json"
    if digest is not None:  # the files of a hub name may change at any time
        with suppress(Exception):
            return KnownEncoder.read(file)
    from infembed_ray.modeling.checkpoint import require_loadable
    from infembed_ray.modeling.encoder import InstructionEncoder

    require_loadable(model, f"model={model}")
    known = KnownEncoder.of(InstructionEncoder.from_pretrained(model, dimensions=dimensions, device="meta"))
    if digest is not None:
        with suppress(
            Exception
        ):  # without a cache, or with a tokenizer partly in Python, the next start loads it again
            known.write(file)
    return known
