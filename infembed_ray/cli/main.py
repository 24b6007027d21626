"""The `infembed` command. A verb is one function of its settings; the scripts of jobs/ call the same functions.

Modules are imported only when a verb needs them, so `--version`, `--help` and an error in the settings take no seconds.
"""

import argparse
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from infembed_ray import __version__, telemetry
from infembed_ray.cli.tools import TOOLS, Tool
from infembed_ray.config.verbs import MAINTENANCE, PLANS, VERBS, Verb, load
from infembed_ray.errors import KNOWN, Fault, InputError, explained, in_one_line
from infembed_ray.redaction import holds_credentials, masked, where_they_belong

if TYPE_CHECKING:
    from infembed_ray.config.base import Settings

COMMANDS: Mapping[str, Verb | Tool] = {**VERBS, **MAINTENANCE, **PLANS, **TOOLS}
"""Words of a command, one or two -> what it does."""
GROUPS = {
    "make data": ("synthesize", "analyze", "mine"),
    "train": ("train", "export", "sweep"),
    "evaluate": ("evaluate", "report"),
    "serve": ("index", "serve"),
    "operate": ("pipeline", "manifests", "plan", "runs", "journal", "doctor", "init", "quickstart"),
}
"""Title in `infembed --help` -> verbs."""
HELP = ("-h", "--help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0, 1 if Ray or a gate failed, 2 for bad input, 130 if interrupted, 141 if the reader of the output, such
        as `head`, ended. An error is one line on stderr. One that nothing foresaw has its traceback before that line, and status 1.
    """
    try:
        try:
            return _main(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # of the output: `_main` reports those of other pipes
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE


def _main(arguments: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments:
        print(_overview(), end="")
        return 0
    options = parse(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers fork after the first use
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the verbs show their own progress
    stage = options.verb.split()[0]
    try:
        telemetry.set_up_logs()
        return _run(options) or 0
    except Exception as raised:
        if isinstance(raised, BrokenPipeError) and _reader_ended():
            raise
        error = explained(raised, stage)
        if not isinstance(error, KNOWN):
            fault = f"infembed {options.verb}: unexpected {in_one_line(error, stage)}"
            telemetry.print_error(f"{fault}; the traceback is above: please report it", error)
            return 1
        for fault in error.args:
            print(telemetry.log_line(f"infembed {options.verb}: {fault}", "ERROR"), file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        line = f"infembed {options.verb}: interrupted; the same command resumes"
        print(telemetry.log_line(line, "ERROR"), file=sys.stderr)
        return 130


def _reader_ended() -> bool:
    poll = select.poll()
    poll.register(1, 0)
    return any(state & select.POLLERR for _, state in poll.poll(0))


# ------------------------------------------------------------------------------------------------------------- parsing


class _Parser(argparse.ArgumentParser):
    """A parser whose messages mask credentials."""

    def error(self, message: str) -> NoReturn:
        super().error(masked(message))


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command; print its help or its mistake and exit, as argparse does."""
    name = next((name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS), None)
    if name is None:
        _exit_without_command(words)
    command, rest = COMMANDS[name], words[len(name.split()) :]
    if isinstance(command, Verb) and (at := next((n for n, word in enumerate(rest) if word in HELP), None)) is not None:
        if section := ".".join(rest[at + 1 :]):
            return argparse.Namespace(verb=name, section=section)
        print(parser_of(name).format_help() + "\n".join(load("cli.help:overview")(command, name)))
        raise SystemExit(0)
    return parser_of(name).parse_intermixed_args(rest, argparse.Namespace(verb=name))


def _exit_without_command(words: Sequence[str]) -> NoReturn:
    """Print the version, the overview, or the nearest command."""
    if words[0] == "--version":
        print(f"infembed_ray {__version__}")
        raise SystemExit(0)
    if set(HELP) & set(words[:2]):
        print(_overview(), end="")
        raise SystemExit(0)
    from infembed_ray.config.base import nearest

    of_two = [name for name in COMMANDS if name.startswith(f"{words[0]} ")]
    asked = " ".join(words[:2]) if of_two else words[0]
    print(f"infembed: unknown verb {masked(asked)}: {nearest(asked, of_two or COMMANDS)}", file=sys.stderr)
    raise SystemExit(2)


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command, for the words after its name."""
    command = COMMANDS[name]
    parser = _Parser(prog=f"infembed {name}", description=command.help, formatter_class=argparse.RawTextHelpFormatter)
    if isinstance(command, Tool):
        for names, facts in command.arguments:
            parser.add_argument(*names, **facts)
        return parser
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument("--print-config", action="store_true", help="print all settings as such a file, and stop")
    if name in PLANS:
        parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    else:
        parser.add_argument("--dry-run", action="store_true", help="check, print what a run would do, start nothing")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file's")
    return parser


def _overview() -> str:
    """Return the help of `infembed`: the verbs by group, each with a phrase and an example."""
    lines = ["usage: infembed VERB [options] [key=value ...]", "", "Instruction-following retrieval at cluster scale."]
    for title, names in GROUPS.items():
        lines += ["", f"{title}:"]
        for name in names:
            command = COMMANDS.get(name) or COMMANDS[next(key for key in COMMANDS if key.startswith(f"{name} "))]
            lines.append(f"  {name:<12}{command.help}")
            lines += [f"{'':<14}infembed {command.example}"] if command.example else []
    two = ", ".join(name for name in COMMANDS if " " in name)
    lines += ["", f"also: {two}", "", "infembed VERB --help [SECTION] describes a verb, or a section of its settings;"]
    lines += ["infembed VERB ... --dry-run checks a run and prints what it would do; infembed --version."]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------------------- running


def _run(options: argparse.Namespace) -> int | None:
    command = COMMANDS[options.verb]
    values = {name: value for name, value in vars(options).items() if name not in ("verb", "overrides")}
    if bad := {name: value for name, value in values.items() if holds_credentials(value)}:
        raise InputError(*(Fault(name, value, where_they_belong(value)) for name, value in bad.items()))
    if isinstance(command, Tool):
        return load(command.function)(**values, **command.values)
    if "section" in values:
        print(load("cli.help:section")(command.settings, options.verb, options.section))
    else:
        _run_verb(options, command)
    return None


def _run_verb(options: argparse.Namespace, verb: Verb) -> None:
    """Load the settings of a verb, run it, and print where its output is."""
    from infembed_ray.progress import say
    from infembed_ray.storage.steps import Published

    settings: Settings = verb.settings.load(options.config, options.overrides)
    if options.print_config:
        print(load("cli.help:as_yaml")(settings), end="")
        return
    if options.verb in PLANS:
        module = verb.function.partition(":")[0]
        print(load(f"{module}:{'as_json' if options.json else 'as_text'}")(verb.run(settings)))
        return
    settings = load("storage.releases:resolved")(settings)
    if options.dry_run:
        for line in verb.describe(settings):
            say(f"{options.verb}: {line}")
        say(f"{options.verb}: no mistakes found, nothing was started")
        return
    load("storage.steps:require_inputs")(settings)
    if options.verb == "serve":
        from infembed_ray.serving import startup

        startup.in_background(lambda: load(verb.function))
    result = verb.run(settings)
    if isinstance(result, Published):
        for line in result.summary.splitlines():
            say(f"{options.verb}: {line}")
