"""Writing the files of a training checkpoint: hashed while written, and a disk error is recorded instead of raised.

DeepSpeed synchronizes the workers during a save. A worker that raised on a full disk would leave the others waiting.
Here it completes the save, and the workers then agree on the outcome.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch

from infembed_ray import durable
from infembed_ray.training.checkpoints.checkpoint import Checksum
from infembed_ray.training.deepspeed_compat import CheckpointEngine


@dataclass
class Written:
    """What one worker wrote of a checkpoint.

    Attributes:
        files: File name -> size and checksum.
        error: Why it could not write all of them.
    """

    files: dict[str, Checksum] = field(default_factory=dict)
    error: str | None = None


class CheckpointFiles(CheckpointEngine):
    """DeepSpeed's writer of checkpoint files. `written` holds the outcome since the last `begin`."""

    def __init__(self) -> None:
        super().__init__()
        self.written = Written()

    def begin(self) -> None:
        """Start another checkpoint."""
        self.written = Written()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        try:
            super().makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            self._failed(path, error)

    def save(self, state_dict: Mapping[str, Any], path: str) -> None:
        if self.written.error is not None:
            return
        try:
            with open(path, "wb") as stream:
                hashed = _Hashed(stream)
                try:
                    torch.save(state_dict, cast(IO[bytes], hashed))
                except RuntimeError:  # torch replaces an error of the stream by one of its own
                    if hashed.error is None:
                        raise
                    raise hashed.error from None
                durable.sync(stream)  # some file systems notice only here that they are full
        except OSError as error:
            self._failed(path, error)
        else:
            self.written.files[Path(path).name] = Checksum(hashed.size, hashed.digest.hexdigest())

    def _failed(self, path: str, error: OSError) -> None:
        self.written.error = self.written.error or f"{error.strerror} at {path}"


class _Hashed:
    """A stream that hashes what is written to it and remembers an error."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self._stream.write(data)
        except OSError as error:
            self.error = error
            raise
        self.digest.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self._stream.flush()
