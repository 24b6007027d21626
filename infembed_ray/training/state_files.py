"""How the files of a state reach the disk: hashed on the way, and a disk that fails is told, not raised.

DeepSpeed waits for all workers in the middle of a save. A worker that raised there because its disk is full would leave
the others waiting for it; here it goes on to the end, and the workers then agree on what to do.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from infembed_ray.training.checksums import Sum


@dataclass
class Written:
    """What one worker wrote of a state.

    Attributes:
        files: name -> sum.
        error: why it could not write all of it.
    """

    files: dict[str, Sum] = field(default_factory=dict)
    error: str | None = None


class StateFiles(TorchCheckpointEngine):
    """Writes what DeepSpeed saves; `written` says what became of it since `begin`."""

    def __init__(self) -> None:
        super().__init__()
        self.written = Written()

    def begin(self) -> None:
        """Forget the state before."""
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
                except RuntimeError:  # torch's own complaint, of a file shorter than it should be
                    if hashed.error is None:
                        raise
                    raise hashed.error from None
                stream.flush()
                os.fsync(stream.fileno())  # some file systems find out here that they are full
        except OSError as error:
            self._failed(path, error)
        else:
            self.written.files[Path(path).name] = Sum(hashed.size, hashed.digest.hexdigest())

    def _failed(self, path: str, error: OSError) -> None:
        self.written.error = self.written.error or f"{error.strerror} at {path}"


class _Hashed:
    """A file being written, and the hash of what was."""

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
