"""Cases of the GPU suite that end in every way a real one can."""

import os
import time
from collections.abc import Iterator

from benchmarks.gpu.suite import Context, Result, Skipped


def passes(context: Context) -> Iterator[Result]:
    yield Result("argument", {"argument": str(context.argument)}, {"zero": (0.0, 0.0)})


def exceeds(context: Context) -> Iterator[Result]:
    yield Result("checks", {}, {"within": (1.0, 2.0), "above": (2.1, 2.0), "not a number": (float("nan"), 2.0)})


def raises(context: Context) -> Iterator[Result]:
    yield Result("before it", {"figure": 1.0})
    raise ValueError("two\nlines")


def dies(context: Context) -> Iterator[Result]:
    yield Result("before it", {"figure": 1.0})
    os._exit(7)


def hangs(context: Context) -> Iterator[Result]:
    yield Result("before it", {"process": str(os.getpid())})
    time.sleep(600)


def needs_a_package(context: Context) -> Iterator[Result]:
    import a_package_that_is_not_there

    yield Result(str(a_package_that_is_not_there))


def needs_a_device(context: Context) -> Iterator[Result]:
    raise Skipped("there is no such device")
    yield
