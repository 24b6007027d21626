"""The `infembed` command. Every verb is one function of its settings; the scripts of jobs/ call the same ones."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from infembed_ray import __version__
from infembed_ray.config import (
    AnalyzeSettings,
    EvaluateSettings,
    ExportSettings,
    IndexSettings,
    ServeSettings,
    Settings,
    SynthesizeSettings,
    TrainSettings,
)
from infembed_ray.errors import InputError
from infembed_ray.progress import say
from infembed_ray.storage import Published


@dataclass(frozen=True)
class Verb:
    """A stage of the product: its settings and the module whose `run(settings)` does it."""

    settings: type[Settings]
    module: str
    help: str


VERBS = {
    "synthesize": Verb(SynthesizeSettings, "infembed_ray.synthesis.distributed", "seeds -> InF-IR records"),
    "analyze": Verb(AnalyzeSettings, "infembed_ray.analysis.report", "records -> quality report"),
    "train": Verb(TrainSettings, "infembed_ray.training.distributed", "records + a backbone -> checkpoint"),
    "export": Verb(ExportSettings, "infembed_ray.modeling.onnx", "checkpoint -> ONNX graph"),
    "evaluate": Verb(EvaluateSettings, "infembed_ray.evaluation.distributed", "checkpoints + records -> tables"),
    "index": Verb(IndexSettings, "infembed_ray.retrieval.distributed", "checkpoint + corpus -> FAISS shards"),
    "serve": Verb(ServeSettings, "infembed_ray.serving.deployments", "checkpoint + index -> HTTP API"),
}


def run_verb(verb: str, config: str | None, overrides: Sequence[str]) -> None:
    """Load the verb's settings and run it; says so when there is nothing to do."""
    entry = VERBS[verb]
    settings = entry.settings.load(config, overrides)
    result = importlib.import_module(entry.module).run(settings)
    if isinstance(result, Published):
        for line in result.account.splitlines():
            say(f"{verb}: {line}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (2 for a user's mistake, in one line on stderr)."""
    options = _parser().parse_args(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers fork after the first use
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # ours are the only ones
    try:
        if options.verb == "quickstart":
            from infembed_ray.quickstart.chain import run

            run(directory=options.directory, port=options.port, keep_serving=options.keep_serving)
        elif options.verb == "journal":
            from infembed_ray.synthesis import journal_upkeep

            return journal_upkeep.run(options.action, options.journal, options.file)
        else:
            run_verb(options.verb, options.config, options.overrides)
    except InputError as error:
        print(f"infembed {options.verb}: {error}", file=sys.stderr)
        return 2
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
    for name, verb in VERBS.items():
        sub = verbs.add_parser(
            name, help=verb.help, epilog=_fields(verb.settings), formatter_class=argparse.RawTextHelpFormatter
        )
        sub.add_argument("--config", metavar="FILE", help="YAML file of settings")
        sub.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file's")
    quickstart = verbs.add_parser("quickstart", help="the whole product, once, on a bundled sample")
    quickstart.add_argument("--directory", default="runs/quickstart", help="where outputs go (default: %(default)s)")
    quickstart.add_argument("--port", type=int, default=8000, help="port of the HTTP API (default: %(default)s)")
    quickstart.add_argument("--keep-serving", action="store_true", help="leave the HTTP API up until interrupted")
    journal = verbs.add_parser("journal", help="look after a response journal: check, merge, export, import it")
    journal.add_argument("action", choices=("stats", "verify", "compact", "export", "import"))
    journal.add_argument("journal", metavar="DIR", help="the journal's directory")
    journal.add_argument("file", metavar="FILE", nargs="?", help="export to, or import from, this .jsonl file")
    return parser


def _fields(settings: type[Settings]) -> str:
    lines = ["settings:"]
    for name, field in settings.model_fields.items():
        default = "required" if field.is_required() else f"default {field.get_default()!r}"
        lines.append(f"  {name:<22} {field.description} ({default})")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
