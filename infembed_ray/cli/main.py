"""The `infembed` command. A verb is one function of its settings; the scripts of jobs/ call the same functions.

Modules are imported only when a verb needs them, so `--version`, `--help` and an error in the settings take no seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from infembed_ray import __version__, telemetry
from infembed_ray.config.verbs import MAINTENANCE, PLANS, VERBS, Verb, load
from infembed_ray.errors import KNOWN, InputError, check_all, explained, in_one_line
from infembed_ray.redaction import holds_credentials, masked, where_they_belong

if TYPE_CHECKING:
    from infembed_ray.config.base import Settings


INPUTS = {"compare", "files", "corpus", "distractors", "evaluations", "index"}
INPUTS |= {"path", "records", "replay", "results", "reworded", "runs", "seeds"}
"""Settings that name files or directories."""
MODELS = {"adapter", "encoder", "model", "models", "teacher"}
"""Settings that name a model: a directory or any other name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0, 1 if Ray or a gate failed, 2 for bad input, 130 if interrupted. An error is one line on stderr. One
        that nothing foresaw has its traceback before that line, and status 1.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["index"] and arguments[1:2] in (["compact"], ["versions"], ["use"], ["verify"]):
        arguments[:2] = [" ".join(arguments[:2])]
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 0
    options, rest = parser.parse_known_args(arguments)
    if rest and (any(word.startswith("-") for word in rest) or not hasattr(options, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse takes no positional arguments after an option that follows some
        options.overrides += rest
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers fork after the first use
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the verbs show their own progress
    try:
        telemetry.set_up_logs()
        _refuse_credentials(options)
        return options.run(options) or 0
    except Exception as raised:
        error = explained(raised, options.verb)
        if not isinstance(error, KNOWN):
            fault = f"infembed {options.verb}: unexpected {in_one_line(error, options.verb)}"
            telemetry.print_error(f"{fault}; the traceback is above: please report it", error)
            return 1
        for fault in error.args:
            print(telemetry.log_line(f"infembed {options.verb}: {fault}", "ERROR"), file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        line = f"infembed {options.verb}: interrupted; the same command resumes"
        print(telemetry.log_line(line, "ERROR"), file=sys.stderr)
        return 130


def _refuse_credentials(options: argparse.Namespace) -> None:
    """Check the arguments that are not settings, which check themselves.

    Raises:
        InputError: an argument holds credentials.
    """
    given = {name: value for name, value in vars(options).items() if name != "overrides"}
    if faults := [f"{n}={value}: {where_they_belong(value)}" for n, value in given.items() if holds_credentials(value)]:
        raise InputError(*faults)


# ------------------------------------------------------------------------------------------------- verbs with settings


def _run_verb(options: argparse.Namespace) -> None:
    """Load the settings of a verb, run it, and print where its output is."""
    from infembed_ray.progress import say
    from infembed_ray.storage.steps import Published

    verb = (VERBS | MAINTENANCE)[options.verb]
    try:
        settings = verb.settings.load(options.config, options.overrides)
        if _shown(options, settings):
            return
        if getattr(options, "dry_run", False):
            return _check(options.verb, settings)
        settings = load("storage.releases:resolved")(settings)
        require_files(settings)
        if engine := getattr(options, "workflow", None):
            print(load(f"pipeline.workflows:as_{engine}")(settings), end="")
            return
    except InputError:
        if os.environ.get("RANK", "0") != "0":  # under torchrun, only the first process prints the error
            raise SystemExit(2) from None
        raise
    if options.verb == "serve":
        from infembed_ray.serving import startup

        startup.in_background(lambda: load(verb.function))
    result = verb.run(settings)
    if isinstance(result, Published):
        for line in result.summary.splitlines():
            say(f"{options.verb}: {line}")


def require_files(settings: Settings, prefix: str = "") -> None:
    """Check that the files and directories that settings name exist.

    Every verb checks its inputs thoroughly. This check comes first, because the verbs import torch and Ray, which takes
    seconds, and up to a minute on a busy machine.

    Raises:
        InputError: some files or directories do not exist.
    """
    check_all(*_file_checks(settings, prefix))


def _file_checks(settings: Settings, prefix: str) -> Iterator[Callable[[], Any]]:
    from infembed_ray.config.base import Settings
    from infembed_ray.retrieval.stores.address import is_address
    from infembed_ray.storage.object_store import is_uri
    from infembed_ray.storage.steps import resolve_input

    for field, value in settings:
        named = [(field, value)]
        if isinstance(value, dict):
            named = [(f"{field}.{label}", item) for label, item in value.items()]
        elif isinstance(value, tuple):
            named = [(field, item) for item in value]
        for name, item in named:
            if isinstance(item, Settings):
                yield from _file_checks(item, f"{prefix}{name}.")
            elif not isinstance(item, str) or not item or is_uri(item) or is_address(item):
                continue
            elif field in INPUTS or (field in MODELS and item.startswith(("/", ".", "~"))):
                yield partial(resolve_input, item, f"{prefix}{name}")


def _run_plan(options: argparse.Namespace) -> None:
    verb = PLANS[options.what]
    settings = verb.settings.load(options.config, options.overrides)
    if not _shown(options, settings):
        made = verb.run(settings)
        print(load(f"planning.{options.what}:{'as_json' if options.json else 'as_text'}")(made))


def _run_check(options: argparse.Namespace) -> None:
    settings = VERBS[options.what].settings.load(options.config, options.overrides)
    if not _shown(options, settings):
        _check(options.what, settings, getattr(options, "endpoint", False))


def _check(verb: str, settings: Settings, endpoint: bool = False) -> None:
    """Print what a run would do; InputError for everything that is wrong."""
    from infembed_ray.progress import say

    settings = load("storage.releases:resolved")(settings)

    def describe() -> None:
        for line in load("cli.check:check")(verb, settings, endpoint):
            say(f"{verb}: {line}")

    try:
        require_files(settings)
    except InputError as missing:
        try:
            describe()
        except InputError as error:  # it reports a missing file too, in other words
            absent = {(fault.setting, str(fault.value)) for fault in missing.faults}
            others = [fault for fault in error.faults if (fault.setting, str(fault.value)) not in absent]
            raise InputError(*missing.args, *others) from None
        raise
    describe()
    say(f"{verb}: no mistakes found, nothing was started")


def _shown(options: argparse.Namespace, settings: Settings) -> bool:
    """Print the settings instead of running, if the options ask for it."""
    if options.print_config:
        print(load("cli.help:as_yaml")(settings), end="")
    return bool(options.print_config)


def _help(options: argparse.Namespace) -> None:
    """Print the help of the command, of a verb, or of a section of its settings."""
    words, known = options.words, _settings_verbs()
    verb = " ".join(words[:2]) if " ".join(words[:2]) in known else " ".join(words[:1])
    section = words[len(verb.split()) :]
    if verb in known and section:
        print(load("cli.help:section")(known[verb].settings, verb, ".".join(section)))
    else:
        _parser().parse_args([*([verb] if verb in MAINTENANCE else words), "--help"])


def _settings_verbs() -> dict[str, Verb]:
    """Return the verbs with settings, by their words."""
    return VERBS | MAINTENANCE | {f"plan {name}": verb for name, verb in PLANS.items()}


def print_schema(verb_name: str) -> None:
    """Print the JSON Schema of a verb's settings."""
    print(load("cli.help:as_schema")(VERBS[verb_name].settings, verb_name))


def print_completion(shell: str) -> None:
    """Print the completion script of a shell."""
    print(load("cli.completion:script")(shell, _following()), end="")


def _following() -> dict[str, list[str]]:
    """Return verb -> the words that can follow it."""
    names, found = load("cli.help:names"), {}
    verbs = _settings_verbs() | {f"check {name}": VERBS[name] for name in VERBS}
    for words, verb in verbs.items():
        found[words] = ["--help", "--config", "--print-config", *(f"{name}=" for name in names(verb.settings))]
    (action,) = _parser()._subparsers._group_actions  # type: ignore[union-attr]
    known = list(dict.fromkeys([*action.choices, *verbs]))  # type: ignore[misc]
    for words in known:
        later = [other.split()[1] for other in known if other.startswith(f"{words} ")]
        found[words] = [*later, *found.get(words, ["--help"])]
    found |= {"schema": list(VERBS), "help": list(VERBS), "completion": ["bash", "zsh"]}
    return found


def create_key(name: str, file: str, scopes: str, rate: float | None, collections: str | None) -> None:
    """Print a new API key; its hash goes to a file."""
    print(load("serving.http.auth:new_key")(name, file, scopes, rate, collections))
    print(
        f"This key is shown once. Serve with api_keys_file={file}; delete its line there to revoke it.", file=sys.stderr
    )


def _call(options: argparse.Namespace) -> int | None:
    """Call a function of the package with the parsed arguments of its verb."""
    values = {name: value for name, value in vars(options).items() if name not in ("verb", "run", "function")}
    status: int | None = load(options.function)(**values)
    return status


# ------------------------------------------------------------------------------------------------- parsers


class _Parser(argparse.ArgumentParser):
    """A parser that lists the settings of its verb in its help, and suggests a verb for a mistyped one."""

    verb_settings: Verb | None = None

    def format_help(self) -> str:
        if self.verb_settings is not None:
            self.epilog = "\n".join(["settings:", *load("cli.help:overview")(self.verb_settings.settings)])
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        super().error(masked(message))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            from infembed_ray.config.base import nearest

            self.exit(2, f"{self.prog}: unknown verb {masked(str(value))}: {nearest(str(value), action.choices)}\n")
        super()._check_value(action, value)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="infembed", description="Instruction-following retrieval at cluster scale.")
    parser.add_argument("--version", action="version", version=f"infembed_ray {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add(name: str, function: str, help: str, **defaults: Any) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = verbs.add_parser(name, help=help, description=help)
        added.set_defaults(run=_call, function=function, **defaults)
        return added

    for name, verb in (VERBS | MAINTENANCE).items():
        run = _add_settings(verbs, name, verb)
        run.set_defaults(run=_run_verb)
        if name in VERBS:
            run.add_argument("--dry-run", action="store_true", help="as `infembed check`: check, start nothing")
        if name == "pipeline":
            run.add_argument(
                "--workflow", choices=("argo", "airflow"), help="print the stages as a file of this engine, and stop"
            )
    check = add("check", "", "check settings and inputs, and print what a run would do and cost; starts nothing")
    checks = check.add_subparsers(dest="what", required=True, metavar="VERB")
    for name, verb in VERBS.items():
        checked = _add_settings(checks, name, verb)
        checked.set_defaults(run=_run_check)
        if name == "synthesize":
            checked.add_argument(
                "--endpoint", action="store_true", help="also list the endpoints' models: free requests"
            )
    for action, help in {
        "versions": "list the versions of an index; mark the latest",
        "verify": "read an index and its document changes, and check their checksums",
        "use": "roll an index back or forward to a version",
    }.items():
        index = add(f"index {action}", "retrieval.admin:run", help, action=action)
        index.add_argument("directory", metavar="DIR", help="output of `infembed index`, or its address in Milvus")
    index.add_argument("version", metavar="VERSION", help="id of the version, or the first characters of it")
    plan = add("plan", "", "estimate what a run needs and costs")
    plans = plan.add_subparsers(dest="what", required=True, metavar="VERB")
    for name, verb in PLANS.items():
        planned = _add_settings(plans, name, verb)
        planned.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
        planned.set_defaults(run=_run_plan)
    _add_tools(add)
    _add_operations(add)
    return parser


def _add_tools(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the verbs that take no settings."""
    quickstart = add("quickstart", "quickstart.chain:run", "run all stages once on a bundled sample")
    quickstart.add_argument("--directory", default="runs/quickstart", help="of the outputs (default: %(default)s)")
    quickstart.add_argument("--port", type=int, default=8000, help="of the HTTP API (default: %(default)s)")
    quickstart.add_argument("--keep-serving", action="store_true", help="keep the HTTP API up until interrupted")
    compare = add(
        "compare", "evaluation.comparison:run", "compare runs in TREC's format against judgements, with significance"
    )
    compare.add_argument("runs", metavar="RUN", nargs="+", help="two or more; differences are to the first")
    compare.add_argument(
        "--qrels", required=True, metavar="FILE", help="judgements: TREC's columns, or BEIR's with a header"
    )
    compare.add_argument(
        "--measures", default="nDCG@10,MAP@1000,recall@100,MRR@10", help="separated by commas (default: %(default)s)"
    )
    init = add("init", "cli.init:run", "copy job scripts, their settings files and cluster.yaml to a directory")
    init.add_argument("directory", metavar="DIR", nargs="?", default=".", help="default: the current directory")
    journal = add(
        "journal", "llm.journal_tools:run", "check, compact, export, import or reconcile a journal of LLM responses"
    )
    journal.add_argument("action", choices=("stats", "verify", "compact", "export", "import", "reconcile"))
    journal.add_argument("journal", metavar="DIR", help="directory of the journal")
    journal.add_argument("file", metavar="FILE", nargs="?", help=".jsonl file to export to or import from")
    data = add(
        "data", "evaluation.tasks.mirror:run", "mirror the published data sets of evaluation tasks, or verify a mirror"
    )
    data.add_argument("action", choices=("fetch", "verify"))
    data.add_argument("directory", metavar="DIR", help="of the mirror: `data` of `infembed evaluate`")
    data.add_argument("tasks", metavar="TASK", nargs="*", help="followir, mair/dd-15, mair/CAsT_*, bright/biology, ...")
    key = add(
        "key", "cli.main:create_key", "create an API key for `infembed serve`: print it and store its hash in a file"
    )
    key.add_argument("name", metavar="NAME", help="name of its user or purpose")
    key.add_argument("file", metavar="FILE", help="`api_keys_file` of `infembed serve`; created if missing")
    key.add_argument("--scopes", default="read", help="some of read,write,admin; default: read")
    key.add_argument("--rate", type=float, metavar="N", help="most requests per second; default: no limit")
    key.add_argument("--collections", metavar="NAMES", help="those that it may use, such as news,law; default: all")
    mteb = add("mteb", "evaluation.mteb_adapter:run", "run mteb's tasks: mteb run -m CHECKPOINT -t TASK")
    mteb.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="of mteb; try: mteb run --help")
    schema = add("schema", "cli.main:print_schema", "print the JSON Schema of a verb's settings file, for editors")
    schema.add_argument("verb_name", metavar="VERB", choices=VERBS, help=", ".join(VERBS))
    completion = add(
        "completion", "cli.main:print_completion", "print a script that completes verbs and settings in a shell"
    )
    completion.add_argument("shell", choices=("bash", "zsh"))
    shown = add("help", "", "show the help of a verb, or of a section of its settings: help train lora")
    shown.add_argument("words", metavar="VERB [SECTION]", nargs="*")
    shown.set_defaults(run=_help)


def _add_operations(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the verbs that look at the environment and at outputs."""
    doctor = add(
        "doctor", "cli.doctor:run", "check this machine's environment; name what does not work and how to mend it"
    )
    doctor.add_argument("places", metavar="OUTPUT", nargs="*", help="directories and URIs that outputs go to")
    doctor.add_argument("--endpoint", metavar="URL", help="LLM endpoint up to /v1, to ask for its models: free")
    doctor.add_argument(
        "--key-env", metavar="NAME", default="OPENAI_API_KEY", help="variable with its key (default: %(default)s)"
    )
    doctor.add_argument("--port", type=int, default=8000, help="that an API would listen at (default: %(default)s)")
    runs = add("runs", "cli.runs:print_runs", "list the outputs below a directory: stage, time, code, cost; the latest")
    runs.add_argument(
        "directory", metavar="DIR", help="`output` of a stage or of a pipeline, or a directory of several"
    )
    status = add("status", "cli.runs:print_status", "show how far a run is, its last error, and what to run next")
    status.add_argument("output", metavar="RUN", help="an output, or `output` of a stage or of a pipeline")
    promote = add(
        "promote", "storage.releases:promote", "let an alias name a release; `serve` and `evaluate` take the alias"
    )
    promote.add_argument(
        "release", metavar="RELEASE", help="OUTPUT/release of a pipeline (its latest), a release there, or an alias"
    )
    promote.add_argument(
        "alias", metavar="ALIAS", help="path or URI that ends in .release, such as runs/production.release"
    )
    promote.add_argument(
        "--mlflow",
        metavar="MODEL",
        help="register the checkpoint as a version of this model in MLflow's registry, with the alias's name",
    )
    lineage = add("lineage", "cli.runs:print_lineage", "show what an output was made from, back to the first inputs")
    lineage.add_argument(
        "output", metavar="RUN", help="an output, or the URL of an API: then of the index that it serves"
    )
    lineage.add_argument(
        "--root", metavar="DIR", help="directory or URI with the outputs, of which an API's index is found"
    )
    lineage.add_argument("--collection", metavar="NAME", help="of an API with several: whose index; default: `index`")


def _add_settings(verbs: Any, name: str, verb: Verb) -> argparse.ArgumentParser:
    parser: _Parser = verbs.add_parser(
        name, help=verb.help, description=verb.help, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.verb_settings = verb
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument("--print-config", action="store_true", help="print all settings as such a file, and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file's")
    return parser
