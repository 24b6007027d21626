"""The `infembed` command. Every verb is one function of its settings; the scripts of jobs/ call the same ones."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infembed_ray import __version__
from infembed_ray.config import (
    AnalyzeSettings,
    CompactSettings,
    EvaluateSettings,
    ExportSettings,
    IndexSettings,
    PlanIndexSettings,
    PlanServeSettings,
    PlanTrainSettings,
    ReportSettings,
    ServeSettings,
    Settings,
    SweepSettings,
    SynthesizeSettings,
    TrainSettings,
)
from infembed_ray.errors import InputError, StartError
from infembed_ray.object_store import is_uri
from infembed_ray.progress import say
from infembed_ray.storage import Published, existing


@dataclass(frozen=True)
class Verb:
    """A stage of the product: its settings and the module whose `run(settings)` does it."""

    settings: type[Settings]
    module: str
    help: str
    function: str = "run"


VERBS = {
    "synthesize": Verb(SynthesizeSettings, "infembed_ray.synthesis.distributed", "seeds -> InF-IR records"),
    "analyze": Verb(AnalyzeSettings, "infembed_ray.analysis.report", "records -> quality report"),
    "train": Verb(TrainSettings, "infembed_ray.training.launch", "records + a backbone -> checkpoint"),
    "export": Verb(ExportSettings, "infembed_ray.modeling.onnx", "checkpoint -> ONNX graph"),
    "evaluate": Verb(EvaluateSettings, "infembed_ray.evaluation.distributed", "checkpoints + records -> tables"),
    "sweep": Verb(SweepSettings, "infembed_ray.sweeps.distributed", "objectives x backbones x seeds -> one table"),
    "report": Verb(
        ReportSettings, "infembed_ray.evaluation.report.report", "results -> the paper's tables and figures"
    ),
    "index": Verb(IndexSettings, "infembed_ray.retrieval.distributed", "checkpoint + corpus -> FAISS shards"),
    "serve": Verb(ServeSettings, "infembed_ray.serving.distributed", "checkpoint + index -> HTTP API"),
}

UPKEEP = {
    "index compact": Verb(
        CompactSettings,
        "infembed_ray.retrieval.distributed",
        "an index + the changes made to it -> its next version",
        "compact",
    ),
}
"""Steps whose verb has two words; they go through the job of the first."""

INDEX_VERBS = ("index versions", "index use", "index verify")
"""Verbs of two words that are quick and need no job; `infembed index` with anything else is the build."""

PLANS = {
    "train": Verb(PlanTrainSettings, "infembed_ray.planning.train", "memory, time and cost of a training"),
    "index": Verb(PlanIndexSettings, "infembed_ray.planning.index", "types, memory, disk, time and cost of an index"),
    "serve": Verb(PlanServeSettings, "infembed_ray.planning.serve", "replicas, nodes and cost a month of an API"),
}
"""What `infembed plan` plans. Nothing is run or written: `run(settings, as_json)` prints."""


FILES = {
    "agreement",
    "compare",
    "corpus",
    "distractors",
    "evaluations",
    "index",
    "records",
    "replay",
    "results",
    "seeds",
}
MODELS = {"adapter", "encoder", "model", "models", "teacher"}
"""Settings of the verbs that name files or directories, and those that name models: a directory or any other name."""


def require_files(settings: Settings, prefix: str = "") -> None:
    """InputError if a setting names a file or directory that does not exist.

    Every verb checks its inputs thoroughly. This check comes first because the verbs import torch and Ray, which takes
    seconds, and up to a minute on a busy machine.
    """
    for field, value in settings:
        pairs = [(field, value)]
        if isinstance(value, dict):
            pairs = [(f"{field}.{label}", item) for label, item in value.items()]
        elif isinstance(value, tuple):
            pairs = [(field, item) for item in value]
        for name, item in pairs:
            if isinstance(item, Settings):
                require_files(item, f"{prefix}{name}.")
            elif not isinstance(item, str) or not item or is_uri(item):
                continue
            elif field in FILES or (field in MODELS and item.startswith(("/", ".", "~"))):
                existing(item, f"{prefix}{name}")


def run_verb(verb: str, config: str | None, overrides: Sequence[str]) -> None:
    """Load the verb's settings and run it; says so when there is nothing to do."""
    entry = (VERBS | UPKEEP)[verb]
    try:
        settings = entry.settings.load(config, overrides)
        require_files(settings)
    except InputError:
        if os.environ.get("RANK", "0") != "0":  # torchrun's first process says it for all
            raise SystemExit(2) from None
        raise
    if isinstance(settings, ServeSettings):
        from infembed_ray.serving import startup

        startup.in_background(lambda: importlib.import_module(entry.module))
    result = getattr(importlib.import_module(entry.module), entry.function)(settings)
    if isinstance(result, Published):
        for line in result.account.splitlines():
            say(f"{verb}: {line}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 2 for bad input, 1 if Ray did not start; both in one line on stderr."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if " ".join(arguments[:2]) in (*UPKEEP, *INDEX_VERBS):
        arguments[:2] = [" ".join(arguments[:2])]
    options = _parser().parse_args(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers fork after the first use
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # ours are the only ones
    try:
        if options.verb == "quickstart":
            from infembed_ray.quickstart.chain import run

            run(directory=options.directory, port=options.port, keep_serving=options.keep_serving)
        elif options.verb == "init":
            from infembed_ray import project_files

            project_files.run(options.directory)
        elif options.verb == "plan":
            entry = PLANS[options.what]
            settings = entry.settings.load(options.config, options.overrides)
            importlib.import_module(entry.module).run(settings, as_json=options.json)
        elif options.verb in INDEX_VERBS:
            from infembed_ray.retrieval import upkeep

            upkeep.run(options.verb.split()[1], options.directory, getattr(options, "version", None))
        elif options.verb == "journal":
            from infembed_ray.synthesis import journal_upkeep

            return journal_upkeep.run(options.action, options.journal, options.file)
        elif options.verb == "data":
            from infembed_ray.evaluation import mirror

            return mirror.run(options.action, options.directory, options.tasks)
        elif options.verb == "key":
            from infembed_ray.serving.auth import new_key

            print(new_key(options.name, options.file))
            print(
                f"This key is shown once. Serve with api_keys_file={options.file}; delete its line there to revoke it.",
                file=sys.stderr,
            )
        elif options.verb == "mteb":
            from infembed_ray.evaluation import mteb_adapter

            mteb_adapter.run(options.arguments)
        else:
            run_verb(options.verb, options.config, options.overrides)
    except (InputError, StartError) as error:
        print(f"infembed {options.verb}: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        print(f"infembed {options.verb}: interrupted; the same command resumes", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="infembed", description="Retrieval that obeys instructions, at cluster scale."
    )
    parser.add_argument("--version", action="version", version=f"infembed_ray {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, verb in (VERBS | UPKEEP).items():
        _settings_parser(verbs, name, verb)
    listed = verbs.add_parser("index versions", help="the versions of an index, and which is the latest")
    used = verbs.add_parser("index use", help="roll an index back to a version, or forward again")
    verified = verbs.add_parser("index verify", help="read all of an index and the changes to it: is it whole?")
    for index in (listed, used, verified):
        index.add_argument("directory", metavar="DIR", help="the output of `infembed index`")
    used.add_argument("version", metavar="VERSION", help="its id, or how that begins")
    plan = verbs.add_parser("plan", help="what a run needs and costs, before anyone pays for it")
    plans = plan.add_subparsers(dest="what", required=True, metavar="VERB")
    for name, verb in PLANS.items():
        _settings_parser(plans, name, verb).add_argument("--json", action="store_true", help="print JSON, in bytes")
    quickstart = verbs.add_parser("quickstart", help="the whole product, once, on a bundled sample")
    quickstart.add_argument("--directory", default="runs/quickstart", help="where outputs go (default: %(default)s)")
    quickstart.add_argument("--port", type=int, default=8000, help="port of the HTTP API (default: %(default)s)")
    quickstart.add_argument("--keep-serving", action="store_true", help="leave the HTTP API up until interrupted")
    init = verbs.add_parser("init", help="copy the job scripts, their settings files and cluster.yaml into a directory")
    init.add_argument("directory", metavar="DIR", nargs="?", default=".", help="where to (default: here)")
    journal = verbs.add_parser("journal", help="look after a response journal: check, merge, export, import it")
    journal.add_argument("action", choices=("stats", "verify", "compact", "export", "import"))
    journal.add_argument("journal", metavar="DIR", help="the journal's directory")
    journal.add_argument("file", metavar="FILE", nargs="?", help="export to, or import from, this .jsonl file")
    data = verbs.add_parser("data", help="mirror the published data sets that evaluation tasks read, or check a mirror")
    data.add_argument("action", choices=("fetch", "verify"))
    data.add_argument("directory", metavar="DIR", help="the mirror's directory: `data` of `infembed evaluate`")
    data.add_argument("tasks", metavar="TASK", nargs="*", help="followir, mair/dd-15, mair/CAsT_*, bright/biology, ...")
    key = verbs.add_parser("key", help="make an API key for `infembed serve`: prints it, and keeps its hash in a file")
    key.add_argument("name", metavar="NAME", help="whose key it is, or what for")
    key.add_argument("file", metavar="FILE", help="`api_keys_file` of `infembed serve`; made if it is not there")
    mteb = verbs.add_parser("mteb", help="mteb's command line, with models of ours: mteb run -m CHECKPOINT -t TASK")
    mteb.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="as of mteb; try: mteb run --help")
    return parser


def _settings_parser(verbs: Any, name: str, verb: Verb) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=verb.help, epilog=_fields(verb.settings), formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file's")
    return parser


def _fields(settings: type[Settings]) -> str:
    lines = ["settings:"]
    for name, field in settings.model_fields.items():
        default = "required" if field.is_required() else f"default {field.get_default()!r}"
        lines.append(f"  {name:<22} {field.description} ({default})")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
