"""Errors that the command line prints as one line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infembed_ray.ray_failures import cause_of, meaning
from infembed_ray.redaction import masked

LONGEST = 1000
"""Most characters of a text that `in_one_line` takes from an error."""


class _Lines(Exception):
    """An error of one or more lines, its `args`, in which credentials are masked."""

    def __init__(self, *lines: object) -> None:
        super().__init__(*(masked(str(line)) for line in lines))

    def __str__(self) -> str:
        return "; ".join(self.args)


class InputError(_Lines, ValueError):
    """A setting, a file or an environment is invalid. Every mistake of a user raises this error.

    The message is one line that names the setting, the value and the remedy. Several mistakes that were found together
    are the error's `args`. The command line prints each on a line and exits with status 2.
    """


def check_all(*checks: Callable[[], Any]) -> list[Any]:
    """Call all checks and return their results, so that a user sees all mistakes at once.

    Raises:
        InputError: some checks failed; it has the messages of all of them.
    """
    results: list[Any] = []
    faults: list[Any] = []
    for check in checks:
        try:
            results.append(check())
        except InputError as error:
            faults += error.args
    if faults:
        raise InputError(*dict.fromkeys(faults))
    return results


class GateError(_Lines, RuntimeError):
    """A model failed gates, one line each in the `args`. The command line prints them and exits with status 1."""


class ClusterError(_Lines, RuntimeError):
    """Ray lost a process of the run, or has no place for it. The command line prints the message and exits with status 1."""


class StartError(ClusterError):
    """Ray or Ray Serve did not start in time, or its start was rolled back."""


KNOWN = (InputError, GateError, ClusterError)
"""Errors that the command line prints without a traceback."""


def explained(error: Exception, stage: str = "") -> Exception:
    """Return the known error that an error is: without Ray's wrappers, and a known failure of Ray as a ClusterError.

    Args:
        stage: verb whose settings the remedy names.

    Returns:
        An error of KNOWN; or `error` itself, which nothing foresaw.
    """
    cause = cause_of(error)
    if isinstance(cause, KNOWN):
        return cause
    said = meaning(cause, stage)
    if said is None:
        return error
    return quoted_input_error(str(cause)) or ClusterError(said)


def quoted_input_error(text: str) -> InputError | None:
    """Return the InputError with which a traceback ends: Ray passes on the errors of actors that do not start as text."""
    last = text.strip().rpartition("\n")[2]
    _, found, message = last.partition(f"{InputError.__qualname__}: ")
    return InputError(message) if found else None


def in_one_line(error: BaseException, stage: str = "") -> str:
    """Format the type of an error and its message, or what it means if it is Ray's, as one line without credentials."""
    cause = cause_of(error)
    line = " ".join(masked(f"{type(cause).__name__}: {meaning(cause, stage) or cause}").split())
    return (
        line if len(line) <= LONGEST else f"{line[: LONGEST - 300]} ... {line[-295:]}"
    )  # the reason is often at the end
