"""Commands that take arguments in place of settings."""

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infembed_ray.config.verbs import load, project_files
from infembed_ray.errors import InputError

Argument = tuple[tuple[str, ...], dict[str, Any]]
"""What `ArgumentParser.add_argument` takes."""


@dataclass(frozen=True)
class Tool:
    """A command that takes arguments."""

    help: str
    function: str
    """`module:name` of the function of the arguments, below infembed_ray."""
    arguments: tuple[Argument, ...] = ()
    example: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the function."""


def _argument(*names: str, **facts: Any) -> Argument:
    return names, facts


def create_key(name: str, file: str, scopes: str, rate: float | None, collections: str | None) -> None:
    """Print a new API key; its hash goes to a file."""
    print(load("serving.http.auth:new_key")(name, file, scopes, rate, collections))
    note = f"This key is shown once. Serve with api_keys_file={file}; delete its line there to revoke it."
    print(note, file=sys.stderr)


PROJECT = ("jobs", "cluster.yaml", "constraints.txt")
"""Job scripts with their settings files, a cluster's description, and the versions of a worker's packages."""


def copy_project(directory: str) -> None:
    """Copy PROJECT to a directory; overwrite nothing.

    Raises:
        InputError: one of them exists there, or the directory cannot be written.
    """
    target = Path(directory)
    if present := [name for name in PROJECT if (target / name).exists()]:
        raise InputError(f"{target / present[0]} exists already; choose another directory, or delete it")
    try:
        shutil.copytree(project_files() / "jobs", target / "jobs", ignore=shutil.ignore_patterns("__pycache__"))
        for name in PROJECT[1:]:
            shutil.copyfile(project_files() / name, target / name)
    except OSError as error:
        fault = f"cannot be written ({error.strerror or error})"
        raise InputError.of(str(target), None, fault, "choose another directory") from error
    load("progress:say")(f"init: wrote {', '.join(PROJECT)} to {target.resolve()}")


_JSON = _argument("--json", action="store_true", help="print JSON")
_OUTPUTS = _argument("directory", metavar="DIR", help="`output` of a stage or a pipeline, or a directory of several")
_PLACES = _argument("places", metavar="PLACE", nargs="*", help="directories and URIs of outputs, URLs of LLM endpoints")


def _of_an_index(action: str, help: str, *more: Argument) -> Tool:
    index = _argument("directory", metavar="DIR", help="output of `infembed index`, or its address in Milvus")
    return Tool(help, "retrieval.admin:run", (index, *more), values={"action": action})


_VERSION = _argument("version", metavar="VERSION", help="id of the version, or the first characters of it")

TOOLS = {
    "runs": Tool(
        "list the outputs below a directory, the unfinished ones with their last error and the next command",
        "cli.runs:print_runs",
        (_OUTPUTS, _JSON),
        "runs runs",
    ),
    "runs show": Tool(
        "show a run: state, error, next command, what it was made from, gates, cost and size",
        "cli.runs:print_run",
        (_argument("run_address", metavar="RUN", help="an output, or a directory whose `latest` names one"), _JSON),
    ),
    "runs promote": Tool(
        "let an alias name a release; `serve` and `evaluate` take the alias",
        "cli.runs:promote",
        (
            _argument("release", metavar="RUN", help="a release, OUTPUT/release of a pipeline, or an alias"),
            _argument("alias", metavar="ALIAS", help="path or URI that ends in .release, such as runs/live.release"),
            _argument("--ungated", action="store_true", help="accept a release whose gates are off"),
            _JSON,
        ),
    ),
    "runs clean": Tool(
        "list what can be removed: stale partial outputs, and old versions that nothing names",
        "cli.runs:clean",
        (_OUTPUTS, _argument("--yes", action="store_true", help="remove it"), _JSON),
    ),
    "journal": Tool(
        "check a journal of LLM responses, or reconcile its budget",
        "llm.budget:run",
        (
            _argument("action", choices=("stats", "reconcile")),
            _argument("journal", metavar="DIR", help="directory of the journal"),
        ),
        "journal stats runs/records/journal",
    ),
    "doctor": Tool(
        "check this machine's environment and show how to mend it",
        "cli.doctor:run",
        (_PLACES,),
        "doctor runs",
    ),
    "init": Tool(
        "copy job scripts, their settings files and cluster.yaml to a directory",
        "cli.tools:copy_project",
        (_argument("directory", metavar="DIR", nargs="?", default=".", help="default: the current directory"),),
        "init project",
    ),
    "quickstart": Tool(
        "run all stages once on a bundled sample",
        "quickstart.chain:run",
        (
            _argument("--directory", default="runs/quickstart", help="of the outputs (default: %(default)s)"),
            _argument("--port", type=int, default=8000, help="of the HTTP API (default: %(default)s)"),
            _argument("--keep-serving", action="store_true", help="keep the HTTP API up until interrupted"),
        ),
        "quickstart",
    ),
    "index versions": _of_an_index("versions", "list the versions of an index; mark the latest"),
    "index verify": _of_an_index("verify", "read an index and its document changes, and check their checksums"),
    "index use": _of_an_index("use", "roll an index back or forward to a version", _VERSION),
    "serve key": Tool(
        "create an API key: print it and store its hash in a file",
        "cli.tools:create_key",
        (
            _argument("name", metavar="NAME", help="name of its user or purpose"),
            _argument("file", metavar="FILE", help="`api_keys_file` of `infembed serve`; created if missing"),
            _argument("--scopes", default="read", help="some of read,write,admin; default: read"),
            _argument("--rate", type=float, metavar="N", help="maximum requests per second; default: no limit"),
            _argument("--collections", metavar="NAMES", help="that it may use, such as news,law; default: all"),
        ),
    ),
}
"""Words of a command -> its function and arguments."""
