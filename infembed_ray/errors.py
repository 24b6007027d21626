"""The errors that the command line prints as one line, and other errors in one line."""


class InputError(ValueError):
    """Bad input: a setting, a file or an environment that cannot work.

    Its message is one line that names the field, the value and the remedy. The command line prints it and exits
    with status 2; nothing else in the package is ever raised for a user's mistake.
    """


class StartError(RuntimeError):
    """Ray or Ray Serve did not start in time. The command line prints the message, one line, and exits with status 1."""


def in_one_line(error: BaseException) -> str:
    """What kind of error it is and what it says."""
    return " ".join(f"{type(error).__name__}: {error}".split())
