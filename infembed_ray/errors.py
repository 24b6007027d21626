"""Errors that the command line prints as one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import Self

from infembed_ray.ray_failures import cause_of, meaning
from infembed_ray.redaction import holds_credentials, masked

LONGEST = 1000
"""Most characters of a text that `in_one_line` takes from an error."""


@dataclass(frozen=True)
class Fault:
    """A user's mistake. As text it is one line: `setting=value: fault; remedy`, in which credentials are masked.

    Attributes:
        setting: dotted name of the setting, or what else has the fault; "" if the fault is a whole sentence.
        value: of the setting; None leaves it out of the text.
        fault: what is wrong.
        remedy: what to do; "" if the fault tells it.
    """

    setting: str
    value: Any
    fault: str
    remedy: str = ""

    def __post_init__(self) -> None:
        for name in ("setting", "value", "fault", "remedy"):
            if holds_credentials(text := str(getattr(self, name))):
                object.__setattr__(self, name, masked(text))

    def __str__(self) -> str:
        name = self.setting if self.value is None else f"{self.setting}={self.value}"
        return f"{f'{name}: ' if name else ''}{self.fault}{f'; {self.remedy}' if self.remedy else ''}"


class _Lines(Exception):
    """An error of one or more lines, its `args`, in which credentials are masked."""

    def __init__(self, *lines: object) -> None:
        super().__init__(*(masked(line) if isinstance(line, str) else line for line in lines))

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


class InputError(_Lines, ValueError):
    """A setting, a file or an environment is invalid. Every mistake of a user raises this error.

    It holds one or several faults that were found together; a text stands for a fault that names no setting. The command
    line prints each on a line and exits with status 2.

    >>> print(InputError.of("k", 0, "must be positive", "give 1 or more"))
    k=0: must be positive; give 1 or more
    """

    def __init__(self, *faults: Fault | str) -> None:
        super().__init__(*faults)

    @classmethod
    def of(cls, setting: str, value: Any, fault: str, remedy: str = "") -> Self:
        """Return the error with one fault; the arguments are its fields."""
        return cls(Fault(setting, value, fault, remedy))

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults with their fields."""
        return tuple(fault if isinstance(fault, Fault) else Fault("", None, str(fault)) for fault in self.args)

    def renamed(self, old: str, new: str) -> InputError:
        """Return the error with another name of a setting. A fault that names no setting gets the new name."""
        return InputError(*(_renamed(fault, old, new) for fault in self.faults))

    def within(self, prefix: str) -> InputError:
        """Return the error with a prefix before the names of the settings, for example `train.` or `row 2: `."""
        names = (f"{prefix}{fault.setting}" if fault.setting else prefix.rstrip(".: ") for fault in self.faults)
        return InputError(*(replace(fault, setting=name) for fault, name in zip(self.faults, names, strict=True)))


def _renamed(fault: Fault, old: str, new: str) -> Fault:
    if fault.setting in ("", old):
        return replace(fault, setting=new)
    if fault.setting.startswith(f"{old}."):
        return replace(fault, setting=f"{new}{fault.setting.removeprefix(old)}")
    return fault


def check_all(*checks: Callable[[], Any]) -> list[Any]:
    """Call all checks and return their results, so that a user sees all mistakes at once.

    Raises:
        InputError: some checks failed; it has the faults of all of them.
    """
    results: list[Any] = []
    faults: dict[str, Fault | str] = {}
    for check in checks:
        try:
            results.append(check())
        except InputError as error:
            faults |= {str(fault): fault for fault in error.args}
    if faults:
        raise InputError(*faults.values())
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
    _, marker, message = last.partition(f"{InputError.__qualname__}: ")
    return InputError(message) if marker else None


def in_one_line(error: BaseException, stage: str = "") -> str:
    """Format the type of an error and its message, or what it means if it is Ray's, as one line without credentials."""
    cause = cause_of(error)
    line = " ".join(masked(f"{type(cause).__name__}: {meaning(cause, stage) or cause}").split())
    # The reason is often at the end.
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 300]} ... {line[-295:]}"
