"""Errors that the command line prints as one line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infembed_ray.redaction import masked


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


class StartError(_Lines, RuntimeError):
    """Ray or Ray Serve did not start in time. The command line prints the message and exits with status 1."""


def in_one_line(error: BaseException) -> str:
    """Format the type and the message of an error as one line, in which credentials are masked."""
    return " ".join(masked(f"{type(error).__name__}: {error}").split())
