"""Files of a run whose output is in an object store, so that its nodes need no directory in common.

Each node works in a directory of its own. Worker 0 uploads the run's own files (logs, and in the end the model) while
they grow, and the driver downloads the logs to show progress. Checkpoints are uploaded by `checkpoints.manager`.
"""

import contextlib
import hashlib
import platform
import threading
from collections.abc import Collection
from pathlib import Path

from pyarrow import ArrowException

from infembed_ray.config.training import TrainSettings
from infembed_ray.modeling.checkpoint import is_weights
from infembed_ray.progress import in_thread
from infembed_ray.storage.object_store import Folder, is_uri, scratch
from infembed_ray.storage.steps import STATES, output_files
from infembed_ray.training.collectives import from_all, world

RAY_TRAIN_LOGS = "ray_train"
UPLOAD_S = 10.0
"""Seconds between two uploads of the logs."""
_BYTES_PER_S = 1e6
"""Large logs are uploaded less often, so that they take at most this much."""


def node_directory(settings: TrainSettings, shared: Path) -> Path:
    """Return this worker's directory of the run: `shared`, or if the output is in an object store one of its node."""
    if not is_uri(settings.output):
        return shared
    run = hashlib.sha256(settings.output.encode()).hexdigest()[:16]
    directory = scratch() / "training" / f"{run}-{platform.node()}"  # a scratch directory may be a shared one
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def share_of(directory: Path) -> tuple[int, int]:
    """Return (rank, number) of this worker among those that work in the same directory; every worker must call it.

    The directory itself tells, not the address of the node, which several containers may have.
    """
    if world()[1] == 1:
        return 0, 1
    directory.mkdir(parents=True, exist_ok=True)
    state = directory.stat()
    seen = from_all((platform.node(), state.st_dev, state.st_ino))
    together = [rank for rank, other in enumerate(seen) if other == seen[world()[0]]]
    return together.index(world()[0]), len(together)


class RunFiles:
    """Uploads a run's own files: all that changed, but no checkpoints.

    Args:
        directory: Directory of the run on this node.
        remote: Output of the run in the object store.
    """

    def __init__(self, directory: Path, remote: Folder) -> None:
        self._directory = directory
        self._remote = remote
        self._uploaded: dict[Path, tuple[int, int]] = {}
        self._uploading = threading.Lock()
        self._following = contextlib.ExitStack()

    def follow(self) -> None:
        """Upload the files while they grow, in a thread, until `stop`."""
        self._following.enter_context(in_thread(self._follow, "uploads"))

    def upload(self) -> None:
        """Upload the files that have changed."""
        with self._uploading:
            for file in output_files(self._directory):
                state = (file.stat().st_size, file.stat().st_mtime_ns)
                if self._uploaded.get(file) != state:
                    self._remote.upload(file, file.relative_to(self._directory).as_posix())
                    self._uploaded[file] = state

    def stop(self) -> None:
        """Stop following the files, before large ones are written; `upload` uploads those."""
        self._following.close()

    def _follow(self, ended: threading.Event) -> None:
        while not ended.wait(UPLOAD_S + sum(size for size, _ in self._uploaded.values()) / _BYTES_PER_S):
            with contextlib.suppress(OSError, ArrowException):  # the next upload tries again
                self.upload()


def fetch(remote: Folder | None, directory: Path, names: Collection[str] | None = None) -> None:
    """Download the run's own files, or those of these names, without weights; what the store does not return is left out.

    Without an object store there is nothing to download.
    """
    if remote is None:
        return
    with contextlib.suppress(OSError, ArrowException):
        if names is None:
            own = (name for name in remote.entries() if name.split("/")[0] not in (STATES, RAY_TRAIN_LOGS))
            names = [name for name in own if not is_weights(name)]
    for name in names or ():
        with contextlib.suppress(OSError, ArrowException):
            remote.download(name, directory / name)
