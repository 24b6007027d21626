"""What the failures of Ray mean: a sentence with the remedy for each, instead of reports of a hundred lines.

The classes are known by their names, so a command that does not use Ray does not import it.
"""

import re

from infembed_ray.redaction import masked

MEMORY = {
    "evaluate": "lower actors or batch_tokens",
    "index": "lower actors or batch_tokens, or raise shards",
    "mine": "lower workers",
    "serve": "lower encoder_replicas or shard_replicas",
    "sweep": "lower concurrent",
    "synthesize": "lower actors or in_flight",
    "train": "lower workers or records_per_step, or set grad_cache_tokens",
}
"""Stage -> settings that decide how much memory it takes."""
DIED = "a process of the run ended unexpectedly, often for lack of memory"
REMOVED = "the resources that Ray had reserved for the run were taken away"
UNPLACED = "no node has the resources, or the node that had to be used is lost"
RESOURCES = "compare `ray status` with what the run asks for"
RESUME = "the same command resumes"
MEANINGS = {
    "OutOfMemoryError": ("memory ran out", ""),
    "ActorDiedError": (DIED, ""),
    "ActorUnavailableError": ("a process of the run does not answer", RESUME),
    "WorkerCrashedError": (DIED, ""),
    "OwnerDiedError": (DIED, ""),
    "WorkerHealthCheckFailedError": (DIED, ""),
    "WorkerHealthCheckTimeoutError": ("a training worker does not answer", RESUME),
    "NodeDiedError": ("a node of the cluster was lost", RESUME),
    "LocalRayletDiedError": ("Ray's process on this machine ended, often for lack of memory", ""),
    "ObjectLostError": ("data of the run was lost with a node", RESUME),
    "ObjectStoreFullError": ("Ray's object store is full", "start Ray with a larger --object-store-memory"),
    "OutOfDiskError": ("the disk of a node is full", "free space, or set RAY_TMPDIR to another disk"),
    "RuntimeEnvSetupError": (
        "Ray could not prepare the environment of a process",
        "check the working directory and runtime_env of the job",
    ),
    "ActorUnschedulableError": (UNPLACED, RESOURCES),
    "TaskUnschedulableError": (UNPLACED, RESOURCES),
    "ActorPlacementGroupRemoved": (REMOVED, RESUME),
    "TaskPlacementGroupRemoved": (REMOVED, RESUME),
    "WorkerGroupStartupTimeoutError": (UNPLACED, RESOURCES),
    "WorkerGroupStartupFailedError": ("the training workers did not start", RESUME),
    "InsufficientClusterResourcesError": (UNPLACED, RESOURCES),
    "PreemptionError": ("the cloud took a node away", RESUME),
    "CollectiveTimeoutError": ("a worker did not answer the others in time", "read the log of the silent worker"),
    "AuthenticationError": ("the cluster refuses this process's token", "set RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH"),
    "RaySystemError": ("Ray failed", RESUME),
}
"""Class of Ray -> what happened, and what to do; where that is empty, less memory helps."""
DETAIL = 200
"""Most characters of Ray's own words in a sentence."""

_UNTYPED = ("Deploying application ", "CUDA out of memory")
"""Beginnings of errors without a class of their own: of Serve, and of torch."""
_OUT_OF_MEMORY = re.compile(r"running low on memory|CUDA out of memory")
_USAGE = re.compile(r"\(IP: ([^,]+),[^)]*\) was ([\d.]+)GB used / ([\d.]+)GB limit")
_WRAPPED = ("cause", "_base_exc", "controller_failure", "health_check_failure")
"""Attributes that hold what a wrapper of Ray wraps: of a task, a training worker, its controller and its health check."""


def cause_of(error: BaseException) -> BaseException:
    """Return what a task, a replica or a training worker raised, without Ray's wrappers."""
    while _is_rays(error):
        failures = getattr(error, "worker_failures", None) or {}
        inner = next(
            filter(None, (getattr(error, name, None) for name in _WRAPPED)), next(iter(failures.values()), None)
        )
        if not isinstance(inner, BaseException):
            break
        error = inner
    return error


def meaning(error: BaseException, stage: str = "") -> str | None:
    """Return what a failure of Ray means and what to do, in one line; None if it is none.

    Args:
        error: without Ray's wrappers.
        stage: verb whose settings the remedy names.
    """
    names = [cls.__name__ for cls in type(error).__mro__] if _is_rays(error) else []
    happened, remedy = next((MEANINGS[name] for name in names if name in MEANINGS), ("", ""))
    said = str(error)
    if (happened or said.startswith(_UNTYPED)) and (report := memory_report(said, stage)):
        return report
    if said.startswith(_UNTYPED[:1]):
        happened = "Ray Serve did not start an application"
    if not happened:
        return None
    return f"{happened} ({_detail(error)}); {remedy or f'{_less_memory(stage)}; {RESUME}'}"


def _is_rays(error: BaseException) -> bool:
    return any(cls.__module__.split(".")[0] == "ray" for cls in type(error).__mro__)


def memory_report(said: str, stage: str = "") -> str | None:
    """Return what Ray's report of exhausted memory means, without its tables of processes; None if it is none."""
    if not _OUT_OF_MEMORY.search(said):
        return None
    happened = "memory ran out"
    if usage := _USAGE.search(said):
        node, used, limit = usage.groups()
        happened = f"node {node} ran out of memory ({used} of {limit} GB used), and Ray killed processes of the run"
    return f"{happened}; {_less_memory(stage)}"


def _less_memory(stage: str) -> str:
    return f"{MEMORY.get(stage, 'lower the number of processes or the size of batches')}, or use nodes with more memory"


def _detail(error: BaseException) -> str:
    """Return Ray's last words: those of an actor that failed to start are a traceback, whose last line is the reason."""
    lines = [line for line in masked(str(error)).splitlines() if line.strip()]
    chosen = lines[-1:] if getattr(error, "actor_init_failed", False) else lines
    return " ".join(" ".join(chosen).split())[:DETAIL] or type(error).__name__
