"""The `infembed` command. A verb is one function of its settings; the scripts of jobs/ call the same functions.

Modules are imported only when a verb needs them, so `--version`, `--help` and an error in the settings take no seconds.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args, get_origin

from infembed_ray import __version__
from infembed_ray.errors import InputError, StartError

if TYPE_CHECKING:
    from infembed_ray.config.base import Settings


@dataclass(frozen=True)
class Verb:
    """A command that takes settings."""

    help: str
    function: str
    """`module:name` of the function of the settings, below infembed_ray."""
    settings_class: str
    """`module:name` of the settings, below infembed_ray.config."""

    @property
    def settings(self) -> type[Settings]:
        loaded: type[Settings] = _load(f"config.{self.settings_class}")
        return loaded

    def run(self, settings: Settings, **options: Any) -> Any:
        return _load(self.function)(settings, **options)


VERBS = {
    "synthesize": Verb("seeds -> InF-IR records", "synthesis.distributed:run", "synthesis:SynthesizeSettings"),
    "analyze": Verb("records -> quality report", "analysis.report:run", "analysis:AnalyzeSettings"),
    "train": Verb("records + backbone -> checkpoint", "training.launch:run", "training:TrainSettings"),
    "export": Verb("checkpoint -> ONNX graph", "modeling.onnx:run", "training:ExportSettings"),
    "evaluate": Verb("checkpoints + records -> tables", "evaluation.distributed:run", "evaluation:EvaluateSettings"),
    "sweep": Verb("objectives x backbones x seeds -> one table", "sweeps.distributed:run", "sweeps:SweepSettings"),
    "report": Verb(
        "results -> the paper's tables and figures", "evaluation.paper.report:run", "evaluation:ReportSettings"
    ),
    "index": Verb("checkpoint + corpus -> FAISS shards", "retrieval.distributed:run", "retrieval:IndexSettings"),
    "serve": Verb("checkpoint + index -> HTTP API", "serving.distributed:run", "serving:ServeSettings"),
}
"""Stages. Each has a script and a settings file in jobs/."""

MAINTENANCE = {
    "index compact": Verb(
        "index + its document changes -> next version", "retrieval.distributed:compact", "retrieval:CompactSettings"
    )
}
"""Verbs of two words; they run through the job script of the first word."""

PLANS = {
    "train": Verb("memory, time and cost of a training", "planning.train:run", "planning:PlanTrainSettings"),
    "index": Verb("types, memory, disk, time and cost of an index", "planning.index:run", "planning:PlanIndexSettings"),
    "serve": Verb("replicas, nodes and monthly cost of an API", "planning.serve:run", "planning:PlanServeSettings"),
}
"""What `infembed plan` estimates. A plan prints; it runs and writes nothing."""

INPUTS = frozenset(
    ("agreement", "compare", "corpus", "distractors", "evaluations", "index", "records", "replay", "results", "seeds")
)
"""Settings that name files or directories."""
MODELS = {"adapter", "encoder", "model", "models", "teacher"}
"""Settings that name a model: a directory or any other name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0, 1 if Ray did not start, 2 for bad input, 130 if interrupted. An error is one line on stderr.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["index"] and arguments[1:2] in (["compact"], ["versions"], ["use"], ["verify"]):
        arguments[:2] = [" ".join(arguments[:2])]
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 0
    options = parser.parse_args(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers fork after the first use
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the verbs show their own progress
    try:
        return options.run(options) or 0
    except (InputError, StartError) as error:
        print(f"infembed {options.verb}: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        print(f"infembed {options.verb}: interrupted; the same command resumes", file=sys.stderr)
        return 130


# ------------------------------------------------------------------------------------------------- verbs with settings


def _run_verb(options: argparse.Namespace) -> None:
    """Load the settings of a verb, run it, and print where its output is."""
    from infembed_ray.progress import say
    from infembed_ray.storage import Published

    verb = (VERBS | MAINTENANCE)[options.verb]
    try:
        settings = verb.settings.load(options.config, options.overrides)
        require_files(settings)
    except InputError:
        if os.environ.get("RANK", "0") != "0":  # under torchrun, only the first process prints the error
            raise SystemExit(2) from None
        raise
    if options.verb == "serve":
        from infembed_ray.serving import startup

        startup.in_background(lambda: _load(verb.function))
    result = verb.run(settings)
    if isinstance(result, Published):
        for line in result.summary.splitlines():
            say(f"{options.verb}: {line}")


def require_files(settings: Settings, prefix: str = "") -> None:
    """Check that the files and directories that settings name exist.

    Every verb checks its inputs thoroughly. This check comes first, because the verbs import torch and Ray, which takes
    seconds, and up to a minute on a busy machine.

    Raises:
        InputError: a file or directory does not exist.
    """
    from infembed_ray.config.base import Settings
    from infembed_ray.object_store import is_uri
    from infembed_ray.storage import resolve_input

    for field, value in settings:
        named = [(field, value)]
        if isinstance(value, dict):
            named = [(f"{field}.{label}", item) for label, item in value.items()]
        elif isinstance(value, tuple):
            named = [(field, item) for item in value]
        for name, item in named:
            if isinstance(item, Settings):
                require_files(item, f"{prefix}{name}.")
            elif not isinstance(item, str) or not item or is_uri(item):
                continue
            elif field in INPUTS or (field in MODELS and item.startswith(("/", ".", "~"))):
                resolve_input(item, f"{prefix}{name}")


def _run_plan(options: argparse.Namespace) -> None:
    verb = PLANS[options.what]
    verb.run(verb.settings.load(options.config, options.overrides), as_json=options.json)


def create_key(name: str, file: str) -> None:
    """Print a new API key; its hash goes to a file."""
    print(_load("serving.http.auth:new_key")(name, file))
    print(
        f"This key is shown once. Serve with api_keys_file={file}; delete its line there to revoke it.", file=sys.stderr
    )


def _call(options: argparse.Namespace) -> int | None:
    """Call a function of the package with the parsed arguments of its verb."""
    values = {name: value for name, value in vars(options).items() if name not in ("verb", "run", "function")}
    status: int | None = _load(options.function)(**values)
    return status


# ------------------------------------------------------------------------------------------------- parsers


class _Parser(argparse.ArgumentParser):
    """A parser that lists the settings of its verb in its help, and suggests a verb for a mistyped one."""

    verb_settings: Verb | None = None

    def format_help(self) -> str:
        if self.verb_settings is not None:
            self.epilog = "\n".join(["settings:", *_settings_help(self.verb_settings.settings)])
        return super().format_help()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            from infembed_ray.config.base import nearest

            self.exit(2, f"{self.prog}: unknown verb {value}: {nearest(str(value), action.choices)}\n")
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
        _add_settings(verbs, name, verb).set_defaults(run=_run_verb)
    for action, help in {
        "versions": "list the versions of an index; mark the latest",
        "verify": "read an index and its document changes, and check their checksums",
        "use": "roll an index back or forward to a version",
    }.items():
        index = add(f"index {action}", "retrieval.admin:run", help, action=action)
        index.add_argument("directory", metavar="DIR", help="output of `infembed index`")
    index.add_argument("version", metavar="VERSION", help="id of the version, or the first characters of it")
    plan = add("plan", "", "estimate what a run needs and costs")
    plans = plan.add_subparsers(dest="what", required=True, metavar="VERB")
    for name, verb in PLANS.items():
        planned = _add_settings(plans, name, verb)
        planned.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
        planned.set_defaults(run=_run_plan)
    quickstart = add("quickstart", "quickstart.chain:run", "run all stages once on a bundled sample")
    quickstart.add_argument("--directory", default="runs/quickstart", help="of the outputs (default: %(default)s)")
    quickstart.add_argument("--port", type=int, default=8000, help="of the HTTP API (default: %(default)s)")
    quickstart.add_argument("--keep-serving", action="store_true", help="keep the HTTP API up until interrupted")
    view = add("view", "view.server:run", "browse the records or the results of an output in a browser")
    view.add_argument("directory", metavar="DIR", help="output of `infembed synthesize`, `evaluate` or `sweep`")
    view.add_argument("overrides", nargs="*", metavar="key=value", help="port=PORT; default: a free port")
    init = add("init", "project_files:run", "copy job scripts, their settings files and cluster.yaml to a directory")
    init.add_argument("directory", metavar="DIR", nargs="?", default=".", help="default: the current directory")
    journal = add("journal", "llm.journal_tools:run", "check, compact, export or import a journal of LLM responses")
    journal.add_argument("action", choices=("stats", "verify", "compact", "export", "import"))
    journal.add_argument("journal", metavar="DIR", help="directory of the journal")
    journal.add_argument("file", metavar="FILE", nargs="?", help=".jsonl file to export to or import from")
    data = add(
        "data", "evaluation.tasks.mirror:run", "mirror the published data sets of evaluation tasks, or verify a mirror"
    )
    data.add_argument("action", choices=("fetch", "verify"))
    data.add_argument("directory", metavar="DIR", help="of the mirror: `data` of `infembed evaluate`")
    data.add_argument("tasks", metavar="TASK", nargs="*", help="followir, mair/dd-15, mair/CAsT_*, bright/biology, ...")
    key = add("key", "cli:create_key", "create an API key for `infembed serve`: print it and store its hash in a file")
    key.add_argument("name", metavar="NAME", help="name of its user or purpose")
    key.add_argument("file", metavar="FILE", help="`api_keys_file` of `infembed serve`; created if missing")
    mteb = add("mteb", "evaluation.mteb_adapter:run", "run mteb's tasks: mteb run -m CHECKPOINT -t TASK")
    mteb.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="of mteb; try: mteb run --help")
    return parser


def _add_settings(verbs: Any, name: str, verb: Verb) -> argparse.ArgumentParser:
    parser: _Parser = verbs.add_parser(
        name, help=verb.help, description=verb.help, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.verb_settings = verb
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file's")
    return parser


def _settings_help(settings: type[Settings], prefix: str = "") -> Iterator[str]:
    """Describe every setting, nested ones after the setting that holds them; defaults are written as YAML."""
    import yaml

    from infembed_ray.config.base import Settings, settings_class

    for name, field in settings.model_fields.items():
        if field.is_required():
            default = "required"
        elif isinstance(field.default, Settings):
            default = "its settings follow"
        else:
            default = "default " + yaml.safe_dump([field.default], default_flow_style=True, width=10**6).strip()[1:-1]
        yield f"  {prefix + name:<22} {field.description} ({default})"
        if inner := settings_class(field.annotation):
            in_mapping = any(get_origin(part) is dict for part in (field.annotation, *get_args(field.annotation)))
            yield from _settings_help(inner, f"{prefix}{name}.{'LABEL.' if in_mapping else ''}")


def _load(path: str) -> Any:
    """Import `module:name` below infembed_ray."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"infembed_ray.{module}"), name)


if __name__ == "__main__":
    sys.exit(main())
