"""Writing the files of a training checkpoint in the background: from a snapshot, hashed while they are written.

Training continues as soon as the state is copied to host memory; a thread then writes the copy. A worker that raised on a
full disk would leave the others waiting, so it completes the save, and the workers then agree on the outcome.
"""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from infembed_ray.errors import in_one_line
from infembed_ray.storage import durable
from infembed_ray.training.checkpoints.checkpoint import Checksum
from infembed_ray.training.deepspeed_compat import CheckpointEngine


@dataclass
class Written:
    """What one worker wrote of a checkpoint: file name -> size and checksum; and why it could not write or upload all of them."""

    files: dict[str, Checksum] = field(default_factory=dict)
    error: str | None = None
    not_uploaded: str | None = None


class CheckpointFiles(CheckpointEngine):
    """DeepSpeed's writer of checkpoint files: `save` takes a snapshot, and `write` writes all snapshots in a thread."""

    def __init__(self) -> None:
        super().__init__()
        self._snapshots: dict[str, HostCopy] = {}
        self._error: str | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        try:
            super().makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            self._error = _reason(error, path)

    def save(self, state_dict: Mapping[str, Any], path: str) -> None:
        """Take a snapshot of a file's contents; what the last `write` returned must be done."""
        file = Path(path)
        self._snapshots.setdefault(file.name, HostCopy()).take(file, state_dict)

    def write(self) -> Future[Written]:
        """Write the snapshots in the background; a failure is part of the result and is not raised."""
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # the copies from the GPU
        error, self._error = self._error, None
        return self._thread.submit(_write, list(self._snapshots.values()), Written(error=error))


class HostCopy:
    """A copy in host memory of what a file will hold; the tensors of the next copy reuse its memory."""

    def __init__(self) -> None:
        self.path = Path()
        self.state: Any = None
        self._buffers: list[Tensor] = []

    def take(self, path: Path, state: Any) -> None:
        """Copy a state. Copies from a GPU are complete once its stream is synchronized."""
        unused, self._buffers = self._buffers[::-1], []
        self.path, self.state = path, self._copied(state, unused)

    def _copied(self, value: Any, unused: list[Tensor]) -> Any:
        if isinstance(value, Tensor):
            buffer = unused.pop() if unused else None
            if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._buffers.append(buffer)
            return buffer.copy_(value.detach(), non_blocking=True)
        if isinstance(value, dict):
            copied = copy.copy(value)  # an OrderedDict or defaultdict stays one
            copied.update((key, self._copied(item, unused)) for key, item in value.items())
            return copied
        if isinstance(value, list):
            return [self._copied(item, unused) for item in value]
        return copy.deepcopy(value)


def _write(snapshots: Sequence[HostCopy], written: Written) -> Written:
    """Write and sync the snapshots, until one fails."""
    for snapshot in snapshots:
        if written.error is not None:
            break
        path = snapshot.path
        try:
            with path.open("wb") as stream:
                hashed = _Hashed(stream)
                try:
                    torch.save(snapshot.state, cast(IO[bytes], hashed))
                except RuntimeError:  # torch replaces an error of the stream by one of its own
                    if hashed.error is None:
                        raise
                    raise hashed.error from None
                durable.sync(stream)  # some file systems notice only here that they are full
        except Exception as error:  # whatever it is, the other workers must hear of it
            written.error = _reason(error, path)
        else:
            written.files[path.name] = Checksum(hashed.size, hashed.digest.hexdigest())
    return written


def _reason(error: Exception, path: Path | str) -> str:
    said = error.strerror if isinstance(error, OSError) else None
    return f"{said or in_one_line(error)} at {path}"


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
