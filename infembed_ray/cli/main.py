"""The `infembed` command. A verb is one function of its settings; the scripts of jobs/ call the same functions.

Modules are imported only when a verb needs them, so `--version`, `--help` and an error in the settings take no seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from infembed_ray import __version__, telemetry
from infembed_ray.cli.tools import ACTIONS, TOOLS, Tool
from infembed_ray.config.verbs import MAINTENANCE, PLANS, VERBS, Verb, load
from infembed_ray.errors import KNOWN, Fault, InputError, explained, in_one_line
from infembed_ray.redaction import holds_credentials, masked, where_they_belong

if TYPE_CHECKING:
    from infembed_ray.config.base import Settings

GROUPS = {
    "make data": ("synthesize", "analyze", "mine"),
    "train": ("train", "export", "sweep"),
    "evaluate": ("evaluate", "report"),
    "serve": ("index", "serve"),
    "operate": ("pipeline", "manifests", "plan", "runs", "journal", "doctor", "init", "quickstart"),
}
"""Title in `infembed --help` -> verbs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0, 1 if Ray or a gate failed, 2 for bad input, 130 if interrupted. An error is one line on stderr. One
        that nothing foresaw has its traceback before that line, and status 1.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments:
        _parser().print_help()
        return 0
    options = parse(arguments)
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


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command; print its help or its mistake and exit, as argparse does."""
    words = list(arguments)
    two = " ".join(words[:2])
    parser = _parser()
    if two in ACTIONS or two in MAINTENANCE:
        parser, words = _parser_of_two_words(), [two, *words[2:]]
    if section := _asked_section(words):
        return section
    options, rest = parser.parse_known_args(words)
    if rest and (any(word.startswith("-") for word in rest) or not hasattr(options, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse takes no positional arguments after an option that follows some
        options.overrides += rest
    return options


def _refuse_credentials(options: argparse.Namespace) -> None:
    """Check the arguments that are not settings, which check themselves.

    Raises:
        InputError: an argument holds credentials.
    """
    given = {name: value for name, value in vars(options).items() if name != "overrides"}
    bad = {name: value for name, value in given.items() if holds_credentials(value)}
    if bad:
        raise InputError(*(Fault(name, value, where_they_belong(value)) for name, value in bad.items()))


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
            return _dry_run(options, verb, settings)
        settings = load("storage.releases:resolved")(settings)
        load("storage.steps:require_inputs")(settings)
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


def _dry_run(options: argparse.Namespace, verb: Verb, settings: Settings) -> None:
    """Print what a run would do; InputError for everything that is wrong."""
    from infembed_ray.progress import say

    for line in verb.describe(load("storage.releases:resolved")(settings)):
        say(f"{options.verb}: {line}")
    say(f"{options.verb}: no mistakes found, nothing was started")


def _run_plan(options: argparse.Namespace) -> None:
    verb = PLANS[options.what]
    settings = verb.settings.load(options.config, options.overrides)
    if not _shown(options, settings):
        made = verb.run(settings)
        print(load(f"planning.{options.what}:{'as_json' if options.json else 'as_text'}")(made))


def _shown(options: argparse.Namespace, settings: Settings) -> bool:
    """Print the settings instead of running, if the options ask for it."""
    if options.print_config:
        print(load("cli.help:as_yaml")(settings), end="")
    return bool(options.print_config)


def settings_verbs() -> dict[str, Verb]:
    """Return the verbs with settings, by their words."""
    return VERBS | MAINTENANCE | {f"plan {name}": verb for name, verb in PLANS.items()}


def _asked_section(words: Sequence[str]) -> argparse.Namespace | None:
    """Return what prints the help of a section of settings, if `VERB --help SECTION` asks for it."""
    at = next((number for number, word in enumerate(words) if word in ("-h", "--help")), len(words))
    verb, section = " ".join(words[:at]), ".".join(words[at + 1 :])
    if not section or verb not in settings_verbs():
        return None

    def run(_: argparse.Namespace) -> None:
        print(load("cli.help:section")(settings_verbs()[verb].settings, verb, section))

    return argparse.Namespace(verb=verb, run=run)


def _call(options: argparse.Namespace) -> int | None:
    """Call a function of the package with the parsed arguments of its verb."""
    values = {name: value for name, value in vars(options).items() if name not in ("verb", "run", "function")}
    status: int | None = load(options.function)(**values)
    return status


# ------------------------------------------------------------------------------------------------- parsers


class _Parser(argparse.ArgumentParser):
    """A parser that lists the settings of its verb in its help, and suggests a verb for a mistyped one."""

    verb_name = ""
    verb: Verb | None = None
    groups: Mapping[str, Sequence[str]] | None = None

    def format_help(self) -> str:
        if self.groups is not None:
            return _overview(self.groups)
        if self.verb is not None:
            self.epilog = "\n".join(load("cli.help:overview")(self.verb, self.verb_name))
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        super().error(masked(message))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            from infembed_ray.config.base import nearest

            self.exit(2, f"{self.prog}: unknown verb {masked(str(value))}: {nearest(str(value), action.choices)}\n")
        super()._check_value(action, value)


def _overview(groups: Mapping[str, Sequence[str]]) -> str:
    """Return the help of `infembed`: the verbs by group, each with a phrase and an example."""
    lines = ["usage: infembed VERB [options] [key=value ...]", "", "Instruction-following retrieval at cluster scale."]
    grouped = [name for names in groups.values() for name in names]
    others = [name for name in {**VERBS, **TOOLS} if name not in grouped]
    for title, names in {**groups, **({"others": others} if others else {})}.items():
        lines += ["", f"{title}:"]
        for name in names:
            verb = (VERBS | MAINTENANCE).get(name) or TOOLS[name]
            lines.append(f"  {name:<12}{verb.help}")
            lines += [f"{'':<14}infembed {verb.example}"] if verb.example else []
    two = ", ".join(name for name in {**MAINTENANCE, **ACTIONS} if " " in name)
    lines += ["", f"also: {two}", "", "infembed VERB --help [SECTION] describes a verb, or a section of its settings;"]
    lines += ["infembed VERB ... --dry-run checks a run and prints what it would do; infembed --version."]
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the verbs of one word, and of `plan`."""
    parser = _Parser(prog="infembed")
    parser.groups = GROUPS
    parser.add_argument("--version", action="version", version=f"infembed_ray {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, verb in {**VERBS, **MAINTENANCE}.items():
        if " " not in name:
            _add_settings(verbs, name, verb)
    for name, tool in TOOLS.items():
        if name == "plan":
            plan = verbs.add_parser(name, help=tool.help, description=tool.help)
            plans = plan.add_subparsers(dest="what", required=True, metavar="VERB")
            for what, verb in PLANS.items():
                planned = _add_settings(plans, what, verb, f"plan {what}")
                planned.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
                planned.set_defaults(run=_run_plan)
        else:
            _add_tool(verbs, name, tool)
    return parser


def _parser_of_two_words() -> argparse.ArgumentParser:
    """Return the parser of the verbs of two words, each given as one argument."""
    parser = _Parser(prog="infembed")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, verb in MAINTENANCE.items():
        if " " in name:
            _add_settings(verbs, name, verb)
    for name, tool in ACTIONS.items():
        _add_tool(verbs, name, tool)
    return parser


def _add_tool(verbs: Any, name: str, tool: Tool) -> None:
    parser = verbs.add_parser(name, help=tool.help, description=tool.help)
    for names, facts in tool.arguments:
        parser.add_argument(*names, **facts)
    parser.set_defaults(run=_call, function=tool.function, **tool.values)


def _add_settings(verbs: Any, name: str, verb: Verb, words: str = "") -> argparse.ArgumentParser:
    parser: _Parser = verbs.add_parser(
        name, help=verb.help, description=verb.help, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.verb_name, parser.verb = words or name, verb
    parser.set_defaults(run=_run_verb)
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument("--print-config", action="store_true", help="print all settings as such a file, and stop")
    if not words:
        parser.add_argument("--dry-run", action="store_true", help="check, print what a run would do, start nothing")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file's")
    return parser
