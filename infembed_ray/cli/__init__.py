"""The `infembed` command."""

import argparse


def _parser() -> argparse.ArgumentParser:
    """Return a parser that has the verbs as subparsers, for tools that count or list them."""
    from infembed_ray.cli.main import GROUPS

    parser = argparse.ArgumentParser(prog="infembed")
    verbs = parser.add_subparsers()
    for name in (name for names in GROUPS.values() for name in names):
        verbs.add_parser(name)
    return parser
