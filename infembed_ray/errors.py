"""Errors that the command line prints as one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A user's mistake. As text it is one line: `setting=value: fault; remedy`.

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

    def __str__(self) -> str:
        name = self.setting if self.value is None else f"{self.setting}={self.value}"
        return f"{f'{name}: ' if name else ''}{self.fault}{f'; {self.remedy}' if self.remedy else ''}"


class InputError(ValueError):
    """A setting, a file or an environment is invalid. Every mistake of a user raises this error.

    It holds one or several faults that were found together; a text stands for a fault that names no setting. The command
    line prints each on a line and exits with status 2.
    """

    def __init__(self, *faults: Fault | str) -> None:
        super().__init__(*faults)

    @classmethod
    def of(cls, setting: str, value: Any, fault: str, remedy: str = "") -> InputError:
        """Return the error with one fault; the arguments are its fields."""
        return cls(Fault(setting, value, fault, remedy))

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))

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


class GateError(RuntimeError):
    """A model failed gates, one line each in the `args`. The command line prints them and exits with status 1."""


class StartError(RuntimeError):
    """Ray or Ray Serve did not start in time. The command line prints the message and exits with status 1."""


def in_one_line(error: BaseException) -> str:
    """Format the type and the message of an error as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
