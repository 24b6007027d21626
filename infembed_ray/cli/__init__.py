"""The `infembed` command."""

from __future__ import annotations

import argparse


def _parser() -> argparse.ArgumentParser:
    """Return one parser with a subparser for each verb, which generators of completions and manual pages read."""
    from infembed_ray.cli.main import COMMANDS, GROUPS, parser_of

    parser = argparse.ArgumentParser(prog="infembed")
    verbs = parser.add_subparsers()
    for name in (name for names in GROUPS.values() for name in names):
        parents = [parser_of(name)] if name in COMMANDS else []
        verbs.add_parser(name, parents=parents, add_help=False)
    return parser
