"""Errors that the command line prints as one line."""


class InputError(ValueError):
    """A setting, a file or an environment is invalid. Every mistake of a user raises this error.

    The message is one line that names the setting, the value and the remedy. The command line prints it and exits with
    status 2.
    """


class StartError(RuntimeError):
    """Ray or Ray Serve did not start in time. The command line prints the message and exits with status 1."""


def in_one_line(error: BaseException) -> str:
    """Format the type and the message of an error as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
